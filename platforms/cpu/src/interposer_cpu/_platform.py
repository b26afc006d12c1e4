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
    """All processors that this process may use, as one device."""

    name = "cpu"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Verdict:
        """Accept: whatever runs Python is one."""
        return Verdict.accept(f"{host.processor_name()} ({features.architecture()})")

    def devices(self) -> Sequence[Device]:
        """Return the one device."""
        return [Device(self.name, "cpu", host.processor_name(), self.capability("cpu"))]

    def capability(self, device: str) -> Capability:
        """Return what the processors can do, within the limits of this process."""
        found = features.features()
        return Capability(
            features.architecture(),
            found,
            features.formats(found),
            host.usable_cores(),
            host.memory().total_bytes,
            host.caches_bytes(),
        )

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return the dtypes of models: bfloat16 first where the hardware computes in it.

        Elsewhere native kernels widen it as they read it, which halves memory but not arithmetic,
        so it stands behind float32; without them torch would widen whole weights. float16 is
        offered only with hardware arithmetic: emulated it is unusably slow.
        """
        capability = self.capability(device)
        offered = [torch.float32]
        if "bfloat16" in capability.formats:
            offered.insert(0, torch.bfloat16)
        elif native.judge_device(capability):
            offered.append(torch.bfloat16)
        return [*offered, torch.float16] if "float16" in capability.formats else offered

    def memory(self, device: str) -> Memory:
        """Return total and available memory within the limits of control groups."""
        return host.memory()

    def synchronize(self, device: str) -> None:
        """Return at once: work is done when its call returns."""

    def all_finite(self, tensor: torch.Tensor) -> bool:
        """Search by the compiled library, at the speed of memory, where there is one."""
        found = are_finite(tensor)
        return super().all_finite(tensor) if found is None else found

    def copy_finite(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Copy and search in one pass of the compiled library, where there is one."""
        found = copy_finite(target, source)
        if found is None and target.itemsize > source.itemsize and source.device.type == "cpu":
            # A wider dtype makes nothing infinite, and the narrow one is fewer bytes.
            found = self.all_finite(source)
            target.copy_(source)
        return super().copy_finite(target, source) if found is None else found

    def peak_memory_bytes(self, device: str) -> int:
        """Return the largest resident size of this process so far."""
        if sys.platform == "win32":
            raise self._missing("peak_memory_bytes")
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def memory_profile(self, device: str) -> contextlib.AbstractContextManager[MemoryProfile]:
        """Return a block that measures what this process takes of the host's memory."""
        return memory_profile(device, memory_snapshot, reset_peak)

    @classmethod
    def provides(cls, member: str) -> Verdict:
        """Say whether there is an optional member here; not every system tells a peak."""
        return judge_peak() if member == "memory_profile" else super().provides(member)

    def numa_nodes(self) -> Mapping[int, Sequence[int]]:
        """Return the logical processors of every NUMA node."""
        return host.numa_nodes()

    def cores(self) -> Sequence[Sequence[int]]:
        """Return the logical processors that this process may use, core by core."""
        return host.cores()

    def bind_threads(self, processors: Sequence[int]) -> Verdict:
        """Bind all threads, and compute with no more of them than there are processors."""
        verdict = bind_process(processors)
        if verdict and torch.get_num_threads() > len(set(processors)):
            torch.set_num_threads(len(set(processors)))
        return verdict

    def num_threads(self) -> int:
        """Return how many threads compute one operator."""
        return torch.get_num_threads()

    def start_method(self) -> str:
        """Return ``"spawn"`` inside WSL, where forks of a process with devices fail; see there."""
        return facts.start_method()

    def facts(self) -> Mapping[str, str]:
        """Return which instructions, threads, memory and pages are in use, and why."""
        return facts.facts()

    def distributed_backend(self) -> str:
        """Return ``"gloo"``."""
        return "gloo"

    def compile_backend(self) -> str:
        """Return ``"inductor"``."""
        return "inductor"
