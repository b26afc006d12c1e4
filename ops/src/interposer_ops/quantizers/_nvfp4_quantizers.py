"""Quantizers to NVFP4. H hidden size.

Blocks of 16 e2m1 elements of a row share a scale in e4m3; one scale in float32, that of the whole
tensor, brings these into the range of e4m3: x = element * block_scale / global_scale. What is
usual for it is 448 * 6 / max|x|.

Source: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025.
"""

from __future__ import annotations

import torch

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops._widening import widened
from interposer_ops.quantizers._small_floats import (
    E2M1_MAX,
    decode_e2m1,
    encode_e2m1,
    pack_nibbles,
    unpack_nibbles,
)

_CASES = "interposer_ops.quantizers._nvfp4_quantizers_cases"

NVFP4_BLOCK_SIZE = 16
_E4M3_MAX = 448.0


@standard_op(
    "quantize_nvfp4",
    cases=_CASES,
    batch_invariant=True,
    constants=("global_scale",),
    tolerance=Tolerance(roundings=0),
    batched=("x",),
)
def quantize_nvfp4(
    x: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``x`` to NVFP4, two elements per byte.

    s_b = e4m3(min(max|x_b| * global_scale / 6, 448)); q = e2m1(x * global_scale / s_b), which
    saturates and keeps the sign of a zero; where s_b is 0, so are all of its elements. Both are
    rounded to nearest, ties to even.

    Args:
        x: ``[..., H]``, any float dtype, finite; H a multiple of 16.
        global_scale: ``[1]`` float32, positive.
    Returns: ``(packed, scales)``: ``[..., H / 2]`` uint8 of two e2m1 codes, the first one in the
        low nibble, and ``[..., H / 16]`` float8_e4m3fn.
    Dims: ``hidden_size``.
    """
    wide = widened(x)
    blocks = wide.unflatten(-1, (x.shape[-1] // NVFP4_BLOCK_SIZE, NVFP4_BLOCK_SIZE))
    fitting = blocks.abs().amax(-1) * global_scale / E2M1_MAX
    scales = fitting.clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    stored = scales.to(wide.dtype)
    divisors = torch.where(stored > 0, stored, torch.inf).unsqueeze(-1)
    codes = encode_e2m1(blocks * global_scale / divisors)
    return pack_nibbles(codes.flatten(-2)), scales


@standard_op(
    "dequantize_nvfp4",
    cases=_CASES,
    sample=False,
    constants=("global_scale",),
    tolerance=Tolerance(roundings=2),
)
def dequantize_nvfp4(
    packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return the numbers that NVFP4 elements stand for: e2m1 * scale / global_scale.

    Args:
        packed: ``[..., H / 2]`` uint8 of two e2m1 codes, the first one in the low nibble.
        scales: ``[..., H / 16]`` float8_e4m3fn.
        global_scale: ``[1]`` float32, positive.
        out_dtype: any float dtype.
    Returns: ``[..., H]``, ``out_dtype``.
    Dims: ``hidden_size``.
    """
    wide = global_scale.dtype
    elements = decode_e2m1(unpack_nibbles(packed), wide)
    blocks = elements.unflatten(-1, (scales.shape[-1], NVFP4_BLOCK_SIZE))
    scaled: torch.Tensor = blocks * (scales.to(wide) / global_scale).unsqueeze(-1)
    return scaled.flatten(-2).to(out_dtype)
