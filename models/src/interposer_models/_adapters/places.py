"""The layers that adapters can be attached to, by the module names of PEFT.

Dimensions: I inputs, O outputs, V vocabulary, H hidden size, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from interposer.errors import nearest_first
from interposer_ops.layers.cuts import Cut
from interposer_ops.layers.embedding import Embedding, LMHead
from interposer_ops.layers.experts import Experts, Router
from interposer_ops.layers.linear import Linear

Adaptable = Linear | LMHead | Embedding | Router | Experts

_ROOT = "model."
# MoE modules have these names in transformers from version 5 on.
_MOE = re.compile(r"\.[^.]+\.(experts|gate)(?=\.|$)")


@dataclass(frozen=True, eq=False, slots=True)
class AdapterPlace:
    """A projection of a layer, a head or an embedding.

    Attributes:
        part: number of the projection in a merged layer, from 0.
        offset: first output of the projection in the layer's outputs.
        inputs: I, or V of an embedding.
        outputs: O, or H of an embedding.
        experts: E; None for a layer without experts.
        is_last: the projection is the second matmul of the experts.
        columns, row: this rank's shards of outputs and inputs; None if not sharded.
    """

    layer: Adaptable
    part: int
    offset: int
    inputs: int
    outputs: int
    experts: int | None = None
    is_last: bool = False
    columns: Cut | None = None
    row: Cut | None = None

    @property
    def stored(self) -> tuple[int, int]:
        """Inputs and outputs of the stored adapter, over all ranks."""
        inputs = self.inputs if self.row is None else self.row.whole
        return inputs, self.outputs if self.columns is None else self.columns.whole

    @property
    def is_table(self) -> bool:
        """Say whether the inputs are token ids."""
        return isinstance(self.layer, Embedding)


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """The projections of a layer's experts; gate and up both fused and separate."""

    layer: Experts
    gate_up: AdapterPlace
    gate: AdapterPlace
    up: AdapterPlace
    down: AdapterPlace

    @classmethod
    def of(cls, layer: Experts) -> ExpertPlaces:
        """Return the projections of a layer's experts."""
        spec = layer.spec
        hidden, intermediate, num_experts = (
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_experts,
        )
        return cls(
            layer,
            AdapterPlace(layer, 0, 0, hidden, 2 * intermediate, num_experts),
            AdapterPlace(layer, 1, 0, hidden, intermediate, num_experts),
            AdapterPlace(layer, 2, intermediate, hidden, intermediate, num_experts),
            AdapterPlace(layer, 0, 0, intermediate, hidden, num_experts, is_last=True),
        )

    @property
    def parameters(self) -> Mapping[str, AdapterPlace]:
        """Places by the names of parameters that stack the matrices of all experts."""
        return {"gate_up_proj": self.gate_up, "down_proj": self.down}

    @property
    def projections(self) -> Mapping[str, AdapterPlace]:
        """Places by the names that checkpoints have for the matrices of one expert."""
        names = self.layer.spec.projections
        return (
            {} if names is None else dict(zip(names, (self.gate, self.up, self.down), strict=True))
        )


class AdapterPlaces:
    """The places of a model, found by the names of its modules in transformers."""

    def __init__(self, model: nn.Module) -> None:
        self._places = dict(_places(model))
        # A layer that shards every expert sums up shards internally, where no adapter can add.
        self._experts = {
            layer.prefix: ExpertPlaces.of(layer)
            for layer in model.modules()
            if isinstance(layer, Experts) and not hasattr(layer, "cut")
        }
        # Translates names of checkpoint tensors to the model's names.
        self._renamed: Callable[[str], str | None] = getattr(model, "renamed", str)
        frame = getattr(model.config, "frame", None)
        self._decoder = None if frame is None else frame.decoder
        self._aliases = {
            _MOE.sub(r".mlp.\1", name): name for name in (*self._experts, *self._places)
        }

    def find(self, module: str) -> AdapterPlace | None:
        """Return the place of a module such as ``model.layers.0.self_attn.q_proj``, or None."""
        names = self.names(module)
        return next((place for name in names if (place := self._places.get(name))), None)

    def experts(self, module: str) -> ExpertPlaces | None:
        """Return the places of experts such as ``model.layers.0.mlp.experts``, or None."""
        names = self.names(module)
        return next((places for name in names if (places := self._experts.get(name))), None)

    def expert(self, module: str) -> tuple[AdapterPlace, int] | None:
        """Return place and expert of a module such as ``model.layers.0.mlp.experts.3.up_proj``.

        None if the model has no such expert.
        """
        experts, _, projection = module.rpartition(".")
        experts, _, number = experts.rpartition(".")
        places = self.experts(experts) if number.isdecimal() else None
        place = None if places is None else places.projections.get(projection)
        if places is None or place is None or int(number) >= places.layer.spec.num_experts:
            return None
        return place, int(number)

    def has_table(self, module: str) -> bool:
        """Say whether a module is the embedding or the head."""
        place = self.find(module)
        return place is not None and isinstance(place.layer, Embedding | LMHead)

    def nearest(self, module: str) -> list[str]:
        """Return the names of all places, most similar to ``module`` first."""
        matrices = (
            f"{name}.{parameter}"
            for name, places in self._experts.items()
            for parameter in places.parameters
        )
        return nearest_first(module, [*self._places, *matrices])

    def names(self, module: str) -> Iterator[str]:
        """Yield the names in the model that a module of transformers may have."""
        name = (self._renamed(f"{module}.weight") or "").removesuffix(".weight")
        yield name
        yield self._aliases.get(name, "")
        if self._decoder and module.startswith(_ROOT):
            # transformers calls every decoder "model", whatever its checkpoints call it.
            name = f"{self._decoder}.{module.removeprefix(_ROOT)}"
            yield name
            yield self._aliases.get(name, "")


def _places(model: nn.Module) -> Iterator[tuple[str, AdapterPlace]]:
    expert_layers = [layer for layer in model.modules() if isinstance(layer, Experts)]
    of_experts = {part for layer in expert_layers for part in layer.modules()}
    for layer in model.modules():
        if layer in of_experts:
            continue  # experts that are linear layers: see ExpertPlaces
        if isinstance(layer, Linear):
            parent, dot, _ = layer.prefix.rpartition(".")
            offset = 0
            for part, (name, outputs) in enumerate(layer.parts.items()):
                cuts = getattr(layer, "cuts", {}).get(name), getattr(layer, "cut", None)
                sizes = offset, layer.in_features, outputs
                place = AdapterPlace(layer, part, *sizes, columns=cuts[0], row=cuts[1])
                yield f"{parent}{dot}{name}", place
                offset += outputs
        elif isinstance(layer, LMHead):
            yield layer.prefix, AdapterPlace(layer, 0, 0, layer.hidden_size, layer.vocab_size)
        elif isinstance(layer, Embedding):
            yield layer.prefix, AdapterPlace(layer, 0, 0, layer.vocab_size, layer.hidden_size)
        elif isinstance(layer, Router) and type(layer).forward is Router.forward:
            dims = dict(layer.bound.choice.request.dims)
            inputs, outputs = int(dims["in_features"]), int(dims["out_features"])
            yield layer.prefix, AdapterPlace(layer, 0, 0, inputs, outputs)
