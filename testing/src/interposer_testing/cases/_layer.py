"""Cases of layers, which replacements are compared with the standard layer on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from interposer import Case, Site, Tolerance


@dataclass(frozen=True, slots=True)
class Placed:
    """An argument of a constructor that depends on the site of the layer.

    Attributes:
        build: returns it, of the layer's site. A layer that it returns is finalized after the one
            that it is given to, as a table is after the head that shares it.
    """

    build: Callable[[Site], Any]


@dataclass(frozen=True, slots=True)
class OfLayer:
    """An input that depends on the called layer, such as the cache of its backend.

    Attributes:
        build: returns it, of the layer and the torch device that its tensors belong on. The layer
            may write to it.
    """

    build: Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class LayerCase:
    """One case of a layer: the arguments that build it, and those of a call.

    Attributes:
        label: what is special about it, unique within its layer and dtype.
        arguments: of the constructor by name, without the site; what is ``Placed`` is built first.
        inputs: of the method by position; what is ``OfLayer`` is built for each layer.
        parameters: everything that the layer loads, by the names of its state.
        method: what is called.
        facts: a case whose ``reduction``, ``magnitude`` and ``rounded`` hold for the outputs; its
            arguments don't matter.
        tolerance: of the op behind the layer.
    """

    label: str
    arguments: Mapping[str, Any]
    inputs: tuple[Any, ...]
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    method: str = "forward"
    facts: Case = field(default_factory=lambda: Case("", {}))
    tolerance: Tolerance = field(default_factory=Tolerance)


class LayerCaseGenerator(Protocol):
    """Yields cases for one dtype, the same ones for the same seed."""

    def __call__(self, dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
        """Return the cases with parameters and float inputs of ``dtype``."""
