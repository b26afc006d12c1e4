"""The cuts of a model's layers, told: one note for each kind of cut, from what layers declare."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from interposer_ops.layers.cuts import Cut

_KINDS = {
    "heads": "cut by heads",
    "column": "cut by outputs",
    "row": "cut by inputs and added up",
    "expert": "cut inside of every expert and added up",
    "experts": "placed whole on ranks",
    "vocabulary": "cut by tokens",
}
_REPLICATED = "whole on every rank"


def cut_notes(model: nn.Module) -> list[str]:
    """Return which layers with weights are cut, and how, with what this rank holds of the axis.

    Layers of several blocks are told once, where their sizes are the same.
    """
    found: dict[str, dict[str, None]] = {}
    for prefix, layer in model.named_modules():
        name = ".".join(part for part in prefix.split(".") if not part.isdigit())
        told = [*_cuts(layer)]
        if told:
            kinds = dict.fromkeys(cut.kind for _, cut in told)
            for kind in kinds:
                sizes = ", ".join(_size(part, cut) for part, cut in told if cut.kind == kind)
                found.setdefault(_KINDS[kind], {})[f"{name} ({sizes})"] = None
        elif any(parameter is not None for parameter in layer._parameters.values()):
            found.setdefault(_REPLICATED, {})[name] = None
    kinds_in_order = [*_KINDS.values(), _REPLICATED]
    return [f"{kind}: {', '.join(found[kind])}" for kind in kinds_in_order if kind in found]


def _cuts(layer: nn.Module) -> Iterator[tuple[str, Cut]]:
    """Yield the cuts that a layer declares: of each of its parts by name, or of all of it."""
    parts = getattr(layer, "cuts", None)
    if isinstance(parts, dict):
        yield from ((part, cut) for part, cut in parts.items() if isinstance(cut, Cut))
    elif isinstance(one := getattr(layer, "cut", None), Cut):
        yield "", one


def _size(part: str, cut: Cut) -> str:
    return f"{part} {cut.size} of {cut.whole}".lstrip()
