"""Provenance, hashes, and run folders, killed and opened twice at once."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.processes import names, run_python

from dragoman import files, runs
from dragoman.errors import ResourceError, RunError
from dragoman.runs import (
    RunFolder,
    content_hash,
    home,
    provenance,
)

CONFIG = {"steps": 10, "model": {"layer_index": 20, "rank": 16}, "lr": 1e-3}


# ---------------------------------------------------------------- provenance and hashes


def test_provenance_names_versions_platform_and_time() -> None:
    record = provenance(seed=3)
    assert {"dragoman", "git_revision", "git_changed", "python", "torch", "transformers", "peft"} < set(
        record
    )
    assert record["torch"] == torch.__version__
    assert record["seed"] == 3
    assert record["created"].endswith("+00:00")
    json.dumps(record)


def test_provenance_imports_none_of_the_packages_whose_versions_it_names() -> None:
    source = (
        "import sys; from dragoman.runs import provenance; r = provenance(); print(sorted({'torch', 'peft'}"
        " & set(sys.modules)), r['torch'] is not None)"
    )
    assert run_python(source).communicate(timeout=60)[0].strip() == "[] True"


def test_the_hash_depends_on_content_alone_and_not_on_order_or_spelling() -> None:
    @dataclass
    class Config:
        lr: float
        layers: tuple[int, ...]

    one = content_hash({"b": 1, "a": Config(0.1, (1, 2))})
    assert one == content_hash({"a": {"layers": [1, 2], "lr": np.float64(0.1)}, "b": 1})
    assert one != content_hash({"a": {"layers": [1, 2], "lr": 0.1}, "b": 2})
    assert re.fullmatch("[0-9a-f]{16}", one)


def test_the_hash_is_the_same_in_every_process() -> None:
    source = "from dragoman.runs import content_hash; print(content_hash({'s': {'x', 'y', 'z'}, 'k': 1}))"
    assert run_python(source).communicate(timeout=60)[0].strip() == content_hash(
        {"k": 1, "s": {"z", "y", "x"}}
    )


def test_home_is_what_the_user_says_else_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", "~/elsewhere")
    assert home() == Path.home() / "elsewhere"
    monkeypatch.setenv("DRAGOMAN_HOME", "")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert home() == Path("/var/cache/me/dragoman")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert home() == Path.home() / ".cache" / "dragoman"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert home() == Path.home() / "Library" / "Caches" / "dragoman"


# ---------------------------------------------------------------- run folders


def test_a_new_folder_holds_the_resolved_config_and_where_it_comes_from(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", CONFIG, kind="train-verbalizer") as run:
        assert not run.resumed
        assert run.config == CONFIG
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == CONFIG
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["kind"] == "train-verbalizer"
    assert record["provenance"]["torch"] == torch.__version__


def test_the_same_config_resumes_with_all_figures_and_states(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG, kind="k") as run:
        run.log(step=1, loss=torch.tensor(2.5), gap=np.float32(0.25))
        run.save_state("sampler", position=7, seed=3)
    with RunFolder.open(tmp_path, dict(reversed(CONFIG.items())), kind="k") as run:
        assert run.resumed
        assert run.state("sampler") == {"position": 7, "seed": 3}
        assert run.state("never-saved") is None
        run.log(step=2, loss=float("nan"))
        first, second = run.metrics()
    assert (first["step"], first["loss"], first["gap"]) == (1, 2.5, 0.25)
    assert (second["step"], second["loss"]) == (2, None)
    assert abs(first["time"] - time.time()) < 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 2e-3}, r"lr = 0\.001.*lr = 0\.002"),
        ({"model": {"layer_index": 21, "rank": 16}}, r"model\.layer_index = 20.*model\.layer_index = 21"),
        ({"model": {"layer_index": 20}}, r"model\.rank = 16.*model\.rank = absent"),
        ({"warmup": 5}, r"warmup = absent.*warmup = 5"),
        ({"steps": "10"}, r'steps = 10\. Expected: steps = "10"'),
    ],
)
def test_another_config_is_refused_by_its_first_differing_key(tmp_path: Path, change, message) -> None:
    RunFolder.open(tmp_path, CONFIG, kind="k").close()
    with pytest.raises(RunError, match=message):
        RunFolder.open(tmp_path, {**CONFIG, **change}, kind="k")
    with RunFolder.open(tmp_path, CONFIG, kind="k") as run:  # the refusal let go of the lock
        assert run.resumed


def test_another_kind_of_run_is_refused(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, CONFIG, kind="train-verbalizer").close()
    with pytest.raises(RunError, match=r"'train-verbalizer'.*'train-reconstructor'"):
        RunFolder.open(tmp_path, CONFIG, kind="train-reconstructor")


def test_a_damaged_config_is_named_and_not_overwritten(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, CONFIG, kind="k").close()
    (tmp_path / "config.json").write_text('{"steps": ')
    with pytest.raises(RunError, match=r"config\.json is missing or is not JSON"):
        RunFolder.open(tmp_path, CONFIG, kind="k")
    assert (tmp_path / "config.json").read_text() == '{"steps": '


def test_a_folder_killed_before_its_config_was_written_is_new(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"kind": "another"}')
    with RunFolder.open(tmp_path, CONFIG, kind="k") as run:
        assert not run.resumed


def test_a_config_refused_before_any_work_does_not_hold_the_folder(tmp_path: Path) -> None:
    def refused(error: BaseException, config: dict, work: bool = False) -> None:
        with pytest.raises(type(error)), RunFolder.open(tmp_path, config, kind="t") as run:
            if work:
                run.log(step=1)
            raise error

    wrong = RunError("no", expected="e", consequence="c", remedy="r")
    refused(wrong, {"rank": 1})
    refused(KeyboardInterrupt(), {"rank": 2})
    with pytest.raises(RunError, match="rank"):
        RunFolder.open(tmp_path, {"rank": 3}, kind="t")
    (tmp_path / "config.json").unlink()
    refused(wrong, {"rank": 4}, work=True)
    with pytest.raises(RunError, match="rank"):
        RunFolder.open(tmp_path, {"rank": 5}, kind="t")


def test_a_second_opening_in_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with (
        RunFolder.open(tmp_path, CONFIG, kind="k"),
        pytest.raises(RunError, match=f"process {os.getpid()} on "),
    ):
        RunFolder.open(tmp_path, CONFIG, kind="k")


def test_a_folder_that_cannot_be_made_is_a_resource_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written"):
        RunFolder.open(tmp_path / "file" / "run", CONFIG, kind="k")


def test_a_torn_last_line_is_dropped_when_reading_and_cut_when_resuming(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG, kind="k") as run:
        run.log(step=1)
        with (tmp_path / "metrics.jsonl").open("ab") as handle:
            handle.write(b'{"step": 2, "lo')
        assert [line["step"] for line in run.metrics()] == [1]
    with RunFolder.open(tmp_path, CONFIG, kind="k") as run:
        run.log(step=2)
        assert [line["step"] for line in run.metrics()] == [1, 2]


def test_a_broken_line_in_the_middle_is_an_error_and_not_a_gap(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG, kind="k") as run:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 3}\n')
        with pytest.raises(RunError, match="line 2 that is not JSON"):
            run.metrics()


def test_rewinding_drops_the_steps_after_the_checkpoint_alone(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG, kind="k") as run:
        for step in range(5):
            run.log(step=step)
        run.log(note="no step")
        run.rewind(2)
        assert [line.get("step") for line in run.metrics()] == [0, 1, 2, None]


def test_a_full_disk_while_logging_leaves_only_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder.open(tmp_path, CONFIG, kind="k") as run:
        run.log(step=1)
        write = io.FileIO.write

        class HalfWrittenFile(io.FileIO):
            def write(self, data):
                return write(self, data[:5])

        monkeypatch.setattr(Path, "open", lambda self, mode, buffering=-1: HalfWrittenFile(self, mode))
        with pytest.raises(ResourceError, match=r"metrics\.jsonl"):
            run.log(step=2)
        monkeypatch.undo()
        assert [line["step"] for line in run.metrics()] == [1]
        run.log(step=3)
        assert [line["step"] for line in run.metrics()] == [1, 3]


def test_the_temporaries_of_a_killed_writer_are_swept_when_the_run_is_opened(tmp_path: Path) -> None:
    (tmp_path / f"{files.TEMPORARY_PREFIX}dead.parquet").write_text("half")
    (tmp_path / f"{files.TEMPORARY_PREFIX}deadfolder").mkdir()
    (tmp_path / "kept.parquet").write_text("whole")
    with RunFolder.open(tmp_path, CONFIG, kind="k"):
        assert "kept.parquet" in names(tmp_path)
        assert not [name for name in names(tmp_path) if name.startswith(files.TEMPORARY_PREFIX)]


# ---------------------------------------------------------------- several processes, and kills

HOLD = """
import sys, time
from dragoman.runs import RunFolder
run = RunFolder.open(sys.argv[1], {"steps": 1}, kind="k")
print("resumed" if run.resumed else "new", flush=True)
step = len(run.metrics())
while True:
    step += 1
    run.log(step=step, padding="x" * 2000)
    run.save_state("position", step=step, padding="y" * 200_000)
"""


def test_a_second_process_is_told_who_holds_the_folder_since_when_and_where(tmp_path: Path) -> None:
    holder = run_python(HOLD, tmp_path)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "new"
        with pytest.raises(
            RunError, match=rf"in use by process {holder.pid} on \S+ since \d{{4}}-\d\d-\d\dT"
        ):
            RunFolder.open(tmp_path, {"steps": 1}, kind="k")
    finally:
        holder.kill()
        holder.communicate(timeout=20)


def test_killed_again_and_again_a_run_resumes_with_every_line_and_state_whole(tmp_path: Path) -> None:
    steps = 0
    for turn in range(4):
        worker = run_python(HOLD, tmp_path)
        assert worker.stdout is not None
        assert worker.stdout.readline().strip() == ("resumed" if turn else "new")
        time.sleep(0.05 + 0.07 * turn)
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=20)
        with RunFolder.open(tmp_path, {"steps": 1}, kind="k") as run:
            assert run.resumed
            lines = run.metrics()
            assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
            state = run.state("position")
            assert state is not None
            assert lines[-1]["step"] - state["step"] in (0, 1)
            assert len(state["padding"]) == 200_000
        assert len(lines) > steps
        steps = len(lines)


CLAIM = """
import sys, time
from dragoman.errors import RunError
from dragoman.runs import RunFolder
while time.time() < float(sys.argv[2]):
    pass
try:
    run = RunFolder.open(sys.argv[1], {"steps": 1}, kind="k")
except RunError as error:
    print("refused", error)
else:
    print("held", flush=True)
    sys.stdin.readline()
    time.sleep(1.5)
"""


def test_of_processes_that_start_at_the_same_moment_exactly_one_gets_the_folder(tmp_path: Path) -> None:
    start = str(time.time() + 1.5)
    workers = [run_python(CLAIM, tmp_path / "run", start) for _ in range(4)]
    outputs = [worker.communicate(timeout=60) for worker in workers]
    answers = sorted(output.split()[0] for output, _ in outputs)
    assert answers == ["held", "refused", "refused", "refused"], outputs


def test_closing_twice_is_fine_and_frees_the_folder(tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path, CONFIG, kind="k")
    run.close()
    run.close()
    assert "lock.json" not in names(tmp_path)
    with RunFolder.open(tmp_path, CONFIG, kind="k") as again:
        assert again.resumed


def test_the_public_names_of_runs_are_there() -> None:
    assert all(hasattr(runs, name) for name in runs.__all__)
