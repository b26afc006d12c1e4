"""The CUDA platform."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch

from interposer import Capability, Device, NumericsPolicy, Platform, Verdict
from interposer.errors import PluginError, UnknownNameError
from interposer.tooling import applied, variables
from interposer_cuda._hardware import driver, host_mapping, system
from interposer_cuda._hardware.abilities import bandwidth_bytes_per_s, capability_of
from interposer_cuda._hardware.architectures import architecture_of
from interposer_cuda._hardware.driver import Answer, CUDADevice, DriverError
from interposer_cuda._hardware.presence import Presence
from interposer_cuda._hardware.torch_build import TorchBuild
from interposer_cuda._hardware.visibility import DEVICES, ORDER
from interposer_ops.devices.graph_recorder import GraphRecorder
from interposer_ops.devices.memory_profile import MemoryProfile, memory_profile

_COMPUTE_MODES = {2: "prohibited", 3: "for one process"}
_GIB = 2**30
_REDUCTIONS = tuple(f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16"))


class CUDAPlatform(Platform):
    """The GPUs of NVIDIA that CUDA shows to this process.

    Devices are asked for in another process, so that this one can be forked until it uses one.
    """

    name = "cuda"
    device_type = "cuda"

    @classmethod
    def probe(cls) -> Verdict:
        """Say whether there is a GPU to use; neither a context nor CUDA itself is initialised."""
        return cls._presence().judge()

    def devices(self) -> Sequence[Device]:
        """Return the visible devices in CUDA's order, which is torch's.

        Raises: PluginError: the driver does not answer.
        """
        return [
            Device(self.name, f"cuda:{ordinal}", device.name, capability_of(device))
            for ordinal, device in enumerate(self._answer.devices)
        ]

    def capability(self, device: str) -> Capability:
        """Return what ``device`` can do.

        Raises: UnknownNameError: it is none of ``devices()``.
        """
        return capability_of(self._device(device))

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return bfloat16 first from Ampere on, float16 first on what is older."""
        found = self._device(device)
        return [getattr(torch, name) for name in architecture_of(found.major, found.minor).dtypes]

    def numerics(self, policy: NumericsPolicy) -> contextlib.AbstractContextManager[None]:
        """Return a block that holds torch and cuBLAS to ``policy``."""
        matmul = torch.backends.cuda.matmul
        return applied(policy, [(matmul, name) for name in _REDUCTIONS])

    def stream(self, device: str) -> contextlib.AbstractContextManager[object]:
        """Return a context in which work is queued on a stream of its own.

        It neither waits for what was queued before nor is waited for; ``torch.Event`` does that.
        """
        return torch.cuda.stream(torch.cuda.Stream(device))

    def capture_graph(self, step: Callable[[], object]) -> Callable[[], object]:
        """Return a replay of ``step``, captured on the current device after some calls of it.

        All graphs of this platform share one pool of memory, see ``GraphRecorder``.

        Raises: ConfigError: ``step`` is compiled, or captured already.
        """
        return self._recorder.record(step)

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
        """Return ``"spawn"``: a fork of a process that has used CUDA cannot use it."""
        return "spawn"

    def facts(self) -> Mapping[str, str]:
        """Return what driver and environment say of the visible devices."""
        build, answer = TorchBuild.installed(), self._answer
        found = {
            "torch": f"{build.version}, for CUDA {build.cuda}",
            "driver": f"{system.look().driver or 'of unknown version'}, "
            f"serves CUDA up to {answer.cuda[0]}.{answer.cuda[1]}",
        }
        read = variables()
        for name in (DEVICES, ORDER):
            if name in read:
                found[name] = repr(read[name])
        for ordinal, device in enumerate(answer.devices):
            found[f"cuda:{ordinal}"] = _sentence(device)
        return found

    def distributed_backend(self) -> str:
        """Return ``"nccl"``."""
        return "nccl"

    def compile_backend(self) -> str:
        """Return ``"inductor"``."""
        return "inductor"

    @classmethod
    def _presence(cls) -> Presence:
        return Presence(system.look(), TorchBuild.installed(), variables())

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
        known = {f"cuda:{ordinal}": device for ordinal, device in enumerate(devices)}
        wanted = "cuda:0" if name == "cuda" else name
        if wanted not in known:
            raise UnknownNameError("device", name, known)
        return known[wanted]


def _sentence(device: CUDADevice) -> str:
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
