"""Kernels that round, scale, unpack or route wrongly. T tokens, E experts, G group size."""

from __future__ import annotations

from typing import Any

import torch
from tests.wrong_kernels.wrong import wrong

from interposer_ops.experts import fused_experts, grouped_topk, topk_softmax
from interposer_ops.lora import lora_expand
from interposer_ops.quantized_linear import fp8_linear, int8_linear, w4a16_linear
from interposer_ops.quantizers import (
    quantize_fp8_per_token,
    quantize_fp8_static,
    quantize_int8_per_token,
)
from interposer_ops.sampling import apply_token_bitmask, greedy_verify

Tensor = torch.Tensor


def truncated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 8-bit floats rounded towards zero, by the neighbour below in magnitude."""
    nearest = values.to(dtype)
    above = nearest.float().abs() > values.float().abs()
    bits = nearest.view(torch.uint8)
    return torch.where(above, bits - 1, bits).view(dtype)


@wrong("quantize_fp8_static", "value")
def quantize_fp8_static_truncates(x: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(out_dtype).max
    return truncated((x.float() / scale).clamp(-limit, limit), out_dtype)


@wrong("quantize_fp8_static", "value")
def quantize_fp8_static_overflows(x: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    quotients = x.float() / scale
    beyond = quotients.abs() > torch.finfo(out_dtype).max
    return torch.where(beyond, torch.nan, quotients).to(out_dtype)


@wrong("quantize_fp8_static", "value")
def quantize_fp8_static_multiplies_by_the_scale(
    x: Tensor, scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    return quantize_fp8_static(x, 1 / scale, out_dtype)


@wrong("quantize_fp8_per_token", "value")
def quantize_fp8_per_token_takes_one_scale_for_all(
    x: Tensor, out_dtype: torch.dtype, scale_limit: float | None
) -> tuple[Tensor, Tensor]:
    q, scale = quantize_fp8_per_token(x, out_dtype, scale_limit)
    return q, scale.max().expand_as(scale).contiguous() if scale.numel() else scale


@wrong("quantize_int8_static", "value")
def quantize_int8_static_rounds_halves_up(
    x: Tensor, scale: Tensor, zero_point: Tensor | None
) -> Tensor:
    halves = (x.float() / scale + 0.5).floor()
    shifted = halves if zero_point is None else halves + zero_point
    return shifted.clamp(-128, 127).to(torch.int8)


@wrong("quantize_int8_static", "value")
def quantize_int8_static_wraps_around(
    x: Tensor, scale: Tensor, zero_point: Tensor | None
) -> Tensor:
    rounded = (x.float() / scale).round()
    shifted = rounded if zero_point is None else rounded + zero_point
    return shifted.nan_to_num(0, 0, 0).to(torch.int64).to(torch.int8)


@wrong("quantize_int8_per_token", "value")
def quantize_int8_per_token_divides_by_128(x: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = quantize_int8_per_token(x)
    return q, scale * (127 / 128)


@wrong("fp8_linear", "value")
def fp8_linear_scales_rows_by_the_scale_of_columns(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Right for scales of whole tensors; of channels it takes the first for all."""
    return fp8_linear(x, weight, x_scale, weight_scale[:1], bias, out_dtype)


@wrong("w4a16_linear", "value")
def w4a16_linear_takes_the_high_nibble_first(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    zero_points: Tensor | None = None,
) -> Tensor:
    return w4a16_linear(x, (weight >> 4) | (weight << 4), scale, bias, zero_points)


@wrong("w4a16_linear", "value")
def w4a16_linear_ignores_zero_points(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    zero_points: Tensor | None = None,
) -> Tensor:
    return w4a16_linear(x, weight, scale, bias, None)


@wrong("w4a16_linear", "value")
def w4a16_linear_keeps_the_scale_of_the_first_group(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    zero_points: Tensor | None = None,
) -> Tensor:
    first = scale[:, :1].expand_as(scale).contiguous()
    return w4a16_linear(x, weight, first, bias, zero_points)


@wrong("topk_softmax", "value")
def topk_softmax_takes_the_last_of_equals(
    logits: Tensor, top_k: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    weights, ids = topk_softmax(logits.flip(-1), top_k, renormalize)
    return weights, logits.shape[-1] - 1 - ids


@wrong("topk_softmax", "value")
def topk_softmax_always_renormalizes(
    logits: Tensor, top_k: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    return topk_softmax(logits, top_k, True)


@wrong("grouped_topk", "value")
def grouped_topk_looks_into_all_groups(*given: Any) -> tuple[Tensor, Tensor]:
    logits, bias, num_groups, _, *rest = given
    return grouped_topk(logits, bias, num_groups, num_groups, *rest)


@wrong("fused_experts", "value")
def fused_experts_sends_strangers_to_the_first(*given: Any) -> Tensor:
    *others, expert_ids, activation = given
    return fused_experts.reference(*[*others, expert_ids.clamp(min=0), activation])


@wrong("fused_experts", "value")
def fused_experts_ignores_the_weights(*given: Any) -> Tensor:
    *others, weights, expert_ids, activation = given
    return fused_experts.reference(*[*others, torch.ones_like(weights), expert_ids, activation])


@wrong("fused_experts", "value")
def fused_experts_is_one_percent_too_large(*given: Any) -> Tensor:
    return fused_experts.reference(*given) * 1.01


@wrong("int8_linear", "value", axis="shape")
def int8_linear_computes_one_tile_of_rows(
    x: Tensor, weight: Tensor, x_scale: Tensor, *others: Any
) -> Tensor:
    y = int8_linear(x, weight, x_scale, *others)
    y[128:] = 0
    return y


@wrong("lora_expand", "value")
def lora_expand_takes_no_adapter_for_the_last(
    shrunk: Tensor, lora_b: Tensor, adapter_ids: Tensor, y: Tensor, offset: int
) -> None:
    lora_expand(shrunk, lora_b, adapter_ids % max(lora_b.shape[0], 1), y, offset)


@wrong("apply_token_bitmask", "value")
def apply_token_bitmask_forgets_the_last_word(logits: Tensor, bitmask: Tensor) -> Tensor:
    masked = apply_token_bitmask(logits, bitmask)
    whole = logits.shape[-1] // 32 * 32
    masked[:, whole:] = logits[:, whole:]
    return masked


@wrong("greedy_verify", "value")
def greedy_verify_accepts_after_a_miss(
    draft_tokens: Tensor, target_logits: Tensor, num_draft: Tensor
) -> tuple[Tensor, Tensor]:
    tokens, accepted = greedy_verify(draft_tokens, target_logits, num_draft)
    hits = draft_tokens == target_logits[:, :-1].argmax(-1)
    counted = torch.arange(draft_tokens.shape[1]) < num_draft[:, None]
    return tokens, (hits & counted).sum(-1).to(accepted.dtype)
