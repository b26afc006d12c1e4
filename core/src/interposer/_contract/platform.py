"""The platform contract.

Required members are abstract. Optional ones are marked ``@optional``: they raise
``MissingMemberError`` until a platform overrides them, and ``provides`` says which it has.
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
    """The precision of products, and the seed of draws, for a block of code.

    torch keeps these as settings of the process. The defaults are what the definition of ``linear``
    asks for. Source: torch's notes on numerical accuracy (reduced precision reductions,
    TensorFloat-32) and its ``set_float32_matmul_precision``, which sets every backend of torch.

    Attributes:
        float32: how products of float32 are computed: ``"highest"`` in float32, ``"high"`` with
            TensorFloat-32 or as three products of bfloat16, ``"medium"`` as one.
        reduce_in_16_bits: partial sums of products of 16 bits may be kept in 16 bits; a platform
            without such a setting keeps them in 32.
        seed: of all devices' generators; None leaves them.

    Raises: ConfigError: the precision is unknown.
    """

    float32: Literal["highest", "high", "medium"] = "highest"
    reduce_in_16_bits: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        known = ("highest", "high", "medium")
        if self.float32 not in known:
            raise ConfigError(f"float32 is {self.float32!r}, must be one of {', '.join(known)}")


@contextlib.contextmanager
def applied(policy: NumericsPolicy, reductions: Sequence[tuple[Any, str]] = ()) -> Iterator[None]:
    """Hold to ``policy`` within a block, and put back what held before.

    A graph that is captured inside keeps it; generators stay as the block leaves them.

    Args:
        reductions: where a platform's libraries are told whether sums may be kept in 16 bits, as
            objects and names of their attributes.
    """
    precision = torch.get_float32_matmul_precision()
    allowed = [getattr(owner, name) for owner, name in reductions]
    try:
        torch.set_float32_matmul_precision(policy.float32)
        for owner, name in reductions:
            setattr(owner, name, policy.reduce_in_16_bits)
        if policy.seed is not None:
            torch.manual_seed(policy.seed)
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for (owner, name), before in zip(reductions, allowed, strict=True):
            setattr(owner, name, before)


def optional(member: F) -> F:
    """Mark a member of ``Platform`` that a platform may leave out."""
    member.__interposer_optional__ = True  # type: ignore[attr-defined]
    return member


class Platform(ABC):
    """One kind of hardware. Where it can, a default asks ``torch.accelerator``."""

    name: ClassVar[str]
    device_type: ClassVar[str]

    @classmethod
    @abstractmethod
    def probe(cls) -> Verdict:
        """Say whether this machine has such a device, without initialising one."""

    @abstractmethod
    def devices(self) -> Sequence[Device]:
        """Return the visible devices in torch's order."""

    @abstractmethod
    def capability(self, device: str) -> Capability:
        """Return what ``device`` can do."""

    @abstractmethod
    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return the dtypes that models may be run in, the preferred one first."""

    def memory(self, device: str) -> Memory:
        """Return total and free memory of ``device`` in bytes.

        Raises: MissingMemberError: it is not overridden, and ``torch.accelerator`` cannot tell.
        """
        with self._unless_overridden("memory"):
            free, total = torch.accelerator.get_memory_info(device)
        return Memory(total_bytes=total, free_bytes=free)

    def synchronize(self, device: str) -> None:
        """Wait until ``device`` has done all work that was queued on it.

        Raises: MissingMemberError: it is not overridden, and ``torch.accelerator`` cannot.
        """
        with self._unless_overridden("synchronize"):
            torch.accelerator.synchronize(device)

    def seed(self, seed: int) -> None:
        """Seed the random generators of all devices of this platform."""
        torch.manual_seed(seed)

    def all_finite(self, tensor: Tensor) -> bool:
        """Say whether a tensor on one of the devices holds neither NaN nor infinity.

        Loading asks this of every weight. The default reads the tensor once, by ``torch.aminmax``.
        """
        return are_finite(tensor)

    def copy_finite(self, target: Tensor, source: Tensor) -> bool:
        """Copy ``source`` to ``target`` on one of the devices, and search ``target`` afterwards.

        Returns: as ``all_finite``. A platform whose memory is read for the copy can search then.
        """
        target.copy_(source)
        return self.all_finite(target)

    def numerics(self, policy: NumericsPolicy) -> contextlib.AbstractContextManager[None]:
        """Return a block in which products are as exact, and draws as repeatable, as it says."""
        return applied(policy)

    @optional
    def stream(self, device: str) -> contextlib.AbstractContextManager[object]:
        """Return a context in which work is queued on a stream of its own."""
        raise self._missing("stream")

    @optional
    def capture_graph(self, step: Callable[[], object]) -> Callable[[], object]:
        """Return a replay of ``step``, captured once.

        A replay reads the memory that the captured call read, holds to the numbers of Python that
        it saw, and returns the same tensors each time. What ``step`` sets up when it is called
        first is not part of it: a platform calls it as often before as its captures need. Graphs
        may share memory, so they are replayed one after the other, and what one returned is read
        before the next one runs.
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
        """Return the most memory that this process has held on ``device``."""
        raise self._missing("peak_memory_bytes")

    @optional
    def memory_profile(self, device: str) -> contextlib.AbstractContextManager[object]:
        """Return a block that is told what it takes of ``device``, by torch and by others."""
        raise self._missing("memory_profile")

    @optional
    def numa_nodes(self) -> Mapping[int, Sequence[int]]:
        """Return the logical processors of every NUMA node."""
        raise self._missing("numa_nodes")

    @optional
    def cores(self) -> Sequence[Sequence[int]]:
        """Return the logical processors that this process may use, core by core."""
        raise self._missing("cores")

    @optional
    def bind_threads(self, processors: Sequence[int]) -> Verdict:
        """Run this process's compute threads on ``processors`` only."""
        raise self._missing("bind_threads")

    @optional
    def num_threads(self) -> int:
        """Return how many threads compute."""
        raise self._missing("num_threads")

    @optional
    def start_method(self) -> str:
        """Return how processes beside this one are started, as ``multiprocessing`` names it."""
        raise self._missing("start_method")

    @optional
    def facts(self) -> Mapping[str, str]:
        """Return what else people should know of this machine, by subject; ``doctor`` shows it."""
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
        """Return kernel pins that hold unless the user decides otherwise."""
        raise self._missing("default_kernels")

    @classmethod
    def provides(cls, member: str) -> Verdict:
        """Say whether the platform provides an optional member."""
        declared = Platform.__dict__.get(member)
        if declared is None or not getattr(declared, "__interposer_optional__", False):
            known = ", ".join(sorted(cls.optional_members()))
            return Verdict.refuse(f"{member!r} is not an optional member; those are {known}")
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
    """A platform with the device that a model goes to, and the choice behind it.

    ``described`` is set where the device stands in a file and not in this machine.
    """

    platform: Platform
    device: Device
    choice: Choice
    described: bool = False

    @property
    def default_kernels(self) -> Mapping[str, str]:
        """The kernel that the platform prefers for an op, unless the user decides otherwise."""
        platform = self.platform
        return platform.default_kernels() if platform.provides("default_kernels") else {}
