"""Routing against a loop over tokens that sorts Python tuples, and against transformers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer.errors import RequestError
from interposer_ops.experts import grouped_topk, topk_sigmoid, topk_softmax

SIZES = st.tuples(st.integers(0, 5), st.sampled_from([4, 8, 12]), st.integers(1, 4))


def drawn(seed: int, num_tokens: int, num_experts: int, *, ties: bool) -> torch.Tensor:
    """Return logits; with ties most of them are equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    return logits.round() if ties else logits


def ranked(values: list[float], count: int) -> list[int]:
    """Return the indices of the largest values, the lowest index first among equals."""
    return sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def assert_routed(
    routed: tuple[torch.Tensor, torch.Tensor],
    scores: list[list[float]],
    ids: list[list[int]],
    renormalize: bool,
    scale: float = 1.0,
) -> None:
    weights, chosen = routed
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int32)
    assert chosen.tolist() == ids
    for row, row_scores, listed in zip(weights.tolist(), scores, ids, strict=True):
        picked = [row_scores[index] for index in listed]
        total = sum(picked) if renormalize else 1.0
        assert row == pytest.approx([scale * value / total for value in picked], rel=1e-5)


@given(SIZES, st.integers(0, 2**31), st.booleans(), st.booleans())
def test_softmax_routing(sizes: tuple[int, int, int], seed: int, ties: bool, norm: bool) -> None:
    num_tokens, num_experts, top_k = sizes
    logits = drawn(seed, num_tokens, num_experts, ties=ties)
    rows = logits.tolist()
    scores = [[math.exp(v) / sum(map(math.exp, row)) for v in row] for row in rows]
    ids = [ranked(row, top_k) for row in rows]
    assert_routed(topk_softmax(logits, top_k, norm), scores, ids, norm)


@given(SIZES, st.integers(0, 2**31), st.booleans(), st.floats(0.5, 3.0))
def test_sigmoid_routing_chooses_by_bias_and_weighs_without(
    sizes: tuple[int, int, int], seed: int, norm: bool, scale: float
) -> None:
    num_tokens, num_experts, top_k = sizes
    logits = drawn(seed, num_tokens, num_experts, ties=False)
    bias = drawn(seed + 1, 1, num_experts, ties=False)[0]
    scores = [[sigmoid(value) for value in row] for row in logits.tolist()]
    plain = [ranked(row, top_k) for row in logits.tolist()]
    assert_routed(topk_sigmoid(logits, None, top_k, norm, scale), scores, plain, norm, scale)
    biased = (logits.sigmoid() + bias).tolist()
    ids = [ranked(row, top_k) for row in biased]
    assert_routed(topk_sigmoid(logits, bias, top_k, norm, scale), scores, ids, norm, scale)


@given(
    st.integers(0, 4),
    st.sampled_from([(8, 2, 1, 3), (8, 4, 2, 3), (12, 3, 2, 6), (12, 1, 1, 2), (16, 8, 3, 4)]),
    st.integers(0, 2**31),
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
    st.booleans(),
)
def test_grouped_routing(
    num_tokens: int,
    sizes: tuple[int, int, int, int],
    seed: int,
    scoring: str,
    has_bias: bool,
    ties: bool,
) -> None:
    num_experts, num_groups, top_groups, top_k = sizes
    logits = drawn(seed, num_tokens, num_experts, ties=ties and not has_bias)
    bias = drawn(seed + 1, 1, num_experts, ties=False)[0] if has_bias else None
    scored = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    compared = (logits if bias is None else scored + bias).tolist()
    size = num_experts // num_groups
    ids = []
    for row in compared:
        groups = [sorted(row[at : at + size])[::-1] for at in range(0, num_experts, size)]
        strength = [group[0] + group[1] if has_bias else group[0] for group in groups]
        allowed = ranked(strength, top_groups)
        order = ranked(row, num_experts)
        ids.append([index for index in order if index // size in allowed][:top_k])
    routed = grouped_topk(logits, bias, num_groups, top_groups, top_k, scoring, True, 2.5)
    assert_routed(routed, scored.tolist(), ids, True, 2.5)


def test_an_unknown_scoring_lists_the_alternatives() -> None:
    with pytest.raises(RequestError, match="No scoring 'relu' of experts; try 'softmax' or"):
        grouped_topk(torch.zeros(1, 4), None, 2, 1, 1, "relu", False, 1.0)


def test_grouped_routing_matches_deepseek_v3() -> None:
    """The modeling code of transformers, with its own bias, groups and scale."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as peer

    config = DeepseekV3Config(
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        n_routed_experts=16,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    gate = peer.DeepseekV3TopkRouter(config).eval()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(32, 16, generator=generator)
    bias = torch.randn(16, generator=generator) / 4
    gate.e_score_correction_bias.copy_(bias)
    gate.weight.data.copy_(torch.eye(16))  # so that its logits are those that it is given
    _, weights, ids = gate(logits)
    own_weights, own_ids = grouped_topk(logits, bias, 4, 2, 4, "sigmoid", True, 2.5)
    order, own_order = ids.argsort(-1), own_ids.argsort(-1)
    assert torch.equal(own_ids.gather(1, own_order).long(), ids.gather(1, order))
    torch.testing.assert_close(own_weights.gather(1, own_order), weights.gather(1, order))
