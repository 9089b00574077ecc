"""Keeps transformers from drawing progress bars while this package loads a model: only cli prints."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def quiet_transformers() -> Generator[None]:
    """No bars of transformers inside the block; the caller's own setting comes back afterwards."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    # The GGUF reader draws with tqdm itself and asks no setting; its name for tqdm is the only handle.
    reader: Any = modeling_gguf_pytorch_utils
    bar, bars_before = getattr(reader, "tqdm", None), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    if bar is not None:
        reader.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        if bar is not None:
            reader.tqdm = bar
        if bars_before:
            logging.enable_progress_bar()
