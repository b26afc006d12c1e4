"""The ROCm platform."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch

from interposer import Capability, Device, NumericsPolicy, Platform, Verdict
from interposer.errors import ConfigError, PluginError, UnknownNameError
from interposer.tooling import applied, variables
from interposer_ops.devices.graph_recorder import GraphRecorder
from interposer_ops.devices.memory_profile import MemoryProfile, memory_profile
from interposer_rocm._hardware import system
from interposer_rocm._hardware.abilities import bandwidth_bytes_per_s, capability_of
from interposer_rocm._hardware.architectures import architecture_of
from interposer_rocm._hardware.presence import Presence
from interposer_rocm._hardware.topology import GPU
from interposer_rocm._hardware.torch_build import TorchBuild
from interposer_rocm._hardware.visibility import VARIABLES

_GIB = 2**30
# torch for HIP has them under the same name.
_REDUCTIONS = tuple(f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16"))


class ROCmPlatform(Platform):
    """The GPUs of AMD that HIP shows to this process; torch calls them ``cuda``.

    They are described from files of the driver, so that nothing is initialised until torch is
    given work.
    """

    name = "rocm"
    device_type = "cuda"

    @classmethod
    def probe(cls) -> Verdict:
        """Say whether there is a GPU to use; only files are read."""
        return cls._presence().judge()

    def devices(self) -> Sequence[Device]:
        """Return the visible devices in HIP's order, which is torch's.

        Raises: PluginError: none is left.
        """
        nodes = frozenset(gpu.node for gpu in self._gpus)
        return [
            Device(self.name, f"cuda:{ordinal}", gpu.name, capability_of(gpu, nodes))
            for ordinal, gpu in enumerate(self._gpus)
        ]

    def capability(self, device: str) -> Capability:
        """Return what ``device`` can do.

        Raises: UnknownNameError: it is none of ``devices()``.
        """
        return self.devices()[self._ordinal(device)].capability

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return bfloat16 first where matrix units multiply it, else float16."""
        known = architecture_of(self._gpus[self._ordinal(device)].version)
        return [getattr(torch, name) for name in known.dtypes]

    def numerics(self, policy: NumericsPolicy) -> contextlib.AbstractContextManager[None]:
        """Return a block that holds torch and AMD's libraries to ``policy``."""
        matmul = torch.backends.cuda.matmul
        return applied(policy, [(matmul, name) for name in _REDUCTIONS])

    def stream(self, device: str) -> contextlib.AbstractContextManager[object]:
        """Return a context in which work is queued on a stream of its own.

        It neither waits for what was queued before nor is waited for; ``torch.Event`` does that.
        """
        return torch.Stream(device)

    @classmethod
    def provides(cls, member: str) -> Verdict:
        """Answer as ``Platform.provides``, and refuse graphs of a HIP that fails silently."""
        verdict = super().provides(member)
        if verdict and member == "capture_graph":
            return TorchBuild.installed().judge_graphs()
        return verdict

    def capture_graph(self, step: Callable[[], object]) -> Callable[[], object]:
        """Return a replay of ``step``, captured on the current device after some calls of it.

        A torch for HIP has HIP's graphs under the names of CUDA's. All graphs of this platform
        share one pool of memory, see ``GraphRecorder``. Not run: no GPU was at hand.

        Raises: ConfigError: ``step`` is compiled, or captured already; or torch was built for a
            HIP that captures wrong steps without saying so.
        """
        verdict = TorchBuild.installed().judge_graphs()
        if not verdict:
            raise ConfigError(verdict.reason)
        return self._recorder.record(step)

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` in page-locked host memory."""
        return tensor.pin_memory()

    def peak_memory_bytes(self, device: str) -> int:
        """Return the most memory that torch has taken on ``device``."""
        return torch.accelerator.max_memory_reserved(device)

    def memory_profile(self, device: str) -> contextlib.AbstractContextManager[MemoryProfile]:
        """Return a block that measures the memory that it takes of the device."""
        return memory_profile(device)

    def start_method(self) -> str:
        """Return ``"spawn"``: HIP cannot be used in a fork of a process that has used it."""
        return "spawn"

    def facts(self) -> Mapping[str, str]:
        """Return what driver, build and environment say of the visible devices."""
        presence = self._presence()
        build = presence.build
        found = {
            "torch": f"{build.version}, for HIP {build.hip}",
            "driver": f"amdgpu {presence.system.driver or 'of unknown version'}",
        }
        read = variables()
        found |= {name: repr(read[name]) for name in VARIABLES if name in read}
        for ordinal, gpu in enumerate(self._gpus):
            found[f"cuda:{ordinal}"] = _sentence(gpu)
        return found

    def distributed_backend(self) -> str:
        """Return ``"nccl"``, the name under which a torch for HIP has RCCL."""
        return "nccl"

    def compile_backend(self) -> str:
        """Return ``"inductor"``."""
        return "inductor"

    @classmethod
    def _presence(cls) -> Presence:
        return Presence(system.look(), TorchBuild.installed(), variables())

    @cached_property
    def _gpus(self) -> tuple[GPU, ...]:
        shown = self._presence().shown()
        if not shown.gpus:
            raise PluginError(
                self.name,
                "interposer-rocm",
                f"the driver shows no device to this process: {shown.note or 'there is none'}",
                "interposer doctor says what is missing",
            )
        return shown.gpus

    @cached_property
    def _recorder(self) -> GraphRecorder:
        return GraphRecorder(torch.cuda, torch.cuda.CUDAGraph)

    def _ordinal(self, name: str) -> int:
        known = [f"cuda:{ordinal}" for ordinal in range(len(self._gpus))]
        wanted = "cuda:0" if name == "cuda" else name
        if wanted not in known:
            raise UnknownNameError("device", name, known)
        return known.index(wanted)


def _sentence(gpu: GPU) -> str:
    parts = [
        f"{gpu.name}, {gpu.version} ({architecture_of(gpu.version).family}), "
        f"{gpu.units} compute units",
        f"{gpu.memory_bytes / _GIB:.1f} GiB",
    ]
    bandwidth = bandwidth_bytes_per_s(gpu)
    if bandwidth:
        parts[-1] += f" at {bandwidth / 1e9:.0f} GB/s"
    if gpu.unique_id:
        parts.append(f"GPU-{gpu.unique_id}")
    if gpu.peers:
        links = "xGMI" if gpu.xgmi else "PCIe"
        parts.append(f"reaches nodes {', '.join(map(str, gpu.peers))} by {links}")
    return ", ".join(parts)
