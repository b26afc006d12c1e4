"""The XPU platform: devices, streams and memory of Intel GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from interposer import Capability, Device, Platform, Verdict
from interposer.errors import PluginError, UnknownNameError
from interposer.tooling import variables
from interposer_ops.devices.driver_inquiry import DriverError
from interposer_ops.devices.memory_profile import MemoryProfile, memory_profile
from interposer_xpu import _triton_backend as triton_backend
from interposer_xpu._hardware import host_mapping, level_zero, system
from interposer_xpu._hardware.architectures import architecture_of
from interposer_xpu._hardware.level_zero import Answer, XPUDevice, capability_of
from interposer_xpu._hardware.presence import Presence, TorchBuild
from interposer_xpu._hardware.visibility import HIERARCHY, MASK, SELECTOR, visible_devices
from interposer_xpu._packages import kernel_package

_GIB = 2**30


class XPUPlatform(Platform):
    """The Intel GPUs that SYCL shows to this process through Level Zero.

    A child process queries the devices, so this process can be forked until it uses a GPU.
    """

    name = "xpu"
    device_type = "xpu"

    @classmethod
    def probe(cls) -> Verdict:
        """Accept if there is a usable GPU, without initialising Level Zero in this process."""
        return Presence(system.read_system(), TorchBuild.installed(), variables()).judge()

    def devices(self) -> Sequence[Device]:
        """Return the visible devices in the order of the driver and torch.

        Raises: PluginError: the driver does not answer, or no device is visible.
        """
        return [
            Device(self.name, name, device.name, self._capability(device))
            for name, device in self._devices.items()
        ]

    def capability(self, device: str) -> Capability:
        """Return the features, number formats and sizes of ``device`` that kernels require.

        Raises: UnknownNameError: ``devices()`` has no such device.
        """
        return self._capability(self._device(device))

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return the dtypes for models: bfloat16 first on Xe-HPG and newer."""
        architecture = architecture_of(self._device(device).ip_version)
        return [getattr(torch, name) for name in architecture.dtypes]

    def stream(self, device: str) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that queues work on a new stream.

        The new stream is not synchronized with the others; use ``torch.Event`` for that.
        """
        return torch.Stream(device)

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy ``tensor`` to page-locked host memory."""
        return tensor.pin_memory()

    def map_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a zero-copy view of pinned ``tensor`` on the current device."""
        return host_mapping.device_view(tensor)

    def peak_memory_bytes(self, device: str) -> int:
        """Return the peak of torch's reserved memory on ``device``, in bytes."""
        return torch.accelerator.max_memory_reserved(device)

    def memory_profile(self, device: str) -> contextlib.AbstractContextManager[MemoryProfile]:
        """Return a context manager that measures the device memory used by the block."""
        return memory_profile(device)

    def start_method(self) -> str:
        """Return ``"spawn"``: Level Zero fails in a fork of a process that has used Level Zero."""
        return "spawn"

    def facts(self) -> Mapping[str, str]:
        """Return versions, environment variables and one description per visible device."""
        build = TorchBuild.installed()
        device_facts = {
            "torch": f"{build.version}, for SYCL {build.xpu or 'not at all'}",
            "driver": f"Level Zero {self._answer.driver}",
            "triton": triton_backend.judge().reason or "compiles for these devices",
        }
        package = kernel_package.PACKAGE
        if package.version:
            verdict_text = kernel_package.judge_installed().reason or "fits this torch"
            device_facts[package.distribution] = f"{package.version}: {verdict_text}"
        environment = variables()
        for name in (MASK, HIERARCHY, SELECTOR):
            if name in environment:
                device_facts[name] = repr(environment[name])
        for name, device in self._devices.items():
            device_facts[name] = _describe(device)
        return device_facts

    def distributed_backend(self) -> str:
        """Return the torch.distributed backend, ``"xccl"``."""
        return "xccl"

    def compile_backend(self) -> str:
        """Return the torch.compile backend, ``"inductor"``."""
        return "inductor"

    @cached_property
    def _answer(self) -> Answer:
        try:
            answer = level_zero.ask()
        except DriverError as error:
            raise PluginError(
                self.name, "interposer-xpu", f"Level Zero lists no device: {error}"
            ) from error
        visible_ordinals = visible_devices(len(answer.devices), variables()).devices
        if not visible_ordinals:
            raise PluginError(
                self.name,
                "interposer-xpu",
                "Level Zero and SYCL show no device to this process",
                f"look at {MASK} and {SELECTOR}",
            )
        return Answer(answer.driver, tuple(answer.devices[ordinal] for ordinal in visible_ordinals))

    @property
    def _devices(self) -> dict[str, XPUDevice]:
        return {f"xpu:{ordinal}": device for ordinal, device in enumerate(self._answer.devices)}

    def _device(self, name: str) -> XPUDevice:
        # A name without an index means the first device.
        full_name = "xpu:0" if name == "xpu" else name
        if full_name not in self._devices:
            raise UnknownNameError("device", name, self._devices)
        return self._devices[full_name]

    def _capability(self, device: XPUDevice) -> Capability:
        return capability_of(device, triton=bool(triton_backend.judge()))


def _describe(device: XPUDevice) -> str:
    architecture = architecture_of(device.ip_version)
    bandwidth = device.bandwidth_bytes_per_s
    memory = f"{device.memory_bytes / _GIB:.1f} GiB"
    parts = [
        f"{device.name}, {architecture.name} ({architecture.family})",
        f"{device.xe_cores} Xe-cores with {device.vector_engines} vector engines",
        f"{memory} at {bandwidth / 1e9:.0f} GB/s" if bandwidth else memory,
        *(["of the processor's memory"] if device.integrated else []),
        device.uuid,
    ]
    return ", ".join(parts)
