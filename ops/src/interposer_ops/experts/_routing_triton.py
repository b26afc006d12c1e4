# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Routing in Triton: one kernel for all choices of experts.

T tokens, E experts, K chosen experts, G groups, S experts of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer.errors import RequestError
from interposer_ops._triton.build import BF16, FP32, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import as_rows, row_tile

_MIN_SUM = tl.constexpr(1e-20)  # avoids a division by zero if all weights are zero
_SCORINGS = ("softmax", "sigmoid")


@triton_kernel("topk_softmax")
def topk_softmax_triton(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Compute ``topk_softmax`` in Triton: top-k experts by softmax, one launch."""
    return _routed(logits, None, 1, 1, top_k, "softmax", renormalize, 1.0)


@triton_kernel("topk_sigmoid")
def topk_sigmoid_triton(
    logits: Tensor, bias: Tensor | None, top_k: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute ``topk_sigmoid`` in Triton: top-k experts by biased sigmoids, one launch."""
    return _routed(logits, bias, 1, 1, top_k, "sigmoid", renormalize, scale)


@triton_kernel("grouped_topk")
def grouped_topk_triton(
    logits: Tensor, bias: Tensor | None, num_groups: int, top_groups: int, top_k: int,
    scoring: str, renormalize: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``grouped_topk``; if all groups are chosen, groups are not compared."""
    if scoring not in _SCORINGS:
        raise RequestError(f"No scoring {scoring!r} of experts; try 'softmax' or 'sigmoid'")
    return _routed(logits, bias, num_groups, top_groups, top_k, scoring, renormalize, scale)


def _routed(
    logits: Tensor, bias: Tensor | None, num_groups: int, top_groups: int, top_k: int,
    scoring: str, renormalize: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    if ids.numel() == 0:
        return weights, ids
    # If every group is chosen, groups have no effect.
    if top_groups == num_groups:
        num_groups = top_groups = 1
    rows = as_rows(logits)
    group_size = num_experts // num_groups
    groups, members = (triton.next_power_of_2(size) for size in (num_groups, group_size))
    tile = row_tile("routing", logits.device, groups * members)
    _route[(tile.row_blocks(num_tokens),)](
        rows, bias, weights, ids, num_tokens, rows.stride(0), float(scale),
        NUM_GROUPS=num_groups, GROUP_SIZE=group_size, TOP_GROUPS=top_groups, TOP_K=top_k,
        SCORING=scoring, RENORMALIZE=renormalize, ROWS=tile.rows, GROUPS=groups, MEMBERS=members,
        CHOSEN=triton.next_power_of_2(top_k), **tile.compiled,
    )  # fmt: skip
    return weights, ids


@triton.jit
def _route(
    logits, bias, weights, ids, num_tokens, stride, scale,
    NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, MEMBERS: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    row_mask = row < num_tokens
    # Each group occupies a power of two of lanes, so that the tile can be reshaped to groups.
    lane = tl.arange(0, GROUPS * MEMBERS)[None, :]
    group = lane // MEMBERS
    member = lane % MEMBERS
    expert = group * GROUP_SIZE + member
    is_expert = (group < NUM_GROUPS) & (member < GROUP_SIZE)
    element_mask = row_mask & is_expert
    logit = tl.load(logits + row * stride + expert, mask=element_mask, other=0.0).to(tl.float32)
    if SCORING == "softmax":
        finite = tl.where(is_expert, logit, float("-inf"))
        power = tl.exp(finite - tl.max(finite, 1)[:, None])
        total = tl.sum(power, 1)[:, None]
        score = tl.div_rn(power, tl.zeros_like(power) + total)
    else:
        denominator = 1.0 + tl.exp(-logit)
        score = tl.div_rn(tl.zeros_like(denominator) + 1.0, denominator)
    if bias is None:
        compared = logit
    else:
        compared = score + tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)
    # NaN equals no value, so the search for the maximum would find no id. NaN counts as +inf and
    # comes first, as in the reference's sort.
    compared = tl.where(compared != compared, float("inf"), compared)
    is_available = is_expert & (row >= 0)
    if TOP_GROUPS < NUM_GROUPS:
        values = tl.where(is_expert, compared, float("-inf"))
        values = tl.reshape(values, (ROWS, GROUPS, MEMBERS))
        strength = tl.max(values, 2)
        if bias is not None:
            # Second best value: mask the first lane that holds the best one.
            lane_in_group = tl.arange(0, MEMBERS)[None, None, :]
            first = tl.min(tl.where(values == strength[:, :, None], lane_in_group, MEMBERS), 2)
            second = tl.where(lane_in_group == first[:, :, None], float("-inf"), values)
            strength += tl.max(second, 2)
        chosen = _strongest(strength, NUM_GROUPS, TOP_GROUPS, ROWS, GROUPS)
        expert_in_chosen_group = tl.broadcast_to(chosen[:, :, None], (ROWS, GROUPS, MEMBERS))
        expert_in_chosen_group = tl.reshape(expert_in_chosen_group, (ROWS, GROUPS * MEMBERS))
        # Set other groups to -inf rather than masking: if the chosen groups have too few finite
        # values, the remaining choices continue with -inf values by lowest id, as in the reference.
        compared = tl.where(expert_in_chosen_group > 0, compared, float("-inf"))
    slot = tl.arange(0, CHOSEN)[None, :]
    weight = tl.zeros((ROWS, CHOSEN), tl.float32)
    chosen_ids = tl.zeros((ROWS, CHOSEN), tl.int32)
    # Take the maximum K times; ties go to the lowest id.
    for turn in range(TOP_K):
        value = tl.where(is_available, compared, float("-inf"))
        best = tl.max(value, 1)[:, None]
        index = tl.where(is_available & (value == best), expert, NUM_GROUPS * GROUP_SIZE)
        index = tl.min(index, 1)[:, None]
        is_chosen = expert == index
        chosen_score = tl.sum(tl.where(is_chosen & is_expert, score, 0.0), 1)[:, None]
        weight = tl.where(slot == turn, chosen_score, weight)
        chosen_ids = tl.where(slot == turn, index, chosen_ids)
        is_available = is_available & (expert != index)
    if RENORMALIZE:
        divisor = tl.sum(weight, 1)[:, None] + _MIN_SUM
        weight = tl.div_rn(weight, tl.zeros_like(weight) + divisor)
    target = row * TOP_K + slot
    stored = row_mask & (slot < TOP_K)
    tl.store(weights + target, weight * scale, mask=stored)
    tl.store(ids + target, chosen_ids, mask=stored)


@triton.jit
def _strongest(
    strength,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Return 1 for the strongest groups of each row, ties by the lowest group, else 0."""
    group = tl.arange(0, GROUPS)[None, :]
    chosen = tl.zeros((ROWS, GROUPS), tl.int32)
    for _ in range(TOP_GROUPS):
        is_available = (chosen == 0) & (group < NUM_GROUPS)
        value = tl.where(is_available, strength, float("-inf"))
        best = tl.max(value, 1)[:, None]
        index = tl.min(tl.where(is_available & (value == best), group, GROUPS), 1)[:, None]
        chosen = tl.where(group == index, 1, chosen)
    return chosen


_LOGITS, _BIAS = (FP32, 64, 256), (FP32, 256)

BUILDS = (
    Build("topk_softmax_triton", "2 of 8", given((BF16, 64, 8), 2, True)),
    Build("topk_softmax_triton", "8 of 128", given((BF16, 64, 128), 8, True)),
    Build(
        "topk_sigmoid_triton",
        "8 of 256 with a bias",
        given(_LOGITS, _BIAS, 8, True, 2.5),
        "float32",
    ),
    Build(
        "grouped_topk_triton",
        "8 of 256 in 8 groups",
        given(_LOGITS, _BIAS, 8, 4, 8, "sigmoid", True, 2.5),
        "float32",
    ),
    Build(
        "grouped_topk_triton",
        "6 of 160 in 8 groups",
        given((BF16, 64, 160), None, 8, 3, 6, "softmax", False, 16.0),
    ),
)
