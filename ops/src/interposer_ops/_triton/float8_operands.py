# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""8-bit floats as operands of matrix products, on hardware that knows their formats or does not."""

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
    """The form of a kernel's operands when it multiplies them.

    Each is "stored", which leaves them as they are; "float16", a conversion by triton; or "e4m3" or
    "e5m2", one of bits. ``int8`` has nothing to convert.
    """

    x: str
    weight: str

    @property
    def decoded(self) -> bool:
        """True if the kernel takes bits, as bytes: triton refuses formats that hardware lacks."""
        return self.x in _OCP.values()


@per_device
def operands(
    device: torch.device, x: torch.dtype, weight: torch.dtype, operand_bits: int
) -> Operands:
    """Return what is done to operands of these dtypes; all 8-bit floats fit float16.

    Args:
        operand_bits: those that a matrix instruction is given at least, 8 or 16.
    """
    if x == torch.int8:
        return Operands("int8", "int8")
    known = _formats(architecture(device))
    if x in known and weight in known:
        return Operands(*("stored" if operand_bits == 8 else "float16",) * 2)
    if x in _OCP and weight in _OCP:
        return Operands(_OCP[x], _OCP[weight])
    return Operands("float16", "float16")


def _formats(name: str) -> tuple[torch.dtype, ...]:
    """Return the 8-bit floats that the architecture converts and multiplies.

    Source: PTX ISA, cvt and mma, sm_89 or newer; AMD CDNA 3, CDNA 4 and RDNA 4 ISA guides.
    """
    if name.startswith("gfx94"):
        return _FNUZ
    found = re.fullmatch(r"sm_(\d+)[af]?", name)
    ours = int(found[1]) >= 89 if found else name.startswith(("gfx95", "gfx12"))
    return tuple(_OCP) if ours else ()


@triton.jit
def decoded(x, FORMAT: tl.constexpr):
    """Return the numbers in float16, which holds all of them.

    A format's exponent and mantissa are put where float16 has its own, and the difference of the
    exponents' biases is made up for. What is not a number stays so.
    """
    if FORMAT == "float16":
        number = x.to(tl.float16)
    elif FORMAT == "e5m2":
        number = (x.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    else:
        tl.static_assert(FORMAT == "e4m3")
        # The sign stays in its place; 2^(15 - 7) is the difference of the biases.
        moved = ((x.to(tl.int16) << 8) >> 1) & -0x4001
        moved = tl.where((x & 0x7F) == 0x7F, 0x7E00, moved).to(tl.int16)
        number = moved.to(tl.float16, bitcast=True) * 256.0
    return number
