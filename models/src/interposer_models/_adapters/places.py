"""The places of a model that adapters can be attached to, by the names that PEFT uses.

Dimensions: I inputs, O outputs, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from interposer.errors import nearest_first
from interposer_ops.layers.embedding import Embedding, LMHead
from interposer_ops.layers.linear import Linear

Adaptable = Linear | LMHead | Embedding

_ROOT = "model."


@dataclass(frozen=True, eq=False, slots=True)
class AdapterPlace:
    """A projection of a layer, a head or an embedding.

    Attributes:
        part: the projection among those of a merged layer, from 0.
        offset: of its outputs among those of the layer.
        inputs: I, or V of an embedding.
        outputs: O, or H of an embedding.
    """

    layer: Adaptable
    part: int
    offset: int
    inputs: int
    outputs: int

    @property
    def is_table(self) -> bool:
        """Say whether the inputs are token ids."""
        return isinstance(self.layer, Embedding)


class AdapterPlaces:
    """The places of a model, found by the names of its modules in transformers."""

    def __init__(self, model: nn.Module) -> None:
        self._places = dict(_places(model))
        # From names of a checkpoint's tensors to those here.
        self._renamed: Callable[[str], str | None] = getattr(model, "renamed", str)
        frame = getattr(model.config, "frame", None)
        self._decoder = None if frame is None else frame.decoder

    def find(self, module: str) -> AdapterPlace | None:
        """Return the place of a module such as ``model.layers.0.self_attn.q_proj``, or None."""
        name = (self._renamed(f"{module}.weight") or "").removesuffix(".weight")
        found = self._places.get(name)
        if found is None and self._decoder and module.startswith(_ROOT):
            # transformers calls a decoder so whose checkpoints have another name for it.
            found = self._places.get(f"{self._decoder}.{module.removeprefix(_ROOT)}")
        return found

    def nearest(self, module: str) -> list[str]:
        """Return the names of all places, those most like ``module`` first."""
        return nearest_first(module, self._places)


def _places(model: nn.Module) -> Iterator[tuple[str, AdapterPlace]]:
    for layer in model.modules():
        if isinstance(layer, Linear):
            parent, dot, _ = layer.prefix.rpartition(".")
            offset = 0
            for part, (name, outputs) in enumerate(layer.parts.items()):
                place = AdapterPlace(layer, part, offset, layer.in_features, outputs)
                yield f"{parent}{dot}{name}", place
                offset += outputs
        elif isinstance(layer, LMHead):
            yield layer.prefix, AdapterPlace(layer, 0, 0, layer.hidden_size, layer.vocab_size)
        elif isinstance(layer, Embedding):
            yield layer.prefix, AdapterPlace(layer, 0, 0, layer.vocab_size, layer.hidden_size)
