"""Reads of mapped experts: those that tokens are routed to, and nothing of the others.

A fault at a page that is not in memory lets the system read what lies around it as well, up to
``read_ahead_kb`` of the disk. Advice reads what it names and no more, in large requests.

Dimensions: T tokens, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from interposer_models._packed.packed_file import MappedMemory

_SLACK_BYTES = 4096


class ExpertReads:
    """Advises of the experts of one layer before each time that it computes.

    Each memory of such a layer has equal shares of the experts, in their order, behind a header of
    at most 4 KiB. Of a layer where that does not hold, the system reads the rest by its own rules.
    """

    def __init__(
        self, mapped: MappedMemory, sizes: Sequence[tuple[int, int]], num_experts: int
    ) -> None:
        """Advise of nothing yet.

        Args:
            sizes: number and bytes of each memory that the layer has.
        """
        self._mapped, self._sizes, self._count = mapped, sizes, num_experts

    def attach(self, experts: nn.Module) -> None:
        """Advise before ``experts`` computes ``(x, weights, expert_ids)``, ids ``[T, K]``."""

        def entering(_layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            self.advise(given[2].unique().tolist())

        experts.register_forward_pre_hook(entering)

    def advise(self, expert_ids: Iterable[int]) -> None:
        """Let the system begin to read these experts, in ascending order."""
        runs: list[list[int]] = []
        for expert in expert_ids:
            if runs and runs[-1][1] == expert:
                runs[-1][1] += 1
            elif 0 <= expert < self._count:  # others are padding, or of other ranks
                runs.append([expert, expert + 1])
        for number, num_bytes in self._sizes:
            self._mapped.advise(number, 0, _SLACK_BYTES)
            for first, last in runs:
                start = first * num_bytes // self._count - _SLACK_BYTES
                stop = -(-last * num_bytes // self._count) + _SLACK_BYTES
                self._mapped.advise(number, start, stop)
