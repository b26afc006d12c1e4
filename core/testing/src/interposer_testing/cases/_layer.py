"""Test cases of layers, on which replacements are compared with the standard layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from interposer import Case, Site, Tolerance


@dataclass(frozen=True, slots=True)
class Placed:
    """A constructor argument of a layer, computed from the layer's site.

    Attributes:
        build: creates the argument from the layer's site. If the argument is a layer, it is
            finalized after the layer that gets the argument. An example is an embedding that shares
            the weight of the language model head.
    """

    build: Callable[[Site], Any]


@dataclass(frozen=True, slots=True)
class OfLayer:
    """An input that depends on the called layer, such as the KV cache of an attention backend.

    Attributes:
        build: creates the input from the layer and the torch device. The layer may write to the
            input.
    """

    build: Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class LayerCase:
    """One test case of a layer: constructor arguments, parameters and the inputs of one call.

    Attributes:
        label: description of the case, unique within its layer and dtype.
        arguments: constructor arguments by name, without the site; ``Placed`` ones are built first.
        inputs: positional inputs of the method; ``OfLayer`` ones are built for each layer.
        parameters: the state dict that the layer loads.
        method: name of the called method.
        facts: a case whose ``reduction``, ``magnitude`` and ``rounded`` apply to the outputs; its
            arguments are ignored.
        tolerance: tolerance of the op that the layer computes.
    """

    label: str
    arguments: Mapping[str, Any]
    inputs: tuple[Any, ...]
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    method: str = "forward"
    facts: Case = field(default_factory=lambda: Case("", {}))
    tolerance: Tolerance = field(default_factory=Tolerance)


class LayerCaseGenerator(Protocol):
    """A function that yields the cases of a layer; equal seeds give equal cases."""

    def __call__(self, dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
        """Yield the cases, with parameters and float inputs in ``dtype``."""
