"""Kernels that treat memory wrongly. T tokens, H hidden size, S page size."""

from __future__ import annotations

import torch
from tests.wrong_kernels.wrong import wrong
from torch.nn import functional

from interposer_ops.activations import silu_and_mul
from interposer_ops.caches import reshape_and_cache
from interposer_ops.norms import fused_add_rms_norm, rms_norm
from interposer_ops.rotary import rotary_embedding

Tensor = torch.Tensor


def taken_for(x: Tensor, *strides: int, start: int | None = None) -> Tensor:
    """Return the memory behind ``x`` as a kernel reads it that assumes its strides."""
    begin = x.storage_offset() if start is None else start
    return torch.as_strided(x, x.shape, strides, begin)


@wrong("rms_norm", "value", axis="layout")
def rms_norm_takes_rows_for_dense(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dense = torch.empty(x.shape, device="meta").stride()
    return rms_norm(taken_for(x, *dense), weight, eps)


@wrong("silu_and_mul", "value", axis="layout")
def silu_and_mul_loads_from_aligned_addresses(x: Tensor) -> Tensor:
    vector = 16 // x.element_size()
    begin = x.storage_offset() // vector * vector
    return silu_and_mul(taken_for(x, *x.stride(), start=begin))


@wrong("fused_add_rms_norm", "value", axis="layout")
def fused_add_rms_norm_takes_one_stride_for_both(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if x.ndim == 2 and x.shape[0] > 1 and x.stride(0) < residual.stride(0):
        residual = taken_for(residual, *x.stride())
    return fused_add_rms_norm(x, residual, weight, eps)


@wrong("rotary_embedding", "value", axis="layout")
def rotary_embedding_takes_heads_for_dense(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    heads = [
        taken_for(x, x.shape[1] * x.shape[2], x.shape[2], 1) if x.numel() else x
        for x in (query, key)
    ]
    return rotary_embedding(heads[0], heads[1], cos, sin)


@wrong("reshape_and_cache", "guard", "mutation", "value", says="outside of it")
def reshape_and_cache_writes_one_element_too_far(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    reshape_and_cache(key, value, key_cache, value_cache, slots)
    if key_cache.is_contiguous():
        beyond = key_cache.storage_offset() + key_cache.numel()
        torch.as_strided(key_cache, (1,), (1,), beyond).fill_(0)


@wrong("reshape_and_cache", "value", "mutation")
def reshape_and_cache_clears_the_rest_of_a_page(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    pages = slots // key_cache.shape[1]
    key_cache[pages] = 0
    value_cache[pages] = 0
    reshape_and_cache(key, value, key_cache, value_cache, slots)


@wrong("reshape_and_cache", "value", "mutation")
def reshape_and_cache_swaps_keys_and_values(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    reshape_and_cache(value, key, key_cache, value_cache, slots)


@wrong("rms_norm", "mutation", says="not declared in mutates")
def rms_norm_works_in_place(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = rms_norm(x, weight, eps)
    x.copy_(y)
    return y


@wrong("rms_norm", "mutation", says="not declared in mutates")
def rms_norm_converts_its_weight_in_place(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = rms_norm(x, weight, eps)
    weight.add_(1)
    return y


@wrong("silu_and_mul", "alias", says="shares memory")
def silu_and_mul_returns_a_part_of_its_argument(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    y = silu_and_mul(x)
    x[..., :half] = y
    return x[..., :half]


_KEPT: dict[tuple[torch.Size, torch.dtype], Tensor] = {}


@wrong("silu_and_mul", "alias", says="second call")
def silu_and_mul_hands_out_one_buffer_again(x: Tensor) -> Tensor:
    y = silu_and_mul(x)
    return _KEPT.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)


@wrong("silu_and_mul", "value")
def silu_and_mul_leaves_the_last_row_as_it_was(x: Tensor) -> Tensor:
    y = silu_and_mul(x)
    stale = torch.empty_like(y)
    stale[:-1] = y[:-1]
    return stale


@wrong("linear", "stride", says="expected, got")
def linear_returns_columns(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = functional.linear(x, weight, bias)
    return y.mT.contiguous().mT


@wrong("linear", "dtype", axis="dtype", says="torch.float32")
def linear_returns_its_accumulator(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = None if bias is None else bias.float()
    return functional.linear(x.float(), weight.float(), wide)


@wrong("silu_and_mul", "shape", axis="shape", says="expected, got")
def silu_and_mul_returns_a_row_for_none(x: Tensor) -> Tensor:
    y = silu_and_mul(x)
    return y if y.numel() else y.new_zeros((1, *y.shape[1:]))


@wrong("rms_norm", "call", axis="shape", says="raised")
def rms_norm_cannot_do_nothing(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not x.numel():
        raise RuntimeError("invalid configuration argument: the grid is empty")
    return rms_norm(x, weight, eps)


@wrong("fused_add_rms_norm", "structure")
def fused_add_rms_norm_returns_a_list(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> list[Tensor]:
    return [*fused_add_rms_norm(x, residual, weight, eps)]
