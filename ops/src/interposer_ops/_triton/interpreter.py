"""The platform that runs Triton kernels on the processor, by Triton's own interpreter.

It computes what the kernels compute, at a thousandth of the speed: for checking them where there
is no GPU. It is taken only where it is named::

    TRITON_INTERPRET=1 interposer verify interposer-ops --platform interpreter

float32, float16, bfloat16, float8 and integers convert as on hardware, see ``exact_interpreter``.
What it cannot show are races, the accuracy of a GPU's own exp, rsqrt and matrix units, and speed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from interposer import Capability, Device, Memory, Platform, Verdict
from interposer_ops._triton.availability import INTERPRETER, judge_package


class InterpreterPlatform(Platform):
    """One device that interprets Triton kernels over tensors in host memory."""

    name = "interpreter"
    device_type = "cpu"

    def __init__(self) -> None:
        # Imported here, as this module is loaded to be probed where triton is not installed.
        from interposer_ops._triton.exact_interpreter import make_exact

        make_exact()

    @classmethod
    def probe(cls) -> Verdict:
        """Accept where triton is installed and was imported to interpret."""
        verdict = judge_package()
        if not verdict:
            return verdict
        import triton
        from triton.runtime.interpreter import InterpretedFunction

        # Decided when a kernel is defined, triton's own ones included: later is too late.
        if triton.knobs.runtime.interpret and isinstance(triton.language.cdiv, InterpretedFunction):
            return Verdict.accept(f"triton {triton.__version__} interprets kernels")
        return Verdict.refuse(
            "triton compiles kernels: set TRITON_INTERPRET=1 before Python starts"
        )

    def devices(self) -> Sequence[Device]:
        """Return the one device."""
        return [Device(self.name, "cpu", "Triton's interpreter", self.capability("cpu"))]

    def capability(self, device: str) -> Capability:
        """Return what can be interpreted."""
        formats = frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})
        return Capability("interpreter", frozenset({"triton", INTERPRETER}), formats)

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return the dtypes that conversions are exact for, float32 first."""
        return (torch.float32, torch.bfloat16, torch.float16)

    def memory(self, device: str) -> Memory:
        """Return the physical memory of this machine, all of it as free as it will get."""
        pages = os.sysconf("SC_PAGE_SIZE")
        total, free = (pages * os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
        return Memory(total, free)

    def synchronize(self, device: str) -> None:
        """Return at once: a kernel is done when its launch returns."""
