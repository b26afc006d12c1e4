"""Quantizers of activations to 8-bit floats.

The formats are torch's: ``float8_e4m3fn`` and ``float8_e5m2`` of OCP, ``float8_e4m3fnuz`` and
``float8_e5m2fnuz`` of other hardware. max is the largest finite number of the format. Results are
rounded to nearest, ties to even, and saturate; q * scale dequantizes. ``x`` must be finite unless
stated otherwise.

H hidden size, B block size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops._widening import widened

_op = partial(
    standard_op,
    cases="interposer_ops.quantizers._fp8_quantizers_cases",
    tolerance=Tolerance(roundings=0),
)


@_op("quantize_fp8_static", sample=False, batched=("x",))
def quantize_fp8_static(x: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Quantize ``x`` to an 8-bit float by one static scale.

    q = round(clamp(x / scale, -max, max))

    Args:
        x: ``[..., H]``, any float dtype; infinities saturate.
        scale: ``[1]`` float32.
        out_dtype: an 8-bit float dtype.
    Returns: shape of ``x``, ``out_dtype``.
    Dims: ``hidden_size``, ``out_dtype``.
    """
    return _saturate(widened(x) / scale, out_dtype)


@_op("quantize_fp8_per_token", batch_invariant=True, batched=("x",))
def quantize_fp8_per_token(
    x: Tensor, out_dtype: torch.dtype, scale_limit: float | None
) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to an 8-bit float with one dynamic scale per row.

    scale = min(max|x_t| / max, scale_limit), 1 for a row of zeros;
    q = round(clamp(x / scale, -max, max))

    Args:
        x, out_dtype: as in ``quantize_fp8_static``.
        scale_limit: maximum of the scale, above which outliers saturate; None for no limit.
    Returns: ``(q, scale)``: shape of ``x`` in ``out_dtype``, and ``[..., 1]`` float32.
    Dims: ``hidden_size``, ``out_dtype``, ``limited``.
    """
    wide = widened(x)
    scale = _scales_of_peaks(wide.abs().amax(-1, keepdim=True), out_dtype)
    if scale_limit is not None:
        scale = scale.clamp(max=scale_limit)
    return _saturate(wide / scale, out_dtype), scale


@_op("quantize_fp8_blocks", batch_invariant=True, batched=("x",))
def quantize_fp8_blocks(
    x: Tensor, block_size: int, out_dtype: torch.dtype, power_of_two_scales: bool
) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to an 8-bit float with one dynamic scale per block of B elements of a row.

    scale = max|x_b| / max, or rounded up to a power of two; 1 for a block of zeros;
    q = round(x / scale)

    Args:
        x, out_dtype: as in ``quantize_fp8_static``.
        block_size: B; the last block of a row may be shorter.
        power_of_two_scales: round scales up to powers of two, which e8m0 stores exactly.
    Returns: ``(q, scales)``: shape of ``x`` in ``out_dtype``, and ``[..., ceil(H / B)]`` float32.
    Dims: ``hidden_size``, ``block_size``, ``out_dtype``, ``power_of_two_scales``.
    """
    wide = widened(x)
    width = x.shape[-1]
    num_blocks = -(-width // block_size)
    padded = functional.pad(wide, (0, num_blocks * block_size - width))
    blocks = padded.unflatten(-1, (num_blocks, block_size))
    scales = _scales_of_peaks(blocks.abs().amax(-1), out_dtype)
    if power_of_two_scales:
        # The mantissa is in [0.5, 1), and 0.5 for a power of two, which needs no rounding up.
        mantissa, exponent = torch.frexp(scales)
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
        scales = torch.ldexp(torch.ones_like(scales), exponent)
    quantized = (blocks / scales.unsqueeze(-1)).flatten(-2)[..., :width]
    return _saturate(quantized.contiguous(), out_dtype), scales


def _scales_of_peaks(peaks: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.where(peaks > 0, peaks / torch.finfo(out_dtype).max, 1.0)


def _saturate(quotients: Tensor, out_dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(out_dtype).max
    return quotients.clamp(-limit, limit).to(out_dtype)
