"""The CUDA platform: devices, streams, graphs and memory of NVIDIA GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch

from interposer import Capability, Device, NumericsPolicy, Platform, Verdict
from interposer.errors import PluginError, UnknownNameError
from interposer.tooling import applied, variables
from interposer_cuda._hardware import driver, host_mapping, system
from interposer_cuda._hardware.architectures import architecture_of
from interposer_cuda._hardware.driver import (
    Answer,
    CUDADevice,
    bandwidth_bytes_per_s,
    capability_of,
)
from interposer_cuda._hardware.presence import Presence
from interposer_cuda._hardware.torch_build import TorchBuild
from interposer_cuda._hardware.visibility import DEVICES, ORDER
from interposer_ops.devices.driver_inquiry import DriverError
from interposer_ops.devices.graph_recorder import GraphRecorder
from interposer_ops.devices.memory_profile import MemoryProfile, memory_profile

_COMPUTE_MODES = {2: "prohibited", 3: "for one process"}
_GIB = 2**30
_REDUCTIONS = tuple(f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16"))


class CUDAPlatform(Platform):
    """The NVIDIA GPUs that CUDA shows to this process.

    A child process queries the devices, so this process can be forked until it uses a GPU.
    """

    name = "cuda"
    device_type = "cuda"

    @classmethod
    def probe(cls) -> Verdict:
        """Accept if there is a usable GPU, without initialising CUDA in this process."""
        return cls._presence().judge()

    def devices(self) -> Sequence[Device]:
        """Return the visible devices in the order of CUDA and torch.

        Raises: PluginError: the driver does not answer, or shows no device.
        """
        return [
            Device(self.name, f"cuda:{ordinal}", device.name, capability_of(device))
            for ordinal, device in enumerate(self._answer.devices)
        ]

    def capability(self, device: str) -> Capability:
        """Return the features, number formats and sizes of ``device`` that kernels require.

        Raises: UnknownNameError: ``devices()`` has no such device.
        """
        return capability_of(self._device(device))

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return the dtypes for models: bfloat16 first from Ampere on, float16 first before."""
        properties = self._device(device)
        architecture = architecture_of(properties.major, properties.minor)
        return [getattr(torch, name) for name in architecture.dtypes]

    def numerics(self, policy: NumericsPolicy) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that applies ``policy`` to torch and cuBLAS."""
        matmul = torch.backends.cuda.matmul
        return applied(policy, [(matmul, name) for name in _REDUCTIONS])

    def stream(self, device: str) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that queues work on a new stream.

        The new stream is not synchronized with the others; use ``torch.Event`` for that.
        """
        return torch.cuda.stream(torch.cuda.Stream(device))

    def capture_graph(self, step: Callable[[], object]) -> Callable[[], object]:
        """Warm up ``step``, capture a CUDA graph, and return a function that replays the graph.

        All graphs of this platform share one memory pool; see ``GraphRecorder``.

        Raises: ConfigError: ``step`` is compiled, or already captured.
        """
        return self._recorder.record(step)

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
        """Return ``"spawn"``: CUDA does not work in a fork of a process that has used CUDA."""
        return "spawn"

    def facts(self) -> Mapping[str, str]:
        """Return versions, environment variables and one description per visible device."""
        build, answer = TorchBuild.installed(), self._answer
        device_facts = {
            "torch": f"{build.version}, for CUDA {build.cuda}",
            "driver": f"{system.read_system().driver or 'of unknown version'}, "
            f"serves CUDA up to {answer.cuda[0]}.{answer.cuda[1]}",
        }
        environment = variables()
        for name in (DEVICES, ORDER):
            if name in environment:
                device_facts[name] = repr(environment[name])
        for ordinal, device in enumerate(answer.devices):
            device_facts[f"cuda:{ordinal}"] = _describe(device)
        return device_facts

    def distributed_backend(self) -> str:
        """Return the torch.distributed backend, ``"nccl"``."""
        return "nccl"

    def compile_backend(self) -> str:
        """Return the torch.compile backend, ``"inductor"``."""
        return "inductor"

    @classmethod
    def _presence(cls) -> Presence:
        return Presence(system.read_system(), TorchBuild.installed(), variables())

    @cached_property
    def _answer(self) -> Answer:
        presence = self._presence()
        try:
            answer = driver.ask(presence.libraries())
        except DriverError as error:
            raise PluginError(
                self.name, "interposer-cuda", f"CUDA's driver lists no device: {error}"
            ) from error
        if not answer.devices:
            raise PluginError(
                self.name,
                "interposer-cuda",
                "CUDA's driver shows no device to this process",
                f"look at {DEVICES}",
            )
        return answer

    @cached_property
    def _recorder(self) -> GraphRecorder:
        return GraphRecorder(torch.cuda, torch.cuda.CUDAGraph)

    def _device(self, name: str) -> CUDADevice:
        devices = self._answer.devices
        device_by_name = {f"cuda:{ordinal}": device for ordinal, device in enumerate(devices)}
        # A name without an index means the first device.
        full_name = "cuda:0" if name == "cuda" else name
        if full_name not in device_by_name:
            raise UnknownNameError("device", name, device_by_name)
        return device_by_name[full_name]


def _describe(device: CUDADevice) -> str:
    parts = [
        f"{device.name}, sm_{device.major}{device.minor}, {device.multiprocessors} multiprocessors",
        f"{device.memory_bytes / _GIB:.1f} GiB at {bandwidth_bytes_per_s(device) / 1e9:.0f} GB/s",
        device.uuid,
    ]
    if device.peers:
        parts.append(f"reaches {', '.join(f'cuda:{ordinal}' for ordinal in device.peers)}")
    if device.compute_mode in _COMPUTE_MODES:
        parts.append(f"its compute mode is {_COMPUTE_MODES[device.compute_mode]}")
    return ", ".join(parts)
