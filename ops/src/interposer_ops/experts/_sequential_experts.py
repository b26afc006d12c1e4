"""Experts for any device, computed one after the other for all tokens that chose the expert.

T tokens, H hidden size, E experts, I intermediate size, K chosen experts, S rows of one expert. The
references gather the matrices of every token's experts, T K copies; here one expert's matrices are
converted to float32 at a time. The host reads the number of tokens per expert.
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

# Not graph-safe, as the host reads numbers of tokens; preferred to the references for memory.
_in_turn = partial(
    standard_kernel,
    technique="in_turn",
    requires=Requires(dtypes=("float32", "bfloat16", "float16")),
    score=5.0,
    properties=frozenset({"deterministic", "opaque"}),
)

Project = Callable[[int, Tensor], Tensor]
"""Projects rows ``[S, inputs]`` to ``[S, outputs]`` with the matrix of one expert."""


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
    """Compute ``fused_experts`` as two matmuls per expert, for the tokens that chose the expert."""
    wide = torch.promote_types(x.dtype, torch.float32)

    def projects(matrices: Tensor, bias: Tensor | None) -> Project:
        return lambda expert, rows: functional.linear(
            rows, matrices[expert].to(wide), _of(bias, expert, wide)
        )

    both = projects(gate_up, gate_up_bias), projects(down, down_bias)
    return _run_experts(x, *both, len(gate_up), weights, expert_ids, activation)


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
    """Compute ``fused_experts_mxfp4``, decoding two FP4 values per byte with a lookup table."""
    wide = torch.promote_types(x.dtype, torch.float32)
    all_bytes = torch.arange(256, dtype=torch.uint8, device=x.device)
    pairs = decode_e2m1(unpack_nibbles(all_bytes[:, None]), wide)  # [256, 2]

    def projects(packed: Tensor, scales: Tensor, bias: Tensor | None) -> Project:
        def project(expert: int, rows: Tensor) -> Tensor:
            quantized = pairs.index_select(0, packed[expert].flatten().int())
            blocks = quantized.view(*scales.shape[1:], MX_BLOCK_SIZE)
            blocks.mul_(decode_e8m0(scales[expert], wide)[..., None])
            return functional.linear(rows, blocks.flatten(1), _of(bias, expert, wide))

        return project

    first = projects(gate_up, gate_up_scale, gate_up_bias)
    second = projects(down, down_scale, down_bias)
    return _run_experts(x, first, second, len(gate_up), weights, expert_ids, activation)


def _run_experts(
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
    # Slots of other ranks have id -1, so they come first and are skipped.
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids + 1, minlength=num_experts + 1).tolist()
    results = torch.zeros((len(ids), x.shape[1]), dtype=wide, device=x.device)
    start = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count:
            slots = order[start : start + count]
            projected = first(expert, x[slots // top_k].to(wide))
            hidden = activated(projected, activation).to(x.dtype)
            results[slots] = second(expert, hidden.to(wide))
            start += count
    factors = torch.where(expert_ids >= 0, weights.to(wide), 0)[..., None]
    return (results.view(*expert_ids.shape, x.shape[1]) * factors).sum(1).to(x.dtype)


def _of(bias: Tensor | None, expert: int, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias[expert].to(dtype)
