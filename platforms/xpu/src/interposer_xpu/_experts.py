"""The op ``fused_experts_mxfp4`` by the grouped GEMM and the routing of vllm-xpu-kernels.

Rows are permuted by expert, multiplied, activated, multiplied again and gathered. Unlike the op,
the grouped GEMM rounds its output to the dtype of the rows. The record declares the extra roundings
and ranks after kernels without extra roundings. Call arguments are tested with a stand-in package
on the CPU; no GPU has run this module.

Dimensions: T tokens, H hidden size, E experts, I intermediate size, K chosen experts.
"""

from __future__ import annotations

import torch

from interposer_ops.experts import activated
from interposer_xpu._packages.kernel_package import op


def prepare(
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_bias: torch.Tensor | None,
) -> dict[str, torch.Tensor | None]:
    """Append an expert with zero weights and biases to the constants.

    The extra expert stands for experts of other ranks, because the routing cannot skip a slot.
    """
    constants = {
        "gate_up": gate_up,
        "gate_up_scale": gate_up_scale,
        "gate_up_bias": gate_up_bias,
        "down": down,
        "down_scale": down_scale,
        "down_bias": down_bias,
    }
    return {name: None if t is None else _append_zero_expert(t) for name, t in constants.items()}


def fused_experts_mxfp4(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_bias: torch.Tensor | None,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Compute the op ``fused_experts_mxfp4`` with constants from ``prepare``."""
    num_tokens, hidden = x.shape
    num_experts, top_k = len(gate_up), expert_ids.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    # The last expert is the one that prepare() appended.
    is_valid = expert_ids >= 0
    ids = torch.where(is_valid, expert_ids, num_experts - 1).to(torch.int32)
    rows = x.new_empty((num_tokens * top_k, hidden))
    counts = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
    row_numbers = torch.empty((num_tokens, top_k), dtype=torch.int32, device=x.device)
    op("_moe_C", "remap_hidden_states")(
        x.contiguous(), None, rows, None, None, counts, row_numbers, ids, num_experts, num_experts
    )
    projected = _grouped_gemm(rows, gate_up, gate_up_scale, gate_up_bias, counts)
    # Not by an activation op of the package, because fused_experts_mxfp4 activates in float32.
    activated_rows = activated(projected.float(), activation).to(x.dtype)
    expert_outputs = _grouped_gemm(activated_rows, down, down_scale, down_bias, counts)
    # The last rows belong to the extra expert. Zero weights are not enough there: inf * 0 is NaN.
    is_extra_expert = torch.arange(len(rows), device=x.device) >= len(rows) - counts[-1]
    expert_outputs.masked_fill_(is_extra_expert[:, None], 0)
    op("_moe_C", "moe_gather")(
        out, expert_outputs, weights.where(is_valid, 0), row_numbers, num_experts
    )
    return out


def _grouped_gemm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    counts: torch.Tensor,
) -> torch.Tensor:
    num_experts, out_features, _ = weight.shape
    out = rows.new_empty((len(rows), out_features))
    four_bits = weight.view(torch.float4_e2m1fn_x2)
    op("_xpu_C", "cutlass_grouped_gemm_interface")(
        rows, None, four_bits, scale, bias, out, counts, out_features, rows.shape[1], num_experts
    )
    return out


def _append_zero_expert(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor, torch.zeros_like(tensor[:1]))).contiguous()
