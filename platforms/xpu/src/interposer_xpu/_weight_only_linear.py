"""``w4a16_linear`` by the four-bit product of vllm-xpu-kernels, which is oneDNN's.

Arguments are tested against a package that plays the op on the processor; on a GPU it was not run.

Dimensions: T tokens, I input features, O output features, G inputs per scale.
"""

from __future__ import annotations

import torch

from interposer_xpu._packages.kernel_package import op

_MIDDLE = 8


def prepare(
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    zero_points: torch.Tensor | None = None,
) -> dict[str, torch.Tensor | None]:
    """Return the constants as the op wants them.

    Eight codes of one output are an int32, ``[O, I / 8]``, the first in the lowest bits, which
    they are already. Scales and zero points go by groups first, ``[I / G, O]``, the latter with
    eight outputs in an int32; where there are none, one number holds for all.
    """
    if zero_points is None:
        zeros = torch.tensor([_MIDDLE], dtype=torch.int8, device=weight.device)
    else:
        pairs = zero_points.t().contiguous().unflatten(1, (-1, 2))
        zeros = (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)
    codes = weight.contiguous()
    if codes.storage_offset() % 4:
        codes = codes.clone()
    return {
        "weight": codes.view(torch.int32),
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
    """Compute ``w4a16_linear`` of constants that ``prepare`` has returned."""
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
