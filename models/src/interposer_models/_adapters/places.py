"""The places of a model that adapters can be attached to, by the names that PEFT uses.

Dimensions: I inputs, O outputs, V vocabulary, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from interposer_ops.layers.embedding import Embedding, LMHead
from interposer_ops.layers.linear import Linear

Adaptable = Linear | LMHead | Embedding


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


def adapter_places(model: nn.Module) -> dict[str, AdapterPlace]:
    """Return the places by the names of modules in checkpoints, such as ``...self_attn.q_proj``."""
    places = {}
    for layer in model.modules():
        if isinstance(layer, Linear):
            parent, dot, _ = layer.prefix.rpartition(".")
            offset = 0
            for part, (name, outputs) in enumerate(layer.parts.items()):
                place = AdapterPlace(layer, part, offset, layer.in_features, outputs)
                places[f"{parent}{dot}{name}"] = place
                offset += outputs
        elif isinstance(layer, LMHead):
            sizes = layer.hidden_size, layer.vocab_size
            places[layer.prefix] = AdapterPlace(layer, 0, 0, *sizes)
        elif isinstance(layer, Embedding):
            sizes = layer.vocab_size, layer.hidden_size
            places[layer.prefix] = AdapterPlace(layer, 0, 0, *sizes)
    return places
