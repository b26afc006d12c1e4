# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Parts of the products of experts: which tile, stored weights as numbers, scales, activations."""

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


def seen(stored: Tensor, scale: Tensor | None) -> tuple[Tensor, str]:
    """Return weights as the kernel takes them, and the form that they are stored in.

    ``plain`` are numbers that triton converts; ``int4`` two integers to a byte, ``e2m1`` two codes
    whose scales are exponents; the others 8-bit floats that triton does not convert on the device,
    as their bits.
    """
    if stored.dtype == torch.uint8:
        return stored, "int4" if scale is None or scale.is_floating_point() else "e2m1"
    form = _form(stored.dtype, stored.device)
    return (stored if form == "plain" else stored.view(torch.uint8)), form


@per_device
def _form(dtype: torch.dtype, device: torch.device) -> str:
    """Return the form of numbers of ``dtype``.

    Source: ``supported_fp8_dtypes`` of the backends of triton 3.7.1; that of amd converts all.
    """
    name = architecture(device)
    if dtype not in _BITS or name.startswith("gfx"):
        return "plain"
    modern = name.startswith("sm_") and int(name[3:].rstrip("af")) >= 89
    return "plain" if modern and dtype == torch.float8_e4m3fn else _BITS[dtype]


@triton.jit
def expert_tile(num_blocks, NUM_TILES: tl.constexpr, BAND: tl.constexpr):
    """Return the block of slots and the tile of columns of this program.

    Programs that run at the same time share a band of blocks, and their tiles of weights.
    """
    program = tl.program_id(0)
    first = program // (BAND * NUM_TILES) * BAND
    height = tl.minimum(num_blocks - first, BAND)
    inside = program % (BAND * NUM_TILES)
    return first + inside % height, inside // height


@triton.jit
def load_weights(
    row, known, begin, start,
    dtype: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the weights ``[rows, STEP]`` of a step in ``dtype``, which holds them exactly.

    Args:
        row: pointers to the beginnings of the rows.
        begin: where the group begins.
        start: where the step begins within the group.
    """
    if FORM == "int4":
        # Groups are even, so that bytes belong to one of them.
        inner = start // 2 + tl.arange(0, STEP // 2)[None, :]
        read = known if GROUP % STEP == 0 else known & (inner < GROUP // 2)
        packed = tl.load(row + begin // 2 + inner, mask=read, other=0)
        integers = tl.interleave((packed & 15).to(tl.int8), (packed >> 4).to(tl.int8))
        result = (integers - 8).to(dtype)
    elif FORM == "e2m1":
        inner = start // 2 + tl.arange(0, STEP // 2)[None, :]
        read = known if GROUP % STEP == 0 else known & (inner < GROUP // 2)
        packed = tl.load(row + begin // 2 + inner, mask=read, other=0).to(tl.int16)
        code = tl.interleave(packed & 15, packed >> 4)
        # To where float16 has them; 2^(15 - 1) makes up for the difference of the biases.
        moved = (code & 7) << 9 | (code & 8) << 12
        result = (moved.to(tl.float16, bitcast=True) * 16384.0).to(dtype)
    else:
        inner = start + tl.arange(0, STEP)[None, :]
        read = known if GROUP % STEP == 0 else known & (inner < GROUP)
        if FORM == "plain":
            result = tl.load(row + begin + inner, mask=read, other=0.0).to(dtype)
        else:
            packed = tl.load(row + begin + inner, mask=read, other=0)
            if FORM == "e4m3fn":
                result = _number(packed, 3, 2.0**120, 0x7F).to(dtype)
            elif FORM == "e4m3fnuz":
                result = _number(packed, 3, 2.0**119, 0x80).to(dtype)
            else:
                result = _number(packed, 2, 2.0**111, 0x80).to(dtype)
    return result


@triton.jit
def _number(packed, FRACTION: tl.constexpr, FACTOR: tl.constexpr, NAN_BITS: tl.constexpr):
    """Return the float32 of an 8-bit float.

    Args:
        FRACTION: bits of the fraction.
        FACTOR: from the bias of its exponent to that of float32; makes a subnormal number normal.
        NAN_BITS: what is NaN whatever the sign; 0x80 is what would be a negative zero.
    """
    bits = packed.to(tl.uint32)
    placed = ((bits & 0x80) << 24) | ((bits & 0x7F) << (23 - FRACTION))
    number = placed.to(tl.float32, bitcast=True) * FACTOR
    masked = bits if NAN_BITS == 0x80 else bits & 0x7F
    return tl.where(masked == NAN_BITS, float("nan"), number)


@triton.jit
def scaled(
    total, scale, column, known, group,
    SCALE_ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Return sums of one group of the inputs times its scale of every column."""
    place = column // (OUTPUTS // SCALE_ROWS) * GROUPS + group
    if scale.dtype.element_ty == tl.uint8:
        code = tl.load(scale + place, mask=known, other=0).to(tl.int32)
        # 2^-127 is subnormal; 255 is not a number.
        bits = tl.where(code == 0, 0x00400000, tl.where(code == 255, 0x7FC00000, code << 23))
        factor = bits.to(tl.float32, bitcast=True)
    else:
        factor = tl.load(scale + place, mask=known, other=0.0).to(tl.float32)
    return total * factor[None, :]


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """Return what ``fused_experts`` calls act(g, u)."""
    if ACTIVATION == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "swiglu_oai":
        # Comparisons that a NaN fails leave it in its place.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        result = gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        result = gate / (1.0 + tl.exp(-gate))
    return result * up
