"""Presence of a GPU of this vendor that torch can use, or the reason of its absence.

Files of the system answer all of it. No library of the vendor is loaded and torch.cuda is not
initialised, in this process or another.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from interposer import Verdict
from interposer_rocm._hardware.system import System
from interposer_rocm._hardware.torch_build import TorchBuild
from interposer_rocm._hardware.visibility import Visible, overridden, visible


@dataclass(frozen=True, slots=True)
class Presence:
    """The facts that decide: files of the system, the build of torch, the environment."""

    system: System
    build: TorchBuild
    variables: Mapping[str, str]

    def judge(self) -> Verdict:
        """Say whether there is a GPU to use."""
        if sys.platform != "linux":
            return Verdict.refuse(f"finds GPUs on Linux, this is {sys.platform}")
        verdict = self.system.judge()
        if not verdict:
            return verdict
        gpus = self.system.topology.gpus
        every = ", ".join(sorted({f"{gpu.name} ({gpu.version})" for gpu in gpus}))
        verdict = self.build.judge(every)
        if not verdict:
            return verdict
        shown = self.shown()
        if not shown.gpus:
            count = f"{len(gpus)} GPUs" if len(gpus) > 1 else "1 GPU"
            return Verdict.refuse(f"none of {count} is visible: {shown.note}")
        refused = [self.build.judge_architecture(str(gpu.version)) for gpu in shown.gpus]
        if not any(refused):
            return refused[0]
        names = ", ".join(sorted({f"{gpu.name} ({gpu.version})" for gpu in shown.gpus}))
        what = f"{len(shown.gpus)} visible of {len(gpus)}: {names}"
        parts = [what, f"amdgpu {self.system.driver}", shown.note]
        return Verdict.accept("; ".join(filter(None, parts)))

    def shown(self) -> Visible:
        """Return the GPUs that HIP shows to this process, as it presents them."""
        found = visible(self.system.topology.gpus, self.variables)
        return Visible(
            tuple(overridden(gpu, self.variables) for gpu in found.gpus),
            found.note,
        )
