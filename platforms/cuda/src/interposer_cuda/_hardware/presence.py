"""Check for a GPU that CUDA shows to this process, and explain why there is none.

No check creates a context, initialises torch.cuda or calls ``cuInit`` in this process; see
``driver_query`` for the reason. NVIDIA's libraries are loaded only if there is a device file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from interposer import Verdict
from interposer_cuda._hardware import driver, nvml, system
from interposer_cuda._hardware.nvml import Inventory
from interposer_cuda._hardware.torch_build import TorchBuild
from interposer_cuda._hardware.visibility import visible
from interposer_ops.devices.driver_inquiry import DriverError, DriverLostError
from interposer_ops.devices.gpu_files import GPUFiles
from interposer_ops.devices.visible_devices import judge_gpus, refuse_hidden

_VERSION_MISMATCH = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH
# Shorter than the five seconds after which the plugin examination kills a probe.
_LIMIT_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Presence:
    """Inputs of the check for a GPU: system files, the torch build and environment variables."""

    system: GPUFiles
    build: TorchBuild
    variables: Mapping[str, str]

    def judge(self) -> Verdict:
        """Accept if there is a usable GPU; the cheapest checks run first.

        Raises: DriverLostError: there may be a GPU, but the driver crashes or hangs.
        """
        for verdict in (self.build.judge_vendor(), self.system.judge()):
            if not verdict:
                return verdict
        verdict = self.build.judge(self._detected_text())
        if not verdict:
            return verdict
        try:
            inventory = nvml.inventory(system.libraries(self.system, nvml.LIBRARY))
        except DriverError as error:
            return self._judge_by_driver(error)
        return self._judge_inventory(inventory)

    def libraries(self) -> tuple[str, ...]:
        """Return the names or paths to try, in order, to load CUDA's driver."""
        return system.libraries(self.system, driver.LIBRARY)

    def _detected_text(self) -> str:
        return f"there is a GPU ({', '.join(self.system.nodes)})"

    def _judge_inventory(self, inventory: Inventory) -> Verdict:
        if not inventory.gpus:
            faults_text = "; ".join(inventory.faults)
            text = f"NVIDIA's driver {inventory.driver} shows no usable GPU"
            return Verdict.refuse(f"{text}: {faults_text}" if faults_text else text)
        verdict = self.build.judge_driver(inventory.driver, inventory.cuda)
        if not verdict:
            return verdict
        visible_units = visible(inventory.gpus, self.variables)
        if not visible_units.devices:
            return refuse_hidden(len(inventory.gpus), visible_units.note)
        # An ambiguous index has an empty uuid; every GPU of the machine is checked then.
        listed_gpus = [
            gpu for gpu in inventory.gpus if {gpu.uuid, *gpu.parts} & {*visible_units.devices}
        ]
        usable_gpus = (
            listed_gpus if listed_gpus and "" not in visible_units.devices else inventory.gpus
        )
        return judge_gpus(
            f"{len(visible_units.devices)} visible of {len(inventory.gpus)}",
            [
                (gpu.name, self.build.judge_architecture(gpu.name, *gpu.architecture))
                for gpu in usable_gpus
            ],
            f"driver {inventory.driver}",
            visible_units.note,
            *inventory.faults,
        )

    def _judge_by_driver(self, error: DriverError) -> Verdict:
        """Check without NVML, by querying CUDA's driver in a child process."""
        if error.code == _VERSION_MISMATCH:
            return Verdict.refuse(
                f"NVML says {error}: the driver was updated and its old module is still loaded. "
                "Restart the machine"
            )
        try:
            answer = driver.ask(self.libraries(), _LIMIT_SECONDS)
        except DriverLostError:
            raise  # a crash or hang is not evidence that the machine has no GPU
        except DriverError as failure:
            return Verdict.refuse(f"{self._detected_text()}, but {failure}; NVML says {error}")
        verdict = self.build.judge_driver(self.system.driver, answer.cuda)
        if not verdict:
            return verdict
        gpus = [
            (device.name, self.build.judge_architecture(device.name, device.major, device.minor))
            for device in answer.devices
        ]
        if not gpus:
            return Verdict.refuse("CUDA's driver shows no device to this process")
        return judge_gpus(f"{len(gpus)} visible", gpus, "asked of CUDA's driver")
