"""The XPU platform."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from interposer import Capability, Device, Platform, Verdict
from interposer.errors import PluginError, UnknownNameError
from interposer.tooling import variables
from interposer_ops.devices.memory_profile import MemoryProfile, memory_profile
from interposer_xpu import _triton_backend as triton_backend
from interposer_xpu._hardware import host_mapping, level_zero, system
from interposer_xpu._hardware.abilities import capability_of
from interposer_xpu._hardware.architectures import architecture_of
from interposer_xpu._hardware.level_zero import Answer, DriverError, XPUDevice
from interposer_xpu._hardware.presence import Presence
from interposer_xpu._hardware.torch_build import TorchBuild
from interposer_xpu._hardware.visibility import HIERARCHY, MASK, SELECTOR, shown
from interposer_xpu._packages import extension, kernel_package

_GIB = 2**30


class XPUPlatform(Platform):
    """The GPUs of Intel that SYCL shows to this process by way of Level Zero.

    Devices are asked for in another process, so that this one can be forked until it uses one.
    """

    name = "xpu"
    device_type = "xpu"

    @classmethod
    def probe(cls) -> Verdict:
        """Say whether there is a GPU to use; neither Level Zero nor torch.xpu is initialised."""
        return Presence(system.look(), TorchBuild.installed(), variables()).judge()

    def devices(self) -> Sequence[Device]:
        """Return the visible devices in the driver's order, which is torch's.

        Raises: PluginError: the driver does not answer.
        """
        return [
            Device(self.name, name, device.name, self._capability(device))
            for name, device in self._devices.items()
        ]

    def capability(self, device: str) -> Capability:
        """Return what ``device`` can do.

        Raises: UnknownNameError: it is none of ``devices()``.
        """
        return self._capability(self._device(device))

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return bfloat16 first, which all of Xe-HPG and newer compute in."""
        known = architecture_of(self._device(device).ip_version)
        return [getattr(torch, name) for name in known.dtypes]

    def stream(self, device: str) -> contextlib.AbstractContextManager[object]:
        """Return a context in which work is queued on a stream of its own.

        It neither waits for what was queued before nor is waited for; ``torch.Event`` does that.
        """
        return torch.Stream(device)

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` in page-locked host memory."""
        return tensor.pin_memory()

    def map_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a pinned ``tensor`` on the current device; see ``host_mapping``."""
        return host_mapping.mapped(tensor)

    def peak_memory_bytes(self, device: str) -> int:
        """Return the most memory that torch has taken on ``device``."""
        return torch.accelerator.max_memory_reserved(device)

    def memory_profile(self, device: str) -> contextlib.AbstractContextManager[MemoryProfile]:
        """Return a block that measures the memory that it takes of the device."""
        return memory_profile(device)

    def start_method(self) -> str:
        """Return ``"spawn"``: a fork of a process that has used Level Zero cannot use it."""
        return "spawn"

    def facts(self) -> Mapping[str, str]:
        """Return what driver and environment say of the visible devices."""
        build = TorchBuild.installed()
        found = {
            "torch": f"{build.version}, for SYCL {build.xpu or 'not at all'}",
            "driver": f"Level Zero {self._answer.driver}",
            "triton": triton_backend.judge().reason or "compiles for these devices",
        }
        for module in (kernel_package, extension):
            if module.PACKAGE.version:
                said = module.judge_installed().reason or "fits this torch"
                found[module.PACKAGE.distribution] = f"{module.PACKAGE.version}: {said}"
        read = variables()
        for name in (MASK, HIERARCHY, SELECTOR):
            if name in read:
                found[name] = repr(read[name])
        for name, device in self._devices.items():
            found[name] = _sentence(device)
        return found

    def distributed_backend(self) -> str:
        """Return ``"xccl"``."""
        return "xccl"

    def compile_backend(self) -> str:
        """Return ``"inductor"``."""
        return "inductor"

    @cached_property
    def _answer(self) -> Answer:
        try:
            answer = level_zero.ask()
        except DriverError as error:
            raise PluginError(
                self.name, "interposer-xpu", f"Level Zero lists no device: {error}"
            ) from error
        left = shown(len(answer.devices), variables()).ordinals
        if not left:
            raise PluginError(
                self.name,
                "interposer-xpu",
                "Level Zero and SYCL show no device to this process",
                f"look at {MASK} and {SELECTOR}",
            )
        return Answer(answer.driver, tuple(answer.devices[ordinal] for ordinal in left))

    @property
    def _devices(self) -> dict[str, XPUDevice]:
        return {f"xpu:{ordinal}": device for ordinal, device in enumerate(self._answer.devices)}

    def _device(self, name: str) -> XPUDevice:
        wanted = "xpu:0" if name == "xpu" else name
        if wanted not in self._devices:
            raise UnknownNameError("device", name, self._devices)
        return self._devices[wanted]

    def _capability(self, device: XPUDevice) -> Capability:
        return capability_of(device, triton=bool(triton_backend.judge()))


def _sentence(device: XPUDevice) -> str:
    known = architecture_of(device.ip_version)
    speed = device.bandwidth_bytes_per_s
    memory = f"{device.memory_bytes / _GIB:.1f} GiB"
    parts = [
        f"{device.name}, {known.name} ({known.family})",
        f"{device.xe_cores} Xe-cores with {device.vector_engines} vector engines",
        f"{memory} at {speed / 1e9:.0f} GB/s" if speed else memory,
        *(["of the processor's memory"] if device.integrated else []),
        device.uuid,
    ]
    return ", ".join(parts)
