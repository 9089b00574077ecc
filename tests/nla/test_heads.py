from __future__ import annotations

import pytest
import torch

from dragoman.errors import ConfigError
from dragoman.nla.heads import LastTokenLinear, build_head


def test_a_fresh_head_returns_the_last_real_tokens_state_whatever_the_padding_side() -> None:
    hidden = torch.randn(3, 5, 8, dtype=torch.bfloat16)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    read = LastTokenLinear(8)(hidden, mask)
    assert read.dtype == torch.float32
    assert torch.equal(read, torch.stack([hidden[0, 2], hidden[1, 4], hidden[2, 4]]).float())


def test_a_head_is_the_matrix_product_with_its_weight() -> None:
    head = LastTokenLinear(6).requires_grad_(False)
    with torch.no_grad():
        head.weight.normal_()
    hidden = torch.randn(1, 4, 6)
    expected = [sum(float(head.weight[i, j]) * float(hidden[0, 3, j]) for j in range(6)) for i in range(6)]
    read = head(hidden, torch.ones(1, 4, dtype=torch.long))
    torch.testing.assert_close(read[0], torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_an_unknown_head_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="last_token"):
        build_head("attention_pooling_of_the_future", 8)
