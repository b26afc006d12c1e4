"""The numbers of experts in names of tensors, where a rank holds some of a layer's experts.

A layer numbers what it holds from 0, and checkpoints number all of its experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from interposer_ops.layers.placed_experts import PlacedExperts

_NUMBER = re.compile(r"\.(\d+)\.")


class ExpertNames:
    """Names of tensors of experts, by what the layers hold now."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._placed = {one.prefix: one for one in layers if isinstance(one, PlacedExperts)}

    def stored(self, name: str) -> str:
        """Return what checkpoints call the tensor that a layer calls ``name``."""
        for layer, number, found in self._parts(name):
            return renumbered(name, found, layer.held[number])
        return name

    def local(self, name: str) -> str:
        """Return what the layer calls a tensor of an expert that it holds."""
        for layer, number, found in self._parts(name):
            return renumbered(name, found, layer.held.index(number))
        return name

    def is_elsewhere(self, name: str) -> bool:
        """Say whether the tensor is of an expert that other ranks hold."""
        return any(
            number < layer.num_routed and number not in layer.held
            for layer, number, _ in self._parts(name)
        )

    def _parts(self, name: str) -> Iterable[tuple[PlacedExperts, int, re.Match[str]]]:
        """Yield the layer and the number of the expert, if it is a name of such a tensor."""
        if not self._placed:
            return
        for found in _NUMBER.finditer(name):
            layer = self._placed.get(name[: found.start()])
            if layer is not None:
                yield layer, int(found[1]), found
                return


def renumbered(name: str, found: re.Match[str], number: int) -> str:
    """Return a name with another number where one was found."""
    return f"{name[: found.start(1)]}{number}{name[found.end(1) :]}"
