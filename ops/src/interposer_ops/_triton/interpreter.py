"""Platform that runs Triton kernels on the CPU by triton's interpreter.

The interpreter lets you check kernels without a GPU, at about a thousandth of the speed. The
platform is used only if you name it::

    TRITON_INTERPRET=1 interposer verify interposer-ops --platform interpreter

float32, float16, bfloat16, float8 and integers convert as on hardware, see ``exact_interpreter``.
The interpreter cannot show races, speed, or the accuracy of a GPU's exp, rsqrt and matrix units.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from interposer import Capability, Device, Memory, Platform, Verdict
from interposer_ops._triton.availability import INTERPRETER, judge_package


class InterpreterPlatform(Platform):
    """A platform of one device that interprets Triton kernels on tensors in host memory."""

    name = "interpreter"
    device_type = "cpu"

    def __init__(self) -> None:
        # Imported late: ``probe`` must be callable without triton installed.
        from interposer_testing.exact_interpreter import make_exact

        make_exact()

    @classmethod
    def probe(cls) -> Verdict:
        """Accept the interpreter platform if triton was imported with TRITON_INTERPRET=1."""
        verdict = judge_package()
        if not verdict:
            return verdict
        import triton
        from triton.runtime.interpreter import InterpretedFunction

        # Triton reads the variable at the definition of each kernel, triton's own kernels included.
        # A variable set after the import of triton has no effect.
        if triton.knobs.runtime.interpret and isinstance(triton.language.cdiv, InterpretedFunction):
            return Verdict.accept(f"triton {triton.__version__} interprets kernels")
        return Verdict.refuse(
            "triton compiles kernels: set TRITON_INTERPRET=1 before Python starts"
        )

    def devices(self) -> Sequence[Device]:
        """Return the interpreter as the only device."""
        return [Device(self.name, "cpu", "Triton's interpreter", self.capability("cpu"))]

    def capability(self, device: str) -> Capability:
        """Return the features and dtypes of the interpreter."""
        formats = frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})
        return Capability("interpreter", frozenset({"triton", INTERPRETER}), formats)

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return the dtypes with exact conversions, float32 first."""
        return (torch.float32, torch.bfloat16, torch.float16)

    def memory(self, device: str) -> Memory:
        """Return the total and the free physical memory of this machine."""
        pages = os.sysconf("SC_PAGE_SIZE")
        total, free = (pages * os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
        return Memory(total, free)

    def synchronize(self, device: str) -> None:
        """Return at once: a kernel is done when its launch returns."""
