"""The stages of a pair: sets → verbalizer, reconstructor → refit → pair folder.

Each stage has its run folder below the config's `output` and knows when it is finished, so that any verb can
be repeated and goes on where the last one stopped:

    output/data          sets of vectors with explanations (datagen)
    output/verbalizer    metrics.jsonl, checkpoint/, model/
    output/reconstructor likewise, on reference explanations
    output/refit         likewise, on the verbalizer's words
    output/pair          the result: pair.json, av/, ar/, train.yaml
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch

from dragoman.datagen.sets import HELD_OUT, prepare_sets, recorded_compute
from dragoman.errors import ConfigError
from dragoman.evaluation.stats import Calibration, calibrate_threshold, derange_across_groups
from dragoman.nla import Decoding, Pair, Reconstructor, Verbalizer, save_pair
from dragoman.nla.adapters import attach_lora
from dragoman.runs import Progress, RunFolder
from dragoman.scaling import normalised_mse
from dragoman.subjects import Compute, Subject, load_subject, measure_attention
from dragoman.training.config import PairConfig, StageConfig
from dragoman.training.contract import Contract, check_prompt, make_contract
from dragoman.training.loop import FINISHED, MODEL, Listener, train
from dragoman.training.refit import refit_rows
from dragoman.training.rows import Rows, read_rows
from dragoman.training.tasks import ReconstructorTask, Task, VerbalizerTask

StageName = Literal["verbalizer", "reconstructor", "refit"]
STAGES: tuple[StageName, ...] = ("verbalizer", "reconstructor", "refit")
AV_SPLIT, AR_SPLIT, CALIBRATION_SPLIT = "av_sft", "ar_sft", "calibration"
REQUIRED_SPLITS = (AV_SPLIT, AR_SPLIT, CALIBRATION_SPLIT, HELD_OUT)


def _no_bar(description: str) -> AbstractContextManager[Progress | None]:
    return nullcontext(None)


@dataclass
class Watch:
    """How a caller follows the stages; the defaults are silent.

    Attributes:
        bar: opens a progress display for a described piece of work.
        listener: hears of every optimiser step.
    """

    bar: Callable[[str], AbstractContextManager[Progress | None]] = field(default=_no_bar)
    listener: Listener | None = None


class PairTraining:
    """One config on its way to a pair.

    Args:
        config: the whole pair's config.
        output: overrides the config's output folder.
        device: where the subject goes.
        watch: progress displays.

    Raises:
        ConfigError: the data section lacks a split that a stage needs, or the layer is not the subject's.
    """

    def __init__(
        self,
        config: PairConfig,
        *,
        output: Path | None = None,
        device: str = "auto",
        watch: Watch | None = None,
    ) -> None:
        _check_splits(config)
        self.config = config
        self.output = Path(config.output) if output is None else output
        self.watch = watch or Watch()
        self._device = device
        self._subject: Subject | None = None
        self._sets: dict[str, Path] | None = None

    @property
    def subject(self) -> Subject:
        """The frozen model; loaded on first use, computing as the folder's sets were begun."""
        if self._subject is None:
            recorded = recorded_compute(self.output / "data")
            with self.watch.bar(f"loading {self.config.subject}") as progress:
                self._subject = load_subject(
                    self.config.subject, device=self._device, compute=recorded, progress=progress
                )
            _check_layer(self.config, self._subject)
            check_prompt(self._subject, self.config)
        return self._subject

    def sets(self) -> dict[str, Path]:
        """The Parquet file of each split, made where it is missing."""
        if self._sets is None:
            with self.watch.bar("capturing vectors") as progress:
                self._sets = prepare_sets(self.subject, self.config.data, self.output / "data", progress)
        return self._sets

    def contract(self) -> Contract:
        """The sidecars of both halves."""
        return make_contract(self.subject, self.config, self.sets()[AV_SPLIT])

    # --- stages ----------------------------------------------------------------------------------------

    def train_verbalizer(self) -> dict[str, float]:
        """Train the AV on its split; returns its held-out figures (see `VerbalizerTask.evaluate`)."""
        stage = self.config.verbalizer
        with self._open("verbalizer", stage) as run:
            if (done := _finished(run)) is not None:
                return done
            self._compute_for_training(run)
            full = stage.method == "full"
            verbalizer = Verbalizer.from_subject(self.subject, self.contract().av, own_weights=full)
            if not full:
                attach_lora(verbalizer.model, stage.rank, stage.alpha, dtype=None, seed=stage.seed)
            return self._train(run, VerbalizerTask(verbalizer), stage, self._rows(AV_SPLIT), "verbalizer")

    def train_reconstructor(self) -> dict[str, float]:
        """Train the AR on reference explanations; returns its held-out figures."""
        stage = self.config.reconstructor
        with self._open("reconstructor", stage) as run:
            if (done := _finished(run)) is not None:
                return done
            self._compute_for_training(run)
            full = stage.method == "full"
            reconstructor = Reconstructor.from_subject(
                self.subject, self.config.layer_index, self.contract().ar, own_weights=full
            )
            if not full:
                attach_lora(_backbone(reconstructor), stage.rank, stage.alpha, dtype=None, seed=stage.seed)
            task = ReconstructorTask(reconstructor)
            return self._train(run, task, stage, self._rows(AR_SPLIT), "reconstructor")

    def refit_reconstructor(self) -> dict[str, float]:
        """Train the AR on the AV's own words; both must be trained before.

        Raises:
            ConfigError: the verbalizer or the reconstructor is not trained yet.
        """
        stage = self.config.refit
        models = {name: self._trained(name) for name in ("verbalizer", "reconstructor")}
        with self._open("refit", stage) as run:
            if (done := _finished(run)) is not None:
                return done
            self._compute_for_training(run)
            verbalizer = Verbalizer.load(models["verbalizer"], self.subject)
            with self.watch.bar("verbalizing") as progress:
                rows = refit_rows(run, verbalizer, self._rows(AR_SPLIT), stage, progress=progress)
            del verbalizer
            reconstructor = _trainable_reconstructor(models["reconstructor"], self.subject)
            return self._train(run, ReconstructorTask(reconstructor), stage, rows, "refit")

    def assemble(self) -> Path:
        """Calibrate the low-score threshold and write `output/pair`.

        Raises:
            ConfigError: a stage is missing.
        """
        av, ar = self._trained("verbalizer"), self._trained("refit")
        pair = Pair(Verbalizer.load(av, self.subject), Reconstructor.load(ar, self.subject))
        calibration = self._calibrate(pair)
        updates: dict[str, Any] = {"score_threshold": calibration.threshold}
        verbalizer = Verbalizer.load(av, self.subject, merge=False)
        reconstructor = Reconstructor.load(ar, self.subject, merge=False)
        verbalizer.sidecar = verbalizer.sidecar.model_copy(update=updates)
        reconstructor.sidecar = reconstructor.sidecar.model_copy(update=updates)
        return save_pair(
            self.output / "pair",
            verbalizer,
            reconstructor,
            name=f"{self.config.subject}-L{self.config.layer_index}",
            extra={"calibration": calibration.to_json(), "training": self._summary()},
            texts={"train.yaml": _as_yaml(self.config)},
        )

    # --- phases of a stage -----------------------------------------------------------------------------

    def _open(self, name: StageName, stage: StageConfig) -> RunFolder:
        config = self.config
        # The refit depends on what both halves were trained with, not only on its own section.
        earlier = ("verbalizer", "reconstructor") if name == "refit" else ()
        identity = {
            "subject": config.subject,
            "layer_index": config.layer_index,
            "data": config.data.model_dump(mode="json"),
            "prompt": config.prompt.model_dump(mode="json"),
            "injection_scale": config.injection_scale,
            "max_new_tokens": config.max_new_tokens,
            **{each: getattr(config, each).model_dump(mode="json") for each in earlier},
            name: stage.model_dump(mode="json"),
        }
        return RunFolder.open(self.output / name, identity, kind=f"train-{name}")

    def _compute_for_training(self, run: RunFolder) -> None:
        """Measure which attention trains faster here, once a run; a resumed run keeps what it began with."""
        recorded = run.state("compute")
        if recorded is None:
            compute = measure_attention(self.subject, training=True)
            run.save_state("compute", **compute.to_json())
        else:
            compute = Compute.from_json(recorded)
        self.subject.model.set_attn_implementation(compute.attention)

    def _train(
        self,
        run: RunFolder,
        task: Task,
        stage: StageConfig,
        rows: Rows,
        name: str,
    ) -> dict[str, float]:
        with self.watch.bar(f"training the {name}") as progress:
            return train(
                run,
                task,
                stage,
                rows,
                self._rows(HELD_OUT),
                progress=progress,
                listener=self.watch.listener,
            )

    def _rows(self, split: str) -> Rows:
        return read_rows(self.sets()[split])

    def _trained(self, name: StageName) -> Path:
        folder = self.output / name
        if not (folder / f"state-{FINISHED}.json").is_file():
            verb = "pair" if name == "refit" else name
            raise ConfigError(
                f"{folder} holds no finished {name}",
                expected="a stage that was trained to its end",
                consequence="a half-trained model would be taken for a trained one",
                remedy=f"run `dragoman train {verb} CONFIG`; it resumes where it stopped",
            )
        return folder / MODEL

    def _calibrate(self, pair: Pair) -> Calibration:
        rows = self._rows(CALIBRATION_SPLIT).sample(512, seed=0)
        with self.watch.bar("calibrating the score") as progress:
            explanations = pair.explain(rows.vectors, Decoding(), progress=progress)
        said = [number for number, explanation in enumerate(explanations) if explanation.text.strip()]
        rows = rows.take(said)
        predicted = pair.reconstruct([explanations[number].text for number in said])
        baseline = pair.sidecar.baseline
        assert baseline is not None, "make_contract always stores one"
        partner = torch.from_numpy(derange_across_groups(rows.documents))
        real, shuffled = (
            (1.0 - normalised_mse(predicted, target) / baseline.raw_variance).double().numpy()
            for target in (rows.vectors, rows.vectors[partner])
        )
        return calibrate_threshold(real, shuffled)

    def _summary(self) -> dict[str, Any]:
        """Held-out figures and cost of every stage, from its own run folder."""
        summary: dict[str, Any] = {}
        for name in STAGES:
            with self._open(name, getattr(self.config, name)) as run:
                summary[name] = {"finished": run.state(FINISHED), "compute": run.state("compute")}
        return summary


def _finished(run: RunFolder) -> dict[str, float] | None:
    state = run.state(FINISHED)
    return None if state is None else dict(state["figures"])


def _trainable_reconstructor(folder: Path, subject: Subject) -> Reconstructor:
    reconstructor = Reconstructor.load(folder, subject, trainable=True)
    # Adapters in the layer's dtype with float32 masters are faster than float32 adapters; see attach_lora.
    for name, parameter in reconstructor.trainable_parameters().items():
        if name.startswith("backbone."):
            parameter.data = parameter.data.to(subject.compute.dtype)
    return reconstructor


def _backbone(reconstructor: Reconstructor) -> torch.nn.Module:
    return cast(torch.nn.Module, reconstructor.backbone.text_model)


def _check_splits(config: PairConfig) -> None:
    missing = [name for name in REQUIRED_SPLITS if config.data.fractions.get(name, 0.0) <= 0.0]
    if missing:
        raise ConfigError(
            f"data.fractions gives nothing to {', '.join(missing)}",
            expected=f"a share of the documents for each of {', '.join(REQUIRED_SPLITS)}",
            consequence="a stage would have no rows, or be measured on documents it was trained on",
            remedy="add these splits to data.fractions; the shares must sum to 1",
        )


def _check_layer(config: PairConfig, subject: Subject) -> None:
    if config.layer_index >= subject.num_layers:
        raise ConfigError(
            f"layer_index is {config.layer_index}",
            expected=f"0 to {subject.num_layers - 1}: {subject.name} has {subject.num_layers} blocks",
            consequence="there would be no vectors to read",
            remedy=f"two thirds of the depth is a good start: {round(subject.num_layers * 2 / 3)}",
        )


def _as_yaml(config: PairConfig) -> str:
    import yaml

    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
