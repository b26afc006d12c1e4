"""The ROCm platform: devices, streams, graphs and memory of AMD GPUs."""

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
from interposer_rocm._hardware.architectures import architecture_of
from interposer_rocm._hardware.presence import Presence
from interposer_rocm._hardware.topology import GPU, bandwidth_bytes_per_s, capability_of
from interposer_rocm._hardware.torch_build import TorchBuild
from interposer_rocm._hardware.visibility import VARIABLES

_GIB = 2**30
# torch for HIP has these settings under the same names as torch for CUDA.
_REDUCTIONS = tuple(f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16"))


class ROCmPlatform(Platform):
    """The AMD GPUs that HIP shows to this process; torch calls them ``cuda``.

    Devices are described from the driver's files, so HIP is not initialised before torch runs work.
    """

    name = "rocm"
    device_type = "cuda"

    @classmethod
    def probe(cls) -> Verdict:
        """Accept if there is a usable GPU, from system files alone."""
        return cls._presence().judge()

    def devices(self) -> Sequence[Device]:
        """Return the visible devices in the order of HIP and torch.

        Raises: PluginError: no device is visible.
        """
        nodes = frozenset(gpu.node for gpu in self._gpus)
        return [
            Device(self.name, f"cuda:{ordinal}", gpu.name, capability_of(gpu, nodes))
            for ordinal, gpu in enumerate(self._gpus)
        ]

    def capability(self, device: str) -> Capability:
        """Return the features, number formats and sizes of ``device`` that kernels require.

        Raises: UnknownNameError: ``devices()`` has no such device.
        """
        return self.devices()[self._ordinal(device)].capability

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return the dtypes for models: bfloat16 first on GPUs with bfloat16 matrix units."""
        architecture = architecture_of(self._gpus[self._ordinal(device)].version)
        return [getattr(torch, name) for name in architecture.dtypes]

    def numerics(self, policy: NumericsPolicy) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that applies ``policy`` to torch and AMD's libraries."""
        matmul = torch.backends.cuda.matmul
        return applied(policy, [(matmul, name) for name in _REDUCTIONS])

    def stream(self, device: str) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that queues work on a new stream.

        The new stream is not synchronized with the others; use ``torch.Event`` for that.
        """
        return torch.Stream(device)

    @classmethod
    def provides(cls, member: str) -> Verdict:
        """Extend ``Platform.provides``: refuse graphs on HIP versions that capture wrong steps."""
        verdict = super().provides(member)
        if verdict and member == "capture_graph":
            return TorchBuild.installed().judge_graphs()
        return verdict

    def capture_graph(self, step: Callable[[], object]) -> Callable[[], object]:
        """Warm up ``step``, capture a HIP graph, and return a function that replays the graph.

        torch for HIP names HIP graphs as CUDA graphs. All graphs of this platform share one memory
        pool; see ``GraphRecorder``. No GPU has run this method.

        Raises: ConfigError: ``step`` is compiled, or already captured; or torch was built for a
            HIP version that captures wrong steps silently.
        """
        verdict = TorchBuild.installed().judge_graphs()
        if not verdict:
            raise ConfigError(verdict.reason)
        return self._recorder.record(step)

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
        """Return ``"spawn"``: HIP does not work in a fork of a process that has used HIP."""
        return "spawn"

    def facts(self) -> Mapping[str, str]:
        """Return versions, environment variables and one description per visible device."""
        presence = self._presence()
        build = presence.build
        device_facts = {
            "torch": f"{build.version}, for HIP {build.hip}",
            "driver": f"amdgpu {presence.system.files.driver or 'of unknown version'}",
        }
        environment = variables()
        device_facts |= {name: repr(environment[name]) for name in VARIABLES if name in environment}
        for ordinal, gpu in enumerate(self._gpus):
            device_facts[f"cuda:{ordinal}"] = _describe(gpu)
        return device_facts

    def distributed_backend(self) -> str:
        """Return the torch.distributed backend, ``"nccl"``, which is torch's name for RCCL too."""
        return "nccl"

    def compile_backend(self) -> str:
        """Return the torch.compile backend, ``"inductor"``."""
        return "inductor"

    @classmethod
    def _presence(cls) -> Presence:
        return Presence(system.read_system(), TorchBuild.installed(), variables())

    @cached_property
    def _gpus(self) -> tuple[GPU, ...]:
        visible = self._presence().visible_gpus()
        if not visible.devices:
            raise PluginError(
                self.name,
                "interposer-rocm",
                f"the driver shows no device to this process: {visible.note or 'there is none'}",
                "interposer doctor says what is missing",
            )
        return visible.devices

    @cached_property
    def _recorder(self) -> GraphRecorder:
        return GraphRecorder(torch.cuda, torch.cuda.CUDAGraph)

    def _ordinal(self, name: str) -> int:
        device_names = [f"cuda:{ordinal}" for ordinal in range(len(self._gpus))]
        # A name without an index means the first device.
        full_name = "cuda:0" if name == "cuda" else name
        if full_name not in device_names:
            raise UnknownNameError("device", name, device_names)
        return device_names.index(full_name)


def _describe(gpu: GPU) -> str:
    parts = [
        f"{gpu.name}, {gpu.version} ({architecture_of(gpu.version).name}), "
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
