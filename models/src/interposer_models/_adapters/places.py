"""The places of a model that adapters can be attached to, by the names that PEFT uses.

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
# Of a mixture, as transformers names it from its version 5 on.
_MIXTURE = re.compile(r"\.[^.]+\.(experts|gate)(?=\.|$)")


@dataclass(frozen=True, eq=False, slots=True)
class AdapterPlace:
    """A projection of a layer, a head or an embedding.

    Attributes:
        part: the projection among those of a merged layer, from 0.
        offset: of its outputs among those of the layer.
        inputs: I, or V of an embedding.
        outputs: O, or H of an embedding.
        experts: E, None of a layer that is no mixture of them.
        is_last: of the second of two products of such a layer.
        columns, row: cuts of the outputs and of the inputs, where a rank has a share of them.
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
        """Return the inputs and the outputs that an adapter has, those of all ranks."""
        inputs = self.inputs if self.row is None else self.row.whole
        return inputs, self.outputs if self.columns is None else self.columns.whole

    @property
    def is_table(self) -> bool:
        """Say whether the inputs are token ids."""
        return isinstance(self.layer, Embedding)


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """The projections of all experts of a layer, gate and up projections fused and separate."""

    layer: Experts
    gate_up: AdapterPlace
    gate: AdapterPlace
    up: AdapterPlace
    down: AdapterPlace

    @classmethod
    def of(cls, layer: Experts) -> ExpertPlaces:
        """Return the expert projections of a layer."""
        spec = layer.spec
        hidden, inner, count = spec.hidden_size, spec.intermediate_size, spec.num_experts
        return cls(
            layer,
            AdapterPlace(layer, 0, 0, hidden, 2 * inner, count),
            AdapterPlace(layer, 1, 0, hidden, inner, count),
            AdapterPlace(layer, 2, inner, hidden, inner, count),
            AdapterPlace(layer, 0, 0, inner, hidden, count, is_last=True),
        )

    @property
    def parameters(self) -> Mapping[str, AdapterPlace]:
        """By the names of parameters that hold the matrices of all experts."""
        return {"gate_up_proj": self.gate_up, "down_proj": self.down}

    @property
    def projections(self) -> Mapping[str, AdapterPlace]:
        """By the names that checkpoints have for the matrices of one expert."""
        names = self.layer.spec.projections
        return (
            {} if names is None else dict(zip(names, (self.gate, self.up, self.down), strict=True))
        )


class AdapterPlaces:
    """The places of a model, found by the names of its modules in transformers."""

    def __init__(self, model: nn.Module) -> None:
        self._places = dict(_places(model))
        # Shares of experts are added up inside of them, where no adapter is.
        mixtures = (m for m in model.modules() if isinstance(m, Experts) and not hasattr(m, "cut"))
        self._experts = {layer.prefix: ExpertPlaces.of(layer) for layer in mixtures}
        # From names of a checkpoint's tensors to those here.
        self._renamed: Callable[[str], str | None] = getattr(model, "renamed", str)
        frame = getattr(model.config, "frame", None)
        self._decoder = None if frame is None else frame.decoder
        self._aliases = {
            _MIXTURE.sub(r".mlp.\1", name): name for name in (*self._experts, *self._places)
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
        """Return the place of ``model.layers.0.mlp.experts.3.up_proj`` and the expert, or None."""
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
        """Return the names of all places, those most like ``module`` first."""
        matrices = (
            f"{name}.{parameter}"
            for name, places in self._experts.items()
            for parameter in places.parameters
        )
        return nearest_first(module, [*self._places, *matrices])

    def names(self, module: str) -> Iterator[str]:
        """Yield the names here that a module of transformers may have."""
        name = (self._renamed(f"{module}.weight") or "").removesuffix(".weight")
        yield name
        yield self._aliases.get(name, "")
        if self._decoder and module.startswith(_ROOT):
            # transformers calls a decoder so whose checkpoints have another name for it.
            name = f"{self._decoder}.{module.removeprefix(_ROOT)}"
            yield name
            yield self._aliases.get(name, "")


def _places(model: nn.Module) -> Iterator[tuple[str, AdapterPlace]]:
    mixtures = [layer for layer in model.modules() if isinstance(layer, Experts)]
    of_experts = {part for layer in mixtures for part in layer.modules()}
    for layer in model.modules():
        if layer in of_experts:
            continue
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
