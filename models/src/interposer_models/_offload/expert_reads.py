"""Reads of mapped experts: those that tokens are routed to, and nothing of the others.

A fault at a page that is not in memory lets the system read what lies around it as well, up to
``read_ahead_kb`` of the disk. Advice reads what it names and no more. What kernels read besides,
such as sizes that stand in front of each matrix, comes page by page.

Dimensions: T tokens, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from interposer_models._packed.packed_file import MappedMemory

_SLACK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """A memory of a layer of experts.

    Attributes:
        number: in the packed file.
        expert: whose all of it is; None where it has equal shares of all experts, in their order,
            behind a header of at most 4 KiB.
    """

    number: int
    num_bytes: int
    expert: int | None


class ExpertReads:
    """Has experts of one layer read before each time that it computes."""

    def __init__(
        self, mapped: MappedMemory, memories: Iterable[ExpertMemory], num_experts: int
    ) -> None:
        """Have nothing read yet.

        Args:
            memories: all that the layer has.
        """
        self._mapped, self._count = mapped, num_experts
        self._own: dict[int, list[int]] = {}
        self._shared: list[ExpertMemory] = []
        held = [*memories]
        for memory in held:
            if memory.expert is None:
                self._shared.append(memory)
            else:
                self._own.setdefault(memory.expert, []).append(memory.number)
        mapped.scatter(memory.number for memory in held)

    def attach(self, experts: nn.Module) -> None:
        """Read before ``experts`` computes ``(x, weights, expert_ids)``, ids ``[T, K]``."""

        def entering(_layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            self.read(given[2].unique().tolist())

        experts.register_forward_pre_hook(entering)

    def read(self, expert_ids: Iterable[int]) -> None:
        """Let the system begin to read these experts, in ascending order."""
        runs: list[list[int]] = []
        for expert in expert_ids:
            for number in self._own.get(expert, ()):
                self._mapped.advise(number)
            if runs and runs[-1][1] == expert:
                runs[-1][1] += 1
            elif 0 <= expert < self._count:  # others are padding
                runs.append([expert, expert + 1])
        for memory in self._shared:
            self._mapped.advise(memory.number, 0, _SLACK_BYTES)
            for first, last in runs:
                start = first * memory.num_bytes // self._count - _SLACK_BYTES
                stop = -(-last * memory.num_bytes // self._count) + _SLACK_BYTES
                self._mapped.advise(memory.number, start, stop)
