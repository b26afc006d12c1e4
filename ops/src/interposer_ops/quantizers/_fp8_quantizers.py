"""Quantizers of activations to 8-bit floats. H hidden size, B block size.

The formats are torch's: ``float8_e4m3fn`` and ``float8_e5m2`` of OCP, ``float8_e4m3fnuz`` and
``float8_e5m2fnuz`` of other hardware. max is the largest finite number of the format. Results are
rounded to nearest, ties to even, and saturate. Scales are what the result is multiplied by to
give ``x`` back. ``x`` is finite unless said.
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
    """Divide ``x`` by a scale that is known and round it to ``out_dtype``.

    q = round(clamp(x / scale, -max, max))

    Args:
        x: ``[..., H]``, any float dtype; infinities saturate.
        scale: ``[1]`` float32.
        out_dtype: an 8-bit float.
    Returns: shape of ``x``, ``out_dtype``.
    Dims: ``hidden_size``, ``out_dtype``.
    """
    return _rounded(widened(x) / scale, out_dtype)


@_op("quantize_fp8_per_token", batch_invariant=True, batched=("x",))
def quantize_fp8_per_token(
    x: Tensor, out_dtype: torch.dtype, scale_limit: float | None
) -> tuple[Tensor, Tensor]:
    """Quantize every row of ``x`` with a scale of its own.

    scale = min(max|x_t| / max, scale_limit), 1 for a row of zeros;
    q = round(clamp(x / scale, -max, max))

    Args:
        x, out_dtype: as in ``quantize_fp8_static``.
        scale_limit: largest scale, beyond which outliers saturate; None for no limit.
    Returns: ``(q, scale)``: shape of ``x`` in ``out_dtype``, and ``[..., 1]`` float32.
    Dims: ``hidden_size``, ``out_dtype``, ``limited``.
    """
    wide = widened(x)
    scale = _fitting(wide.abs().amax(-1, keepdim=True), out_dtype)
    if scale_limit is not None:
        scale = scale.clamp(max=scale_limit)
    return _rounded(wide / scale, out_dtype), scale


@_op("quantize_fp8_blocks", batch_invariant=True, batched=("x",))
def quantize_fp8_blocks(
    x: Tensor, block_size: int, out_dtype: torch.dtype, power_of_two_scales: bool
) -> tuple[Tensor, Tensor]:
    """Quantize every block of B elements of a row with a scale of its own.

    scale = max|x_b| / max, or the next power of two that is not smaller; 1 for a block of zeros;
    q = round(x / scale)

    Args:
        x, out_dtype: as in ``quantize_fp8_static``.
        block_size: B; the last block of a row may be shorter.
        power_of_two_scales: round scales up, so that they are stored as exponents without loss.
    Returns: ``(q, scales)``: shape of ``x`` in ``out_dtype``, and ``[..., ceil(H / B)]`` float32.
    Dims: ``hidden_size``, ``block_size``, ``out_dtype``, ``power_of_two_scales``.
    """
    wide = widened(x)
    width = x.shape[-1]
    num_blocks = -(-width // block_size)
    padded = functional.pad(wide, (0, num_blocks * block_size - width))
    blocks = padded.unflatten(-1, (num_blocks, block_size))
    scales = _fitting(blocks.abs().amax(-1), out_dtype)
    if power_of_two_scales:
        mantissa, exponent = torch.frexp(scales)  # in [0.5, 1), which is 0.5 for a power of two
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
        scales = torch.ldexp(torch.ones_like(scales), exponent)
    quantized = (blocks / scales.unsqueeze(-1)).flatten(-2)[..., :width]
    return _rounded(quantized.contiguous(), out_dtype), scales


def _fitting(peaks: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.where(peaks > 0, peaks / torch.finfo(out_dtype).max, 1.0)


def _rounded(quotients: Tensor, out_dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(out_dtype).max
    return quotients.clamp(-limit, limit).to(out_dtype)
