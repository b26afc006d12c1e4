"""``fused_experts_mxfp4`` by the grouped product of vllm-xpu-kernels and its routing.

Rows are laid out by expert, multiplied, activated, multiplied again and gathered. The product
stores the dtype of the rows, so that what is activated was rounded, which the op does not define:
the record says by how much, and goes behind kernels that do not. Arguments are tested against a
package that plays the ops on the processor; on a GPU they were not run.

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
    """Return the constants with one expert more, whose weights and biases are zero.

    It stands for the experts of other ranks: the routing has no way to leave a slot out.
    """
    given = {
        "gate_up": gate_up,
        "gate_up_scale": gate_up_scale,
        "gate_up_bias": gate_up_bias,
        "down": down,
        "down_scale": down_scale,
        "down_bias": down_bias,
    }
    return {name: None if t is None else _with_zeros(t) for name, t in given.items()}


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
    """Compute ``fused_experts_mxfp4`` of constants that ``prepare`` has returned."""
    tokens, hidden = x.shape
    experts, slots = len(gate_up), expert_ids.shape[1]
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    held = expert_ids >= 0
    ids = torch.where(held, expert_ids, experts - 1).to(torch.int32)
    rows = x.new_empty((tokens * slots, hidden))
    counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
    places = torch.empty((tokens, slots), dtype=torch.int32, device=x.device)
    op("_moe_C", "remap_hidden_states")(
        x.contiguous(), None, rows, None, None, counts, places, ids, experts, experts
    )
    projected = _multiplied(rows, gate_up, gate_up_scale, gate_up_bias, counts)
    # Here rather than by an op of the package, for it is computed in float32.
    inner = activated(projected.float(), activation).to(x.dtype)
    returned = _multiplied(inner, down, down_scale, down_bias, counts)
    # The last rows are those of the expert that is none; infinite inputs times zero are no zeros.
    behind = torch.arange(len(rows), device=x.device) >= len(rows) - counts[-1]
    returned.masked_fill_(behind[:, None], 0)
    op("_moe_C", "moe_gather")(out, returned, weights.where(held, 0), places, experts)
    return out


def _multiplied(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    counts: torch.Tensor,
) -> torch.Tensor:
    experts, outputs, _ = weight.shape
    out = rows.new_empty((len(rows), outputs))
    four_bits = weight.view(torch.float4_e2m1fn_x2)
    op("_xpu_C", "cutlass_grouped_gemm_interface")(
        rows, None, four_bits, scale, bias, out, counts, outputs, rows.shape[1], experts
    )
    return out


def _with_zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor, torch.zeros_like(tensor[:1]))).contiguous()
