"""Check for an Intel GPU that torch can use, and explain why there is none.

No check initialises torch.xpu or loads Level Zero in this process; see ``level_zero_query`` for
the reason. A child process queries the driver, and only if there is a device file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from interposer import Verdict
from interposer_ops.devices import torch_build
from interposer_ops.devices.driver_inquiry import DriverError, DriverLostError
from interposer_ops.devices.gpu_files import GPUFiles
from interposer_ops.devices.visible_devices import judge_gpus, refuse_hidden
from interposer_xpu._hardware import level_zero
from interposer_xpu._hardware.architectures import architecture_of
from interposer_xpu._hardware.level_zero import Answer, XPUDevice
from interposer_xpu._hardware.visibility import driver_settings, visible_devices

# Shorter than the five seconds after which the plugin examination kills a probe.
_LIMIT_SECONDS = 4.0


class TorchBuild(torch_build.TorchBuild):
    """A build of torch, which must support XPU to use Intel GPUs."""

    toolkit = "XPU"
    wheels = "xpu"


@dataclass(frozen=True, slots=True)
class Presence:
    """Inputs of the check for a GPU: system files, the torch build and environment variables.

    Attributes:
        limit_seconds: time limit for the driver's answer.
    """

    system: GPUFiles
    build: TorchBuild
    variables: Mapping[str, str]
    limit_seconds: float = _LIMIT_SECONDS

    def judge(self) -> Verdict:
        """Accept if there is a usable GPU; the cheapest checks run first.

        Raises: DriverLostError: there may be a GPU, but the driver crashes or hangs.
        """
        verdict = self.system.judge()
        if verdict:
            verdict = self.build.judge(self._detected_text())
        if not verdict:
            return verdict
        try:
            answer = level_zero.ask(limit_seconds=self.limit_seconds)
        except DriverLostError:
            raise  # a crash or hang is not evidence that the machine has no GPU
        except DriverError as failure:
            return Verdict.refuse(f"{self._detected_text()}, but {failure}")
        return self._judge_answer(answer)

    def _detected_text(self) -> str:
        nodes = ", ".join(self.system.nodes)
        if self.system.wsl:
            return f"there may be a GPU of Intel behind {nodes}"
        displays = self.system.displays_text
        where = f" at {displays}" if displays else ""
        return f"there is a GPU of Intel ({nodes}){where}"

    def _judge_answer(self, answer: Answer) -> Verdict:
        settings_text = driver_settings(self.variables)
        if not answer.devices:
            reason = f": {settings_text} hides every GPU, or names none" if settings_text else ""
            return Verdict.refuse(f"Level Zero shows no GPU to this process{reason}")
        sycl_devices = visible_devices(len(answer.devices), self.variables)
        if not sycl_devices.devices:
            return refuse_hidden(len(answer.devices), sycl_devices.note, "SYCL")
        devices = [answer.devices[ordinal] for ordinal in sycl_devices.devices]
        return judge_gpus(
            f"{len(devices)} visible of {len(answer.devices)}",
            [(device.name, _judge_architecture(device)) for device in devices],
            f"driver {answer.driver}",
            settings_text,
            sycl_devices.note,
        )


def _judge_architecture(device: XPUDevice) -> Verdict:
    if architecture_of(device.ip_version).computes:
        return Verdict.accept()
    return Verdict.refuse(
        f"{device.name} is of an architecture before Xe-HPG (Arc A-series), for which torch has "
        "no kernels"
    )
