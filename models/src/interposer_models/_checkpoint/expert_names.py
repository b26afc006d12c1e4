"""Expert numbers in tensor names, under expert parallelism.

A layer numbers the experts of its rank from 0, while checkpoints number all experts of the layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from interposer_ops.layers.placed_experts import PlacedExperts

_NUMBER = re.compile(r"\.(\d+)\.")


class ExpertNames:
    """Translates names of expert tensors between a checkpoint and the layers of this rank."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers_by_prefix = {
            layer.prefix: layer for layer in layers if isinstance(layer, PlacedExperts)
        }

    def stored(self, name: str) -> str:
        """Return the checkpoint's name of the tensor that a layer calls ``name``."""
        for layer, number, match in self._experts(name):
            return _renumbered(name, match, layer.held[number])
        return name

    def local(self, name: str) -> str:
        """Return the layer's name of the checkpoint tensor ``name`` of an expert on this rank."""
        for layer, number, match in self._experts(name):
            return _renumbered(name, match, layer.held.index(number))
        return name

    def is_elsewhere(self, name: str) -> bool:
        """Say whether the checkpoint tensor ``name`` belongs to an expert on another rank."""
        return any(
            number < layer.num_routed and number not in layer.held
            for layer, number, _ in self._experts(name)
        )

    def _experts(self, name: str) -> Iterable[tuple[PlacedExperts, int, re.Match[str]]]:
        """Yield layer, expert number and the match of the number, if an expert has the tensor."""
        if not self._layers_by_prefix:
            return
        # A name has the numbers of block and expert: the prefix of a layer ends before the expert.
        for match in _NUMBER.finditer(name):
            layer = self._layers_by_prefix.get(name[: match.start()])
            if layer is not None:
                yield layer, int(match[1]), match
                return


def _renumbered(name: str, match: re.Match[str], number: int) -> str:
    return f"{name[: match.start(1)]}{number}{name[match.end(1) :]}"
