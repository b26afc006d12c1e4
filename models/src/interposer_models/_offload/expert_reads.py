"""Reads the mapped experts that tokens are routed to, and no others.

A page fault lets the system also read the neighbouring pages, up to ``read_ahead_kb`` of the disk.
An advice reads only its range. Other data that kernels need, such as sizes in front of each matrix,
is read page by page.

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
        number: number of the memory in the packed file.
        expert: the expert that uses all of the memory; None if all experts have equal parts, in
            order, after a header of at most 4 KiB.
    """

    number: int
    num_bytes: int
    expert: int | None


class ExpertReads:
    """Starts to read the chosen experts of one layer before the layer computes."""

    def __init__(
        self, mapped: MappedMemory, memories: Iterable[ExpertMemory], num_experts: int
    ) -> None:
        """Disable read-ahead for the memories of the layer.

        Args:
            memories: all memories of the layer.
        """
        self._mapped, self._num_experts = mapped, num_experts
        self._numbers_by_expert: dict[int, list[int]] = {}
        self._shared: list[ExpertMemory] = []
        layer_memories = [*memories]
        for memory in layer_memories:
            if memory.expert is None:
                self._shared.append(memory)
            else:
                self._numbers_by_expert.setdefault(memory.expert, []).append(memory.number)
        mapped.scatter(memory.number for memory in layer_memories)

    def attach(self, experts: nn.Module) -> None:
        """Register a hook that reads before ``experts`` computes ``(x, weights, expert_ids)``.

        Expert ids have the shape ``[T, K]``.
        """

        def read_chosen(_layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            self.read(arguments[2].unique().tolist())

        experts.register_forward_pre_hook(read_chosen)

    def read(self, expert_ids: Iterable[int]) -> None:
        """Let the system start to read experts; ids must ascend."""
        # Neighbouring experts of a shared memory need one advice.
        runs: list[list[int]] = []
        for expert in expert_ids:
            for number in self._numbers_by_expert.get(expert, ()):
                self._mapped.advise(number)
            if runs and runs[-1][1] == expert:
                runs[-1][1] += 1
            elif 0 <= expert < self._num_experts:  # other ids are padding
                runs.append([expert, expert + 1])
        for memory in self._shared:
            self._mapped.advise(memory.number, 0, _SLACK_BYTES)
            for first, last in runs:
                start = first * memory.num_bytes // self._num_experts - _SLACK_BYTES
                stop = -(-last * memory.num_bytes // self._num_experts) + _SLACK_BYTES
                self._mapped.advise(memory.number, start, stop)
