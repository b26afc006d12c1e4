# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""8-bit floats as matmul operands, on hardware with and without their formats."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from interposer_ops._triton.parameters import architecture, per_device

_OCP = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Operands(NamedTuple):
    """The conversions of a matmul's two operands before ``tl.dot``.

    "stored" and "int8" mean no conversion; "float16" means that triton converts to float16; "e4m3"
    and "e5m2" mean that ``decode`` converts the bits to float16.
    """

    x: str
    weight: str

    @property
    def is_decoded(self) -> bool:
        """True if kernels decode the operands from bytes: triton refuses these formats here."""
        return self.x in _OCP.values()


@per_device
def operands(
    device: torch.device, x: torch.dtype, weight: torch.dtype, operand_bits: int
) -> Operands:
    """Return the conversions of matmul operands of dtypes ``x`` and ``weight`` on ``device``.

    Args:
        operand_bits: minimum bits of matrix instruction operands, 8 or 16.
    """
    if x == torch.int8:
        return Operands("int8", "int8")
    native = _native_formats(architecture(device))
    if x in native and weight in native:
        return Operands(*("stored" if operand_bits == 8 else "float16",) * 2)
    if x in _OCP and weight in _OCP:
        return Operands(_OCP[x], _OCP[weight])
    return Operands("float16", "float16")


def _native_formats(name: str) -> tuple[torch.dtype, ...]:
    """Return the 8-bit floats that the architecture converts and multiplies in hardware.

    Source: PTX ISA, cvt and mma, sm_89 or newer; AMD CDNA 3, CDNA 4 and RDNA 4 ISA guides.
    """
    if name.startswith("gfx94"):
        return _FNUZ
    match = re.fullmatch(r"sm_(\d+)[af]?", name)
    has_ocp = int(match[1]) >= 89 if match else name.startswith(("gfx95", "gfx12"))
    return tuple(_OCP) if has_ocp else ()


@triton.jit
def decode(x, FORMAT: tl.constexpr):
    """Convert 8-bit floats to float16 exactly; a NaN stays a NaN.

    The exponent and mantissa bits move to their places in float16; a multiplication corrects the
    difference of the exponent biases.
    """
    if FORMAT == "float16":
        number = x.to(tl.float16)
    elif FORMAT == "e5m2":
        number = (x.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    else:
        tl.static_assert(FORMAT == "e4m3")
        # The mask clears the copy of the sign that the shift left in the exponent's top bit;
        # 256 = 2^(15 - 7) corrects the exponent bias.
        bits = ((x.to(tl.int16) << 8) >> 1) & -0x4001
        bits = tl.where((x & 0x7F) == 0x7F, 0x7E00, bits).to(tl.int16)
        number = bits.to(tl.float16, bitcast=True) * 256.0
    return number
