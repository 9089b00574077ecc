"""Dimension legend and jaxtyping aliases shared by every room.

Legend (axis names as they stand in shape strings):

    batch      rows of one forward pass
    n          vectors or rows in no particular batch
    seq        token positions of a padded batch, pads included
    d_model    width of the residual stream
    blocks     captured blocks, in ascending layer_index
    vocab      entries of the tokenizer's vocabulary
    sites      places where a vector enters, in row-major order
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

Vectors = Float[Tensor, "n d_model"]
"""Raw residual-stream vectors, any float dtype."""

VectorArray = Float32[np.ndarray, "n d_model"]
"""The same on disk and in numpy."""

TokenIds = Int[Tensor, "batch seq"]
AttentionMask = Int[Tensor, "batch seq"]
TokenMask = Bool[Tensor, "batch seq"]
HiddenStates = Float[Tensor, "batch seq d_model"]
Sites = Int[Tensor, "sites 2"]
"""(row, position) pairs."""
