"""Check for an AMD GPU that torch can use, and explain why there is none.

System files answer all questions: no library of AMD is loaded, torch.cuda is not initialised, and
no child process is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from interposer import Verdict
from interposer_ops.devices.visible_devices import VisibleDevices, judge_gpus, refuse_hidden
from interposer_rocm._hardware.system import System
from interposer_rocm._hardware.topology import GPU
from interposer_rocm._hardware.torch_build import TorchBuild
from interposer_rocm._hardware.visibility import overridden, visible


@dataclass(frozen=True, slots=True)
class Presence:
    """Inputs of the check for a GPU: system files, the torch build and environment variables."""

    system: System
    build: TorchBuild
    variables: Mapping[str, str]

    def judge(self) -> Verdict:
        """Accept if there is a usable GPU; otherwise name the missing part."""
        verdict = self.system.judge()
        if not verdict:
            return verdict
        gpus = self.system.topology.gpus
        all_names = ", ".join(sorted({f"{gpu.name} ({gpu.version})" for gpu in gpus}))
        verdict = self.build.judge(f"there is {all_names}")
        if not verdict:
            return verdict
        visible_gpus = self.visible_gpus()
        if not visible_gpus.devices:
            return refuse_hidden(len(gpus), visible_gpus.note)
        return judge_gpus(
            f"{len(visible_gpus.devices)} visible of {len(gpus)}",
            [
                (f"{gpu.name} ({gpu.version})", self.build.judge_architecture(str(gpu.version)))
                for gpu in visible_gpus.devices
            ],
            f"amdgpu {self.system.files.driver}",
            visible_gpus.note,
        )

    def visible_gpus(self) -> VisibleDevices[GPU]:
        """Return the GPUs that HIP shows to this process, with overridden architectures."""
        visible_gpus = visible(self.system.topology.gpus, self.variables)
        return VisibleDevices(
            tuple(overridden(gpu, self.variables) for gpu in visible_gpus.devices),
            visible_gpus.note,
        )
