from __future__ import annotations

import random
import secrets
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError

from dragoman.activations import VectorReader
from dragoman.datagen import sets
from dragoman.datagen.config import CorpusSpec, DataConfig
from dragoman.datagen.extractive import Extractor
from dragoman.datagen.plan import make_plan
from dragoman.datagen.sets import prepare_sets, read_counts, recorded_compute
from dragoman.errors import ConfigError, CorpusError, RunError
from dragoman.runs import RunFolder
from dragoman.sidecar import read_sidecar
from dragoman.subjects import Subject

_NOUNS = "ship harbour salt captain crew river mountain winter bread letter music stone garden window"
WORDS = _NOUNS.split()


def write_corpus(path: Path, documents: int = 40) -> list[str]:
    texts = [
        " ".join(
            f"The {random.choice(WORDS)} of {secrets.token_hex(3)} saw a {random.choice(WORDS)}."
            for _ in range(n)
        )
        for n in (random.randint(5, 30) for _ in range(documents))
    ]
    path.write_bytes(b"\n".join(orjson.dumps({"text": text}) for text in texts))
    return texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "letters.jsonl"
    write_corpus(path)
    return path


def config_for(corpus: Path, **changes) -> DataConfig:
    return DataConfig(
        **{
            "corpora": (CorpusSpec(name=str(corpus)),),
            "layer_index": 2,
            "positions_per_passage": 4,
            "min_position": 20,
            "max_tokens": 96,
            "fractions": {"av_sft": 0.4, "ar_sft": 0.3, "test": 0.3},
            "shard_passages": 8,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def made(corpus, tiny_llama, tmp_path_factory) -> dict[str, Path]:
    return prepare_sets(tiny_llama, config_for(corpus), tmp_path_factory.mktemp("made") / "out")


def rows(files: dict[str, Path]) -> dict[tuple[str, int], dict]:
    found = {}
    for split, path in files.items():
        with VectorReader(path) as reader:
            vectors = reader.read_vectors()
            for vector, row in zip(vectors, reader.read_table().to_pylist(), strict=True):
                found[row["passage_id"], row["n_raw_tokens"]] = {**row, "split": split, "vector": vector}
    return found


def comparable(row: dict) -> dict:
    return {name: value for name, value in row.items() if name not in ("vector", "doc_order")}


def test_no_document_stands_in_two_splits_and_every_split_has_rows(made):
    splits = defaultdict(set)
    for row in rows(made).values():
        splits[row["doc_id"]].add(row["split"])
    assert len(splits) > 20
    assert all(len(found) == 1 for found in splits.values())
    assert set(made) == {"av_sft", "ar_sft", "test"} == set.union(*splits.values())


def test_the_sample_does_not_change_with_shards_batches_or_the_order_of_documents(
    corpus, made, tiny_llama, tmp_path
):
    lines = corpus.read_bytes().split(b"\n")
    random.shuffle(lines)
    shuffled = tmp_path / "letters.jsonl"
    shuffled.write_bytes(b"\n".join(lines))
    other = prepare_sets(
        tiny_llama, config_for(shuffled, shard_passages=3, batch_tokens=150), tmp_path / "out"
    )
    first, second = rows(made), rows(other)
    assert first.keys() == second.keys()
    for key, row in first.items():
        assert comparable(row) == comparable(second[key])
        np.testing.assert_allclose(row["vector"], second[key]["vector"], rtol=1e-4, atol=1e-4)


def test_every_vector_is_the_blocks_output_on_the_passage_and_stays_raw(corpus, made, tiny_llama):
    plan = make_plan(tiny_llama, config_for(corpus))
    found = rows(made)
    for item in random.sample(plan.items, 10):
        with torch.no_grad():
            states = tiny_llama.model(
                torch.tensor([item.passage.ids]), output_hidden_states=True
            ).hidden_states
        for position in item.positions:
            vector = found[item.passage.passage_id, position + 1]["vector"]
            np.testing.assert_allclose(vector, states[3][0, position].numpy(), rtol=1e-4, atol=1e-4)


def test_columns_agree_with_one_another(corpus, made, tiny_llama):
    passages = {i.passage.passage_id: i.passage for i in make_plan(tiny_llama, config_for(corpus)).items}
    for (passage_id, n_raw_tokens), row in rows(made).items():
        passage, text = passages[passage_id], row["detokenized_text_truncated"]
        assert row["doc_id"] == passage.doc_id
        assert n_raw_tokens - 1 >= 20
        assert row["token_id"] == passage.ids[n_raw_tokens - 1]
        assert passage.text.startswith(text) and text.endswith(row["token_string"])
        assert row["token_string"] == tiny_llama.token_strings([row["token_id"]])[0]
        assert (row["activation_layer"], row["corpus"]) == (2, "letters.jsonl")
        # SmolLM2 gives the space before a number a token of its own.
        ending = text.split()[-1] if row["token_string"].strip() else row["token_string"]
        assert f'Ends in "{ending}": "' in row["explanation"]


def test_document_frequencies_come_from_training_passages_only(corpus, made, tiny_llama):
    plan = make_plan(tiny_llama, config_for(corpus))
    training = [item.passage.text for item in plan.items if item.split != "test"]
    held_out = [item.passage.text for item in plan.items if item.split == "test"]
    assert list(plan.training_texts()) == training and held_out
    extractor = Extractor.fit(training)
    for row in rows(made).values():
        expected = extractor.explain(row["detokenized_text_truncated"], row["token_string"])
        assert row["explanation"] == expected


def test_counts_and_sidecars_say_what_is_there(corpus, made, tiny_llama):
    folder = made["test"].parent
    counts, found = read_counts(folder), rows(made)
    assert counts["vectors"] == len(found) == sum(split["vectors"] for split in counts["splits"].values())
    read = counts["corpora"]["letters.jsonl"]
    assert read["documents"] == 40 and 0 < read["short_documents"] + read["used"]["documents"] <= 40
    sidecar = read_sidecar(made["av_sft"])
    assert (sidecar.kind, sidecar.d_model, sidecar.extraction.layer_index) == ("nla_dataset", 32, 2)
    assert sidecar.extraction.base_model == "tiny-llama"
    norms = [np.linalg.norm(row["vector"]) for row in found.values() if row["split"] != "test"]
    assert sidecar.norm_quantiles == pytest.approx(
        {"p001": np.quantile(norms, 0.001), "p50": np.median(norms), "p999": np.quantile(norms, 0.999)},
        rel=1e-5,
    )
    assert sidecar.provenance["data"] == config_for(corpus).model_dump(mode="json")


class Interrupted(Exception):
    pass


def test_a_run_stopped_after_any_shard_resumes_to_the_same_bytes(corpus, made, tiny_llama, tmp_path):
    reached = 0

    def stop(done: int, total: int, unit: str) -> None:
        nonlocal reached
        if unit == "vectors" and done > reached:
            reached = done
            if random.random() < 0.5:
                raise Interrupted

    stops = 0
    while True:
        try:
            files = prepare_sets(tiny_llama, config_for(corpus), tmp_path / "out", stop)
            break
        except Interrupted:
            stops += 1
            assert not list((tmp_path / "out").glob("*.parquet"))
            assert stops < 100, "no progress is kept"
    for split, path in made.items():
        assert files[split].read_bytes() == path.read_bytes()
    assert not (tmp_path / "out" / "shards").exists()


def test_finished_sets_are_reused_without_running_the_model(corpus, made, tiny_llama, monkeypatch):
    def unexpected(*_args, **_options):
        raise AssertionError("captured again")

    monkeypatch.setattr(sets, "capture", unexpected)
    assert prepare_sets(tiny_llama, config_for(corpus), made["test"].parent) == made


def test_a_lost_file_is_made_again(corpus, made, tiny_llama, tmp_path):
    out = tmp_path / "out"
    files = prepare_sets(tiny_llama, config_for(corpus), out)
    files["ar_sft"].unlink()
    again = prepare_sets(tiny_llama, config_for(corpus), out)
    assert again["ar_sft"].read_bytes() == made["ar_sft"].read_bytes()


def test_shards_left_by_a_kill_while_tidying_up_are_removed(corpus, tiny_llama, tmp_path):
    out = tmp_path / "out"
    prepare_sets(tiny_llama, config_for(corpus), out)
    (out / "shards").mkdir()
    (out / "shards" / "left.parquet").write_bytes(b"x")
    prepare_sets(tiny_llama, config_for(corpus), out)
    assert not (out / "shards").exists()


def test_another_config_in_the_same_folder_is_refused_with_the_key_that_differs(corpus, made, tiny_llama):
    with pytest.raises(RunError, match="layer_index"):
        prepare_sets(tiny_llama, config_for(corpus, layer_index=1), made["test"].parent)


def test_a_changed_corpus_file_is_another_config(tiny_llama, tmp_path):
    path = tmp_path / "letters.jsonl"
    write_corpus(path)
    prepare_sets(tiny_llama, config_for(path), tmp_path / "out")
    write_corpus(path)
    with pytest.raises(RunError, match="sources"):
        prepare_sets(tiny_llama, config_for(path), tmp_path / "out")


def test_a_second_process_is_told_that_the_folder_is_in_use(corpus, tiny_llama, tmp_path):
    out, config = tmp_path / "out", config_for(corpus)
    with RunFolder.open(out, sets._identity(tiny_llama, config, None), kind="data"):  # noqa: SIM117
        with pytest.raises(RunError, match=r"(?i)pid|process"):
            prepare_sets(tiny_llama, config, out)


def test_a_folder_begun_in_another_dtype_is_refused(corpus, tiny_llama, tmp_path):
    out = tmp_path / "out"

    def stop(done: int, total: int, unit: str) -> None:
        if unit == "vectors":
            raise Interrupted

    with pytest.raises(Interrupted):
        prepare_sets(tiny_llama, config_for(corpus), out, stop)
    assert recorded_compute(out) == tiny_llama.compute
    other = Subject(
        tiny_llama.name,
        tiny_llama.model,
        tiny_llama.tokenizer,
        replace(tiny_llama.compute, dtype=torch.bfloat16),
    )
    with pytest.raises(RunError, match="float32"):
        prepare_sets(other, config_for(corpus), out)


def test_a_smaller_limit_takes_a_part_of_what_a_larger_one_takes(corpus, tiny_llama):
    def passages(**changes) -> set[str]:
        spec = CorpusSpec(name=str(corpus), **changes)
        return {
            i.passage.passage_id for i in make_plan(tiny_llama, config_for(corpus, corpora=(spec,))).items
        }

    small, large, everything = passages(limit=20), passages(limit=35), passages()
    assert len(small) == 20 and len(large) == 35
    assert small < large < everything


def test_some_splits_alone_have_the_rows_they_have_beside_the_others(corpus, made, tiny_llama, tmp_path):
    alone = prepare_sets(tiny_llama, config_for(corpus), tmp_path / "out", splits=("test",))
    assert list(alone) == ["test"]
    table = pq.read_table(alone["test"])
    assert table.num_rows > 0 and table.equals(pq.read_table(made["test"]))


def test_the_number_of_vectors_is_bounded_exactly(corpus, tiny_llama):
    plan = make_plan(tiny_llama, config_for(corpus, max_vectors=101))
    assert plan.n_vectors == 101
    whole = {
        (i.passage.passage_id, p)
        for i in make_plan(tiny_llama, config_for(corpus)).items
        for p in i.positions
    }
    assert {(i.passage.passage_id, p) for i in plan.items for p in i.positions} <= whole


def test_a_corpus_can_have_positions_of_its_own(corpus, tiny_llama):
    spec = CorpusSpec(name=str(corpus), positions_per_passage=7)
    plan = make_plan(tiny_llama, config_for(corpus, corpora=(spec,)))
    assert max(len(item.positions) for item in plan.items) == 7


def test_bfloat16_storage_rounds_and_does_nothing_else(corpus, made, tiny_llama, tmp_path):
    rounded = rows(prepare_sets(tiny_llama, config_for(corpus, value_type="bfloat16"), tmp_path / "out"))
    for key, row in rows(made).items():
        expected = torch.from_numpy(row["vector"]).to(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(rounded[key]["vector"], expected)


def test_a_corpus_of_short_documents_is_refused_with_their_number(tiny_llama, tmp_path):
    path = tmp_path / "short.jsonl"
    path.write_text("\n".join(f'{{"text": "only {n} words"}}' for n in range(5)))
    with pytest.raises(CorpusError, match="5 documents, 5 of them too short"):
        prepare_sets(tiny_llama, config_for(path), tmp_path / "out")


def test_passages_longer_than_the_model_takes_are_refused(corpus, tiny_llama, tmp_path):
    with pytest.raises(ConfigError, match="512"):
        prepare_sets(tiny_llama, config_for(corpus, max_tokens=513), tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"corpora": ()},
        {"corpora": ({"name": "a"}, {"name": "a"})},
        {"corpora": ({"name": "a", "limits": 3},)},
        {"fractions": {"av_sft": 1.0}},
        {"fractions": {"test": 1.0}},
        {"fractions": {"av_sft": 0.5, "test": 0.4}},
        {"fractions": {"../x": 0.5, "test": 0.5}},
        {"max_tokens": 20},
        {"layer_index": -1},
        {"unknown": 1},
    ],
)
def test_a_config_that_cannot_work_is_refused_at_the_door(change):
    with pytest.raises(ValidationError):
        config_for(Path("x"), **change)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from dragoman.datagen.sets import DataConfig, prepare_sets
from dragoman.subjects import load_subject
config, out, stop = DataConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(int(sys.argv[4]))
seen = 0
def progress(done, total, unit):
    global seen
    seen += unit == "vectors"
    if seen == stop:
        os.kill(os.getpid(), signal.SIGKILL)
subject = load_subject("smollm2-135m", device="cpu", dtype="float32", attention="sdpa")
prepare_sets(subject, config, out, progress)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sigkill_in_the_middle_then_resume_gives_the_bytes_of_a_run_without_kill(
    corpus, smollm2_fp32, tmp_path
):
    config = config_for(corpus, layer_index=10, shard_passages=10, max_vectors=200)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    # As many threads as here: they decide how sums are split, and with that the last bit.
    options = [config.model_dump_json(), str(killed), "3", str(torch.get_num_threads())]
    child = subprocess.run([sys.executable, "-c", KILLED, *options], timeout=800, check=False)
    assert child.returncode == -signal.SIGKILL
    assert len(list((killed / "shards").glob("*.parquet"))) == 3
    resumed = prepare_sets(smollm2_fp32, config, killed)
    for split, path in prepare_sets(smollm2_fp32, config, whole).items():
        assert path.read_bytes() == resumed[split].read_bytes()
        assert pq.read_table(path).num_rows > 0
    assert not list(killed.rglob(".tmp-*"))
