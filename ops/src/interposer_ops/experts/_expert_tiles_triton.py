# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Building blocks of the expert GEMM kernels: tile order, weight decoding, scales, activations.

E experts, K inputs of a projection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.parameters import architecture, per_device

_BITS = {
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}


def kernel_weights(stored: Tensor, scale: Tensor | None) -> tuple[Tensor, str]:
    """Return the weights as the kernel loads them, and the name of their format.

    ``plain``: Triton converts the numbers. ``int4``: two integers per byte. ``e2m1``: two FP4
    values per byte with exponents as scales. Other names: 8-bit floats that Triton cannot convert
    on this device, passed as raw bits.
    """
    if stored.dtype == torch.uint8:
        return stored, "int4" if scale is None or scale.is_floating_point() else "e2m1"
    form = _form(stored.dtype, stored.device)
    return (stored if form == "plain" else stored.view(torch.uint8)), form


@per_device
def _form(dtype: torch.dtype, device: torch.device) -> str:
    """Return the format in which kernels load weights of ``dtype``; see ``kernel_weights``.

    Source: ``supported_fp8_dtypes`` of the backends of triton 3.7.1; the AMD backend converts all.
    """
    name = architecture(device)
    if dtype not in _BITS or name.startswith("gfx"):
        return "plain"
    modern = name.startswith("sm_") and int(name[3:].rstrip("af")) >= 89
    return "plain" if modern and dtype == torch.float8_e4m3fn else _BITS[dtype]


@triton.jit
def expert_tile(num_blocks, NUM_TILES: tl.constexpr, BAND: tl.constexpr):
    """Return this program's tile: a block of slots and a range of columns.

    Concurrent programs work on one band of blocks and so share tiles of weights in the cache.
    """
    program = tl.program_id(0)
    first = program // (BAND * NUM_TILES) * BAND
    height = tl.minimum(num_blocks - first, BAND)
    index_in_band = program % (BAND * NUM_TILES)
    return first + index_in_band % height, index_in_band // height


@triton.jit
def load_weights(
    row, row_mask, begin, start,
    dtype: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Load the weights ``[rows, STEP]`` of one step, decoded exactly to ``dtype``.

    Args:
        row: pointers to the beginnings of the rows.
        row_mask: mask of valid rows.
        begin: first input of the group.
        start: first input of the step within the group.
    """
    if FORM == "int4":
        # Group sizes are even, so no byte spans two groups.
        inner = start // 2 + tl.arange(0, STEP // 2)[None, :]
        load_mask = row_mask if GROUP % STEP == 0 else row_mask & (inner < GROUP // 2)
        packed = tl.load(row + begin // 2 + inner, mask=load_mask, other=0)
        integers = tl.interleave((packed & 15).to(tl.int8), (packed >> 4).to(tl.int8))
        result = (integers - 8).to(dtype)
    elif FORM == "e2m1":
        inner = start // 2 + tl.arange(0, STEP // 2)[None, :]
        load_mask = row_mask if GROUP % STEP == 0 else row_mask & (inner < GROUP // 2)
        packed = tl.load(row + begin // 2 + inner, mask=load_mask, other=0).to(tl.int16)
        code = tl.interleave(packed & 15, packed >> 4)
        # Move exponent and fraction to their place in float16; the factor 2^(15 - 1) corrects the
        # exponent bias.
        half_bits = (code & 7) << 9 | (code & 8) << 12
        result = (half_bits.to(tl.float16, bitcast=True) * 16384.0).to(dtype)
    else:
        inner = start + tl.arange(0, STEP)[None, :]
        load_mask = row_mask if GROUP % STEP == 0 else row_mask & (inner < GROUP)
        if FORM == "plain":
            result = tl.load(row + begin + inner, mask=load_mask, other=0.0).to(dtype)
        else:
            packed = tl.load(row + begin + inner, mask=load_mask, other=0)
            # Factors are 2^(127 - bias), with bias 7 (e4m3fn), 8 (e4m3fnuz) or 16 (e5m2fnuz).
            if FORM == "e4m3fn":
                result = _number(packed, 3, 2.0**120, 0x7F).to(dtype)
            elif FORM == "e4m3fnuz":
                result = _number(packed, 3, 2.0**119, 0x80).to(dtype)
            else:
                result = _number(packed, 2, 2.0**111, 0x80).to(dtype)
    return result


@triton.jit
def _number(packed, FRACTION: tl.constexpr, FACTOR: tl.constexpr, NAN_BITS: tl.constexpr):
    """Decode 8-bit floats to float32.

    Args:
        FRACTION: bits of the fraction.
        FACTOR: power of two that corrects the exponent bias; also normalises subnormal numbers.
        NAN_BITS: bit pattern of NaN without sign; 0x80 (negative zero) in the fnuz formats.
    """
    bits = packed.to(tl.uint32)
    placed = ((bits & 0x80) << 24) | ((bits & 0x7F) << (23 - FRACTION))
    number = placed.to(tl.float32, bitcast=True) * FACTOR
    masked = bits if NAN_BITS == 0x80 else bits & 0x7F
    return tl.where(masked == NAN_BITS, float("nan"), number)


@triton.jit
def apply_scale(
    total, scale, column, column_mask, group,
    SCALE_ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Multiply partial sums of one group of inputs by the group's scale in every column."""
    scale_index = column // (OUTPUTS // SCALE_ROWS) * GROUPS + group
    if scale.dtype.element_ty == tl.uint8:
        code = tl.load(scale + scale_index, mask=column_mask, other=0).to(tl.int32)
        # Exponent 0 means 2^-127, which is subnormal in float32; 255 means NaN.
        bits = tl.where(code == 0, 0x00400000, tl.where(code == 255, 0x7FC00000, code << 23))
        factor = bits.to(tl.float32, bitcast=True)
    else:
        factor = tl.load(scale + scale_index, mask=column_mask, other=0.0).to(tl.float32)
    return total * factor[None, :]


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """Apply the gated activation of ``fused_experts`` to gates g and up elements u."""
    if ACTIVATION == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "swiglu_oai":
        # Comparisons with NaN are false, so NaN is kept, unlike with tl.minimum.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        result = gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        result = gate / (1.0 + tl.exp(-gate))
    return result * up
