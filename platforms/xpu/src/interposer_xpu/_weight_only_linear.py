"""The op ``w4a16_linear`` by the int4 GEMM of vllm-xpu-kernels, which calls oneDNN.

Call arguments are tested with a stand-in package on the CPU; no GPU has run this module.

Dimensions: T tokens, I input features, O output features, G inputs per scale.
"""

from __future__ import annotations

import torch

from interposer_xpu._packages.kernel_package import op

_SYMMETRIC_ZERO_POINT = 8


def prepare(
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    zero_points: torch.Tensor | None = None,
) -> dict[str, torch.Tensor | None]:
    """Convert the op's constants to the layout of the package's int4 GEMM.

    Weights ``[O, I / 8]``: eight 4-bit values of one output per int32, the first in the lowest
    bits; a view of ``weight``, which already has this order. Scales ``[I / G, O]``. Zero points
    ``[I / G, O / 8]``: eight outputs per int32; a symmetric scheme has one value for all groups.
    """
    if zero_points is None:
        zeros = torch.tensor([_SYMMETRIC_ZERO_POINT], dtype=torch.int8, device=weight.device)
    else:
        # Two 4-bit zero points per byte, the first in the lower half.
        pairs = zero_points.t().contiguous().unflatten(1, (-1, 2))
        zeros = (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)
    packed = weight.contiguous()
    # A view as int32 needs a storage offset that is a multiple of 4 bytes.
    if packed.storage_offset() % 4:
        packed = packed.clone()
    return {
        "weight": packed.view(torch.int32),
        "scale": scale.t().contiguous(),
        "bias": bias,
        "zero_points": zeros,
    }


def w4a16_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    zero_points: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the op ``w4a16_linear`` with constants from ``prepare``."""
    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        return x.new_zeros((*x.shape[:-1], len(weight)))
    out: torch.Tensor = op("_xpu_C", "int4_gemm_w4a16")(
        rows.contiguous(),
        weight.t(),
        bias,
        scale,
        zero_points,
        rows.shape[1] // len(scale),
        None,
    )
    return out.view(*x.shape[:-1], len(weight))
