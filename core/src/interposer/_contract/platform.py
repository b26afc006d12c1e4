"""The platform contract: how a plugin describes one kind of hardware and its devices.

Required members are abstract. Optional members are marked ``@optional``: an optional member raises
``MissingMemberError`` unless a platform overrides it, and ``provides`` tells whether one does.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from interposer._contract.capability import Capability, Device, Memory
from interposer._contract.choice import Choice
from interposer._contract.errors import ConfigError, MissingMemberError
from interposer._contract.finite_numbers import are_finite
from interposer._contract.verdict import Verdict

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class NumericsPolicy:
    """The precision of matmuls, and the random seed, for a block of code.

    torch has these as settings of the process. The defaults meet the definition of ``linear``.
    Source: torch's notes on numerical accuracy (reduced precision reductions, TensorFloat-32) and
    ``set_float32_matmul_precision``, which sets every backend of torch.

    Attributes:
        float32: arithmetic of float32 matmuls: ``"highest"`` is float32, ``"high"`` is
            TensorFloat-32 or three bfloat16 matmuls, ``"medium"`` is one bfloat16 matmul.
        reduce_in_16_bits: allow 16-bit partial sums in 16-bit matmuls; a platform without such a
            setting uses 32 bits.
        seed: for the generators of all devices; None leaves generators unchanged.

    Raises: ConfigError: the precision is unknown.
    """

    float32: Literal["highest", "high", "medium"] = "highest"
    reduce_in_16_bits: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        precisions = ("highest", "high", "medium")
        if self.float32 not in precisions:
            raise ConfigError(
                f"float32 is {self.float32!r}, must be one of {', '.join(precisions)}"
            )


@contextlib.contextmanager
def applied(policy: NumericsPolicy, reductions: Sequence[tuple[Any, str]] = ()) -> Iterator[None]:
    """Apply ``policy`` within a block, and restore the previous settings afterwards.

    A graph that is captured inside keeps the policy. Random generators are not restored.

    Args:
        reductions: settings of the platform's libraries that allow 16-bit sums, as objects and
            attribute names.
    """
    precision = torch.get_float32_matmul_precision()
    previous_reductions = [getattr(owner, name) for owner, name in reductions]
    try:
        torch.set_float32_matmul_precision(policy.float32)
        for owner, name in reductions:
            setattr(owner, name, policy.reduce_in_16_bits)
        if policy.seed is not None:
            torch.manual_seed(policy.seed)
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for (owner, name), previous in zip(reductions, previous_reductions, strict=True):
            setattr(owner, name, previous)


def optional(member: F) -> F:
    """Mark a member of ``Platform`` that a platform may leave out."""
    member.__interposer_optional__ = True  # type: ignore[attr-defined]
    return member


class Platform(ABC):
    """One kind of hardware: devices, memory, streams and graphs.

    Defaults use ``torch.accelerator`` where possible.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]

    @classmethod
    @abstractmethod
    def probe(cls) -> Verdict:
        """Tell whether this machine has a device of the platform; initialises no device."""

    @abstractmethod
    def devices(self) -> Sequence[Device]:
        """Return the visible devices in torch's order."""

    @abstractmethod
    def capability(self, device: str) -> Capability:
        """Return the abilities of ``device``."""

    @abstractmethod
    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return the dtypes that models can run in, the preferred one first."""

    def memory(self, device: str) -> Memory:
        """Return total and free memory of ``device`` in bytes.

        Raises: MissingMemberError: not overridden, and ``torch.accelerator`` does not know.
        """
        with self._unless_overridden("memory"):
            free, total = torch.accelerator.get_memory_info(device)
        return Memory(total_bytes=total, free_bytes=free)

    def synchronize(self, device: str) -> None:
        """Wait until ``device`` has finished all queued work.

        Raises: MissingMemberError: not overridden, and ``torch.accelerator`` cannot wait.
        """
        with self._unless_overridden("synchronize"):
            torch.accelerator.synchronize(device)

    def seed(self, seed: int) -> None:
        """Seed the random generators of all devices of this platform."""
        torch.manual_seed(seed)

    def all_finite(self, tensor: Tensor) -> bool:
        """Tell whether a tensor on one of the devices has neither NaN nor infinity.

        The loader checks every weight this way. The default reads the tensor once, by
        ``torch.aminmax``.
        """
        return are_finite(tensor)

    def copy_finite(self, target: Tensor, source: Tensor) -> bool:
        """Copy ``source`` to ``target`` on a device, and search ``target`` for NaN and infinity.

        A platform can override this to search while the copy reads the memory.

        Returns: the result of ``all_finite`` for ``target``.
        """
        target.copy_(source)
        return self.all_finite(target)

    def numerics(self, policy: NumericsPolicy) -> contextlib.AbstractContextManager[None]:
        """Return a context in which matmuls and random numbers follow ``policy``."""
        return applied(policy)

    @optional
    def stream(self, device: str) -> contextlib.AbstractContextManager[object]:
        """Return a context in which work is queued on a separate stream."""
        raise self._missing("stream")

    @optional
    def capture_graph(self, step: Callable[[], object]) -> Callable[[], object]:
        """Capture ``step`` as a graph once, and return a function that replays the graph.

        A replay reads the same memory as the captured call, uses the same Python numbers, and
        returns the same tensors each time. One-time setup of ``step`` must not be captured, so a
        platform first calls ``step`` as often as a capture needs. Graphs may share memory: replay
        graphs one after the other, and read the result of one before the next one runs.
        """
        raise self._missing("capture_graph")

    @optional
    def pin_memory(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in page-locked host memory."""
        raise self._missing("pin_memory")

    @optional
    def map_host_memory(self, tensor: Tensor) -> Tensor:
        """Return a device view of a host tensor (unified virtual addressing)."""
        raise self._missing("map_host_memory")

    @optional
    def peak_memory_bytes(self, device: str) -> int:
        """Return the largest amount of memory that this process has used on ``device``."""
        raise self._missing("peak_memory_bytes")

    @optional
    def memory_profile(self, device: str) -> contextlib.AbstractContextManager[object]:
        """Return a context that records memory taken on ``device``, by torch and by others."""
        raise self._missing("memory_profile")

    @optional
    def numa_nodes(self) -> Mapping[int, Sequence[int]]:
        """Return the logical processors of every NUMA node."""
        raise self._missing("numa_nodes")

    @optional
    def cores(self) -> Sequence[Sequence[int]]:
        """Return the logical processors that this process may use, grouped by core."""
        raise self._missing("cores")

    @optional
    def bind_threads(self, processors: Sequence[int]) -> Verdict:
        """Restrict this process's compute threads to ``processors``."""
        raise self._missing("bind_threads")

    @optional
    def num_threads(self) -> int:
        """Return the number of compute threads."""
        raise self._missing("num_threads")

    @optional
    def start_method(self) -> str:
        """Return the start method of child processes, by its name in ``multiprocessing``."""
        raise self._missing("start_method")

    @optional
    def facts(self) -> Mapping[str, str]:
        """Return further facts about this machine, by subject, which ``doctor`` shows."""
        raise self._missing("facts")

    @optional
    def distributed_backend(self) -> str:
        """Return the name of the torch.distributed backend."""
        raise self._missing("distributed_backend")

    @optional
    def compile_backend(self) -> str:
        """Return the name of the torch.compile backend."""
        raise self._missing("compile_backend")

    @optional
    def default_kernels(self) -> Mapping[str, str]:
        """Return the platform's kernel pins, which the user can override."""
        raise self._missing("default_kernels")

    @classmethod
    def provides(cls, member: str) -> Verdict:
        """Tell whether the platform provides an optional member."""
        declared = Platform.__dict__.get(member)
        if declared is None or not getattr(declared, "__interposer_optional__", False):
            optional_names = ", ".join(sorted(cls.optional_members()))
            return Verdict.refuse(
                f"{member!r} is not an optional member; those are {optional_names}"
            )
        if getattr(cls, member) is declared:
            return Verdict.refuse(f"platform {cls.name!r} does not provide {member!r}")
        return Verdict.accept()

    @staticmethod
    def optional_members() -> tuple[str, ...]:
        """Return the names of all optional members."""
        members = Platform.__dict__.items()
        return tuple(n for n, m in members if getattr(m, "__interposer_optional__", False))

    @contextlib.contextmanager
    def _unless_overridden(self, member: str) -> Iterator[None]:
        try:
            yield
        # torch.accelerator raises any of these, depending on the build and the backend.
        except (RuntimeError, ValueError, AssertionError) as error:
            raise MissingMemberError(
                f"Platform {self.name!r} does not override {member!r}, and torch.accelerator "
                f"cannot do it for {self.device_type!r}: {error}. Try: override {member!r}"
            ) from error

    def _missing(self, member: str) -> MissingMemberError:
        return MissingMemberError(
            f"Platform {self.name!r} does not provide {member!r}. Ask provides({member!r}) first."
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """The platform and device for a model, and the choice of the platform.

    ``described`` is set if the device is described by a file and not part of this machine.
    """

    platform: Platform
    device: Device
    choice: Choice
    described: bool = False

    @property
    def default_kernels(self) -> Mapping[str, str]:
        """The platform's preferred kernel by op, which the user can override."""
        platform = self.platform
        return platform.default_kernels() if platform.provides("default_kernels") else {}
