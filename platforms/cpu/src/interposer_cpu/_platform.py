"""The CPU platform."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence

import torch

from interposer import Capability, Device, Memory, Platform, Verdict
from interposer_cpu import _facts as facts
from interposer_cpu import _features as features
from interposer_cpu import _host as host
from interposer_cpu import native
from interposer_cpu._binding import bind_process
from interposer_cpu._finite_numbers import are_finite, copy_finite
from interposer_cpu._memory_peak import judge_peak, memory_snapshot, reset_peak
from interposer_ops.devices.memory_profile import MemoryProfile, memory_profile


class CPUPlatform(Platform):
    """Platform with one device: all processors that this process may use."""

    name = "cpu"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Verdict:
        """Accept the platform always: every machine that runs Python has a CPU."""
        return Verdict.accept(f"{host.processor_name()} ({features.architecture()})")

    def devices(self) -> Sequence[Device]:
        """List the only device, ``cpu``."""
        return [Device(self.name, "cpu", host.processor_name(), self.capability("cpu"))]

    def capability(self, device: str) -> Capability:
        """Describe the processors: features, number formats, cores, memory and caches.

        Cores and memory are within the limits of this process.
        """
        names = features.features()
        return Capability(
            features.architecture(),
            names,
            features.formats(names),
            host.usable_cores(),
            host.memory().total_bytes,
            host.caches_bytes(),
        )

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """List the dtypes for models, best first.

        bfloat16 comes first if the hardware computes in bfloat16. Otherwise bfloat16 comes after
        float32, and only with native kernels, which widen bfloat16 while reading and so save
        memory but not arithmetic; torch would widen whole weights. float16 needs hardware
        arithmetic: emulated float16 is unusably slow.
        """
        capability = self.capability(device)
        offered = [torch.float32]
        if "bfloat16" in capability.formats:
            offered.insert(0, torch.bfloat16)
        elif native.judge_device(capability):
            offered.append(torch.bfloat16)
        return [*offered, torch.float16] if "float16" in capability.formats else offered

    def memory(self, device: str) -> Memory:
        """Measure total and available memory within the limits of control groups."""
        return host.memory()

    def synchronize(self, device: str) -> None:
        """Do nothing: a CPU kernel has finished when the call returns."""

    def all_finite(self, tensor: torch.Tensor) -> bool:
        """Check a tensor for NaN and infinity, with the compiled library if possible."""
        is_finite = are_finite(tensor)
        return super().all_finite(tensor) if is_finite is None else is_finite

    def copy_finite(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Copy a tensor and check for NaN and infinity, in one native pass if possible."""
        is_finite = copy_finite(target, source)
        if is_finite is None and target.itemsize > source.itemsize and source.device.type == "cpu":
            # Widening cannot create infinities, and the narrow source has fewer bytes to check.
            is_finite = self.all_finite(source)
            target.copy_(source)
        return super().copy_finite(target, source) if is_finite is None else is_finite

    def peak_memory_bytes(self, device: str) -> int:
        """Measure the largest resident set size of this process so far, in bytes."""
        if sys.platform == "win32":
            raise self._missing("peak_memory_bytes")
        import resource

        # ru_maxrss is in bytes on macOS, in units of 1024 bytes elsewhere.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def memory_profile(self, device: str) -> contextlib.AbstractContextManager[MemoryProfile]:
        """Measure the host memory that this process takes during a ``with`` block."""
        return memory_profile(device, memory_snapshot, reset_peak)

    @classmethod
    def provides(cls, member: str) -> Verdict:
        """Check whether this machine supports an optional member, such as peak memory."""
        return judge_peak() if member == "memory_profile" else super().provides(member)

    def numa_nodes(self) -> Mapping[int, Sequence[int]]:
        """Map every NUMA node to its logical processors."""
        return host.numa_nodes()

    def cores(self) -> Sequence[Sequence[int]]:
        """List the logical processors that this process may use, grouped by core."""
        return host.cores()

    def bind_threads(self, processors: Sequence[int]) -> Verdict:
        """Bind all threads, and limit torch's thread count to the number of processors."""
        verdict = bind_process(processors)
        if verdict and torch.get_num_threads() > len(set(processors)):
            torch.set_num_threads(len(set(processors)))
        return verdict

    def num_threads(self) -> int:
        """Count the threads that compute one operator."""
        return torch.get_num_threads()

    def start_method(self) -> str:
        """Return ``"spawn"`` inside WSL, else the system's default; see ``_facts.start_method``."""
        return facts.start_method()

    def facts(self) -> Mapping[str, str]:
        """Describe instructions, threads, memory and pages of this process, in sentences."""
        return facts.facts()

    def distributed_backend(self) -> str:
        """Return the backend of torch.distributed: ``"gloo"``."""
        return "gloo"

    def compile_backend(self) -> str:
        """Return the backend of torch.compile: ``"inductor"``."""
        return "inductor"
