"""Experts one after the other, each for all tokens that chose it: for any device.

T tokens, H hidden size, E experts, I intermediate size, K chosen experts. The references gather
the matrices of every token's experts, which takes T K copies; here one expert's are held at a
time, in float32. How many tokens each of them gets is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Requires
from interposer_ops._declare import standard_kernel
from interposer_ops.experts._experts import activated
from interposer_ops.quantizers._mx_quantizers import MX_BLOCK_SIZE
from interposer_ops.quantizers._small_floats import decode_e2m1, decode_e8m0, unpack_nibbles

# They wait for numbers of tokens, and hold less than the references.
_in_turn = partial(
    standard_kernel,
    technique="in_turn",
    requires=Requires(dtypes=("float32", "bfloat16", "float16")),
    score=5.0,
    properties=frozenset({"deterministic", "opaque"}),
)

Project = Callable[[int, Tensor], Tensor]
"""Returns the projection ``[S, outputs]`` of rows ``[S, inputs]`` by one expert."""


@_in_turn("fused_experts")
def fused_experts_in_turn(
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    weights: Tensor,
    expert_ids: Tensor,
    activation: str,
) -> Tensor:
    """Compute ``fused_experts``."""
    wide = torch.promote_types(x.dtype, torch.float32)

    def projects(matrices: Tensor, bias: Tensor | None) -> Project:
        return lambda expert, rows: functional.linear(
            rows, matrices[expert].to(wide), _of(bias, expert, wide)
        )

    both = projects(gate_up, gate_up_bias), projects(down, down_bias)
    return _mixture(x, *both, len(gate_up), weights, expert_ids, activation)


@_in_turn("fused_experts_mxfp4")
def fused_experts_mxfp4_in_turn(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    weights: Tensor,
    expert_ids: Tensor,
    activation: str,
) -> Tensor:
    """Compute ``fused_experts_mxfp4``; pairs of codes are looked up by their byte."""
    wide = torch.promote_types(x.dtype, torch.float32)
    every = torch.arange(256, dtype=torch.uint8, device=x.device)
    pairs = decode_e2m1(unpack_nibbles(every[:, None]), wide)

    def projects(packed: Tensor, scales: Tensor, bias: Tensor | None) -> Project:
        def project(expert: int, rows: Tensor) -> Tensor:
            codes = pairs.index_select(0, packed[expert].flatten().int())
            blocks = codes.view(*scales.shape[1:], MX_BLOCK_SIZE)
            blocks.mul_(decode_e8m0(scales[expert], wide)[..., None])
            return functional.linear(rows, blocks.flatten(1), _of(bias, expert, wide))

        return project

    first = projects(gate_up, gate_up_scale, gate_up_bias)
    second = projects(down, down_scale, down_bias)
    return _mixture(x, first, second, len(gate_up), weights, expert_ids, activation)


def _mixture(
    x: Tensor,
    first: Project,
    second: Project,
    num_experts: int,
    weights: Tensor,
    expert_ids: Tensor,
    activation: str,
) -> Tensor:
    wide, top_k = torch.promote_types(x.dtype, torch.float32), expert_ids.shape[1]
    ids = expert_ids.flatten()
    # Those of other ranks are -1 and come first.
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids + 1, minlength=num_experts + 1).tolist()
    returned = torch.zeros((len(ids), x.shape[1]), dtype=wide, device=x.device)
    start = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count:
            slots = order[start : start + count]
            projected = first(expert, x[slots // top_k].to(wide))
            hidden = activated(projected, activation).to(x.dtype)
            returned[slots] = second(expert, hidden.to(wide))
            start += count
    factors = torch.where(expert_ids >= 0, weights.to(wide), 0)[..., None]
    return (returned.view(*expert_ids.shape, x.shape[1]) * factors).sum(1).to(x.dtype)


def _of(bias: Tensor | None, expert: int, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias[expert].to(dtype)
