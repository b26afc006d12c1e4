"""The policy of numerics holds within its block, and what held before comes back."""

from __future__ import annotations

import pytest
import torch

from interposer.errors import ConfigError
from interposer_cuda.numerics import NumericsPolicy, applied


def settings() -> tuple[object, ...]:
    matmul = torch.backends.cuda.matmul
    return (
        torch.get_float32_matmul_precision(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )


def test_it_holds_within_the_block() -> None:
    before = settings()
    with applied(NumericsPolicy("high", reduce_in_16_bits=True)):
        assert settings() == ("high", True, True)
        with applied(NumericsPolicy()):
            assert settings() == ("highest", False, False)
        assert settings() == ("high", True, True)
    assert settings() == before


def test_what_is_raised_leaves_the_settings_alone() -> None:
    before = settings()
    with pytest.raises(ZeroDivisionError), applied(NumericsPolicy("medium")):
        _ = 1 / 0
    assert settings() == before


def test_a_seed_decides_what_is_drawn() -> None:
    drawn = []
    for _ in range(2):
        with applied(NumericsPolicy(seed=11)):
            drawn.append(torch.rand(4))
    assert torch.equal(*drawn)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="'exact', must be one of highest, high, medium"):
        NumericsPolicy("exact")  # type: ignore[arg-type]
