"""The policy of numerics holds within its block, and what held before comes back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from interposer._contract.platform import NumericsPolicy, applied
from interposer.errors import ConfigError

LIBRARY = SimpleNamespace(half=True, bfloat=False)
REDUCTIONS = [(LIBRARY, "half"), (LIBRARY, "bfloat")]


def settings() -> tuple[object, ...]:
    return (torch.get_float32_matmul_precision(), LIBRARY.half, LIBRARY.bfloat)


def test_a_policy_applies_within_its_block() -> None:
    before = settings()
    with applied(NumericsPolicy("high", reduce_in_16_bits=True), REDUCTIONS):
        assert settings() == ("high", True, True)
        with applied(NumericsPolicy(), REDUCTIONS):
            assert settings() == ("highest", False, False)
        assert settings() == ("high", True, True)
    assert settings() == before


def test_an_exception_restores_the_settings() -> None:
    before = settings()
    with pytest.raises(ZeroDivisionError), applied(NumericsPolicy("medium"), REDUCTIONS):
        _ = 1 / 0
    assert settings() == before


def test_a_seed_determines_random_numbers() -> None:
    drawn = []
    for _ in range(2):
        with applied(NumericsPolicy(seed=11)):
            drawn.append(torch.rand(4))
    assert torch.equal(*drawn)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="'exact', must be one of highest, high, medium"):
        NumericsPolicy("exact")  # type: ignore[arg-type]
