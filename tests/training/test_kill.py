"""A real training process is killed without warning, and another one finishes its work."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file

CONFIG = """
subject: {subject}
layer_index: 2
output: {output}
data:
  corpora: [{{name: news-sample, limit: 40}}]
  positions_per_passage: 3
  max_tokens: 80
  fractions: {{av_sft: 0.5, ar_sft: 0.2, calibration: 0.1, test: 0.2}}
verbalizer:
  {{rank: 4, examples: 480, batch_size: 4, evaluate_every: 1000, evaluate_rows: 8, checkpoint_minutes: 0.01}}
"""


def _command(config, output):
    code = "from dragoman.cli.app import main; main()"
    return [
        sys.executable,
        "-c",
        code,
        "train",
        "verbalizer",
        str(config),
        "--output",
        str(output),
        "--device",
        "cpu",
    ]


def _steps(run):
    metrics = run / "verbalizer" / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_sigkill_at_random_moments_then_resume_ends_with_the_weights_of_a_run_without_kill(
    tiny_llama, tmp_path
):
    subject = tmp_path / "tiny-llama"
    tiny_llama.model.save_pretrained(subject)
    tiny_llama.tokenizer.save_pretrained(subject)
    config = tmp_path / "pair.yaml"
    config.write_text(CONFIG.format(subject=subject, output=tmp_path / "unused"), "utf-8")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run(_command(config, whole), check=True, capture_output=True, timeout=600)
    shutil.copytree(whole / "data", cut / "data")
    # Which attention is faster can be measured differently by another process: both runs take the first's.
    (cut / "verbalizer").mkdir()
    shutil.copy(whole / "verbalizer" / "state-compute.json", cut / "verbalizer")

    for _ in range(3):
        process = subprocess.Popen(
            _command(config, cut), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until, started = _steps(cut) + random.randint(3, 30), time.monotonic()
        while _steps(cut) < until and process.poll() is None and time.monotonic() - started < 300:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert _steps(cut) > 0, "nothing was killed in the middle"
    subprocess.run(_command(config, cut), check=True, capture_output=True, timeout=600)

    expected, found = (
        load_file(run / "verbalizer" / "model" / "adapter_model.safetensors") for run in (whole, cut)
    )
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)
    assert _steps(cut) == _steps(whole) == 120
