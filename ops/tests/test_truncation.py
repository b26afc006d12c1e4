from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer_ops.sampling import temper, truncation_threshold


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.integers(1, 60),
    temperature=st.sampled_from([0.1, 0.5, 1.0, 1.7, 5.0]),
    top_k=st.none() | st.integers(1, 70),
    top_p=st.none() | st.integers(0, 99).map(lambda percent: percent / 100),
    min_p=st.none() | st.integers(0, 100).map(lambda percent: percent / 100),
)
def test_truncation_keeps_the_same_tokens_as_transformers(
    seed: int,
    vocab_size: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = 3 * normal(4, vocab_size, seed=seed, dtype=torch.float64)
    chain = processors.LogitsProcessorList([processors.TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        chain.append(processors.TopKLogitsWarper(top_k))
    if top_p is not None:
        chain.append(processors.TopPLogitsWarper(top_p))
    if min_p is not None:
        chain.append(processors.MinPLogitsWarper(min_p))
    expected = chain(torch.zeros(4, 1, dtype=torch.int64), logits).isfinite()

    def column(value: float | None) -> torch.Tensor | None:
        return None if value is None else torch.full((4,), value, dtype=torch.float64)

    scaled = temper(logits, torch.full((4,), temperature, dtype=torch.float64))
    ranks = None if top_k is None else torch.full((4,), top_k)
    is_kept = scaled >= truncation_threshold(scaled, ranks, column(top_p), column(min_p))
    assert torch.equal(is_kept, expected)


def test_neutral_parameters_keep_all_tokens() -> None:
    scaled = temper(5 * normal(3, 1000, seed=0), torch.ones(3))
    zeros = torch.zeros(3)
    threshold = truncation_threshold(scaled, zeros.long(), zeros + 1, zeros)
    assert (scaled >= threshold).all()
    assert torch.equal(
        threshold <= scaled, truncation_threshold(scaled, None, None, None) <= scaled
    )


def test_equal_tokens_are_kept_together() -> None:
    scaled = torch.tensor([[0.0, -1.0, -1.0, -2.0]])
    is_kept = scaled >= truncation_threshold(scaled, torch.tensor([2]), None, None)
    assert is_kept.tolist() == [[True, True, True, False]]
    is_kept = scaled >= truncation_threshold(scaled, None, torch.tensor([0.6]), None)
    assert is_kept.tolist() == [[True, True, True, False]]
