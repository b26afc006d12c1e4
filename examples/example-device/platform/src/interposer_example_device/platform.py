"""The example device as a platform."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from interposer import Capability, Device, Platform, Verdict
from interposer_ops.devices.memory_profile import MemoryProfile, memory_profile

_DISTRIBUTION = "torch-example-device"


class ExamplePlatform(Platform):
    """The devices of torch-example-device."""

    name = "example"
    device_type = "example"

    @classmethod
    def probe(cls) -> Verdict:
        """Accept if torch has loaded the backend and it has a device."""
        try:
            version(_DISTRIBUTION)
        except PackageNotFoundError:
            return Verdict.refuse(f"{_DISTRIBUTION} is not installed")
        if not hasattr(torch, cls.device_type):
            setting = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
            reason = f"torch has not loaded {_DISTRIBUTION}"
            if setting is not None:
                reason += f", because TORCH_DEVICE_BACKEND_AUTOLOAD is {setting!r}"
            return Verdict.refuse(reason)
        if not _module().device_count():
            return Verdict.refuse("this process has no device, see the variable EXAMPLE_DEVICES")
        return Verdict.accept()

    def devices(self) -> Sequence[Device]:
        """Return the devices in torch's order."""
        return [
            Device(self.name, f"example:{index}", "Example device", self._capability(index))
            for index in range(_module().device_count())
        ]

    def capability(self, device: str) -> Capability:
        """Return the abilities of ``device``."""
        return self._capability(torch.device(device).index or 0)

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return the dtypes for models."""
        return [torch.float32, torch.bfloat16, torch.float16]

    def stream(self, device: str) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that queues work on a new stream."""
        return torch.Stream(device)

    def synchronize(self, device: str) -> None:
        """Wait until ``device`` has finished all queued work, on every stream."""
        _module().synchronize(device)

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy ``tensor`` to page-locked host memory."""
        return tensor.pin_memory()

    def peak_memory_bytes(self, device: str) -> int:
        """Return the peak of torch's reserved memory on ``device``, in bytes."""
        return torch.accelerator.max_memory_reserved(device)

    def memory_profile(self, device: str) -> contextlib.AbstractContextManager[MemoryProfile]:
        """Return a context manager that measures the device memory used by the block."""
        return memory_profile(device)

    def start_method(self) -> str:
        """Return ``"spawn"``: a fork has no threads that run the streams."""
        return "spawn"

    def facts(self) -> Mapping[str, str]:
        """Return versions, and operators that the CPU computed for the device."""
        module = _module()
        calls = sum(module.fallback_calls().values())
        return {
            _DISTRIBUTION: version(_DISTRIBUTION),
            "devices": str(module.device_count()),
            "operators on the CPU": f"{calls} calls in this process",
        }

    def _capability(self, index: int) -> Capability:
        _, total_bytes = torch.accelerator.get_memory_info(f"example:{index}")
        return Capability("example-1", formats=frozenset({"float32"}), memory_bytes=total_bytes)


def _module() -> Any:
    return torch.get_device_module(ExamplePlatform.device_type)
