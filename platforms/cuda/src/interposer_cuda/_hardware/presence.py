"""Presence of a GPU that CUDA shows to this process, or the reason of its absence.

No step creates a context, initialises torch.cuda or calls ``cuInit`` in this process; see
``driver_inquiry`` for why that matters. A library of the vendor is loaded only where the system
shows a device file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from interposer import Verdict
from interposer_cuda._hardware import driver, nvml
from interposer_cuda._hardware.nvml import Inventory, NVMLError
from interposer_cuda._hardware.system import System
from interposer_cuda._hardware.torch_build import TorchBuild
from interposer_cuda._hardware.visibility import visible

_NVML = "libnvidia-ml.so.1"
_CUDA = "libcuda.so.1"
_MISMATCH = 18
# A probe has to return; the process that examines plugins stops it after five seconds.
_LIMIT_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Presence:
    """The facts that decide: files of the system, the build of torch, the environment."""

    system: System
    build: TorchBuild
    variables: Mapping[str, str]

    def judge(self) -> Verdict:
        """Say whether there is a GPU to use, cheapest questions first.

        Raises: DriverLostError: there may be one, but its driver crashes or hangs.
        """
        if sys.platform != "linux":
            return Verdict.refuse(
                f"finds GPUs on Linux, and in Windows inside WSL; this is {sys.platform}"
            )
        for verdict in (self.build.judge_vendor(), self.system.judge()):
            if not verdict:
                return verdict
        verdict = self.build.judge_cuda(self._seen())
        if not verdict:
            return verdict
        try:
            inventory = nvml.inventory(self.system.libraries(_NVML))
        except NVMLError as error:
            return self._by_driver(error)
        return self._by_inventory(inventory)

    def libraries(self) -> tuple[str, ...]:
        """Return what to load CUDA's driver by."""
        return self.system.libraries(_CUDA)

    def _seen(self) -> str:
        return f"a GPU ({', '.join(self.system.nodes)})"

    def _by_inventory(self, inventory: Inventory) -> Verdict:
        if not inventory.gpus:
            said = "; ".join(inventory.faults)
            text = f"NVIDIA's driver {inventory.driver} shows no usable GPU"
            return Verdict.refuse(f"{text}: {said}" if said else text)
        verdict = self.build.judge_driver(inventory.driver, inventory.cuda)
        if not verdict:
            return verdict
        shown = visible(inventory.gpus, self.variables)
        if not shown.uuids:
            count = len(inventory.gpus)
            return Verdict.refuse(f"none of {count} GPUs is visible: {shown.note}")
        known = [gpu for gpu in inventory.gpus if {gpu.uuid, *gpu.parts} & {*shown.uuids}]
        meant = known if known and "" not in shown.uuids else inventory.gpus
        refused = [self.build.judge_architecture(gpu.name, *gpu.architecture) for gpu in meant]
        if not any(refused):
            return refused[0]
        names = ", ".join(sorted({gpu.name for gpu in meant}))
        what = f"{len(shown.uuids)} visible of {len(inventory.gpus)}: {names}"
        parts = [what, f"driver {inventory.driver}"]
        parts += [shown.note] if shown.note else []
        return Verdict.accept("; ".join([*parts, *inventory.faults]))

    def _by_driver(self, error: NVMLError) -> Verdict:
        """Judge without NVML, by what CUDA's driver says in a process of its own."""
        if error.code == _MISMATCH:
            return Verdict.refuse(
                f"NVML says {error}: the driver was updated and its old module is still loaded. "
                "Restart the machine"
            )
        try:
            answer = driver.ask(self.libraries(), _LIMIT_SECONDS)
        except driver.DriverLostError:
            raise  # not to be taken for a machine that has no GPU
        except driver.DriverError as failure:
            return Verdict.refuse(f"there is {self._seen()}, but {failure}; NVML says {error}")
        verdict = self.build.judge_driver(self.system.driver, answer.cuda)
        if not verdict:
            return verdict
        refused = [
            self.build.judge_architecture(device.name, device.major, device.minor)
            for device in answer.devices
        ]
        if not refused:
            return Verdict.refuse("CUDA's driver shows no device to this process")
        if not any(refused):
            return refused[0]
        names = ", ".join(sorted({device.name for device in answer.devices}))
        return Verdict.accept(f"{len(refused)} visible: {names}; asked of CUDA's driver")
