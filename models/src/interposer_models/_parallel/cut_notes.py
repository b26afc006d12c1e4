"""Notes on the shards of a model's layers, for reports: one note for each kind of sharding."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from interposer_ops.layers.cuts import Cut

_KINDS = {
    "heads": "sharded by heads",
    "column": "sharded by outputs",
    "row": "sharded by inputs, then all-reduced",
    "expert": "sharded inside every expert, then all-reduced",
    "experts": "expert parallel",
    "vocabulary": "sharded by tokens",
}
_REPLICATED = "replicated on every rank"


def cut_notes(model: nn.Module) -> list[str]:
    """Describe how each layer with weights is sharded, and the size of this rank's shard.

    Layers of several blocks are listed once if the sizes are equal.
    """
    layers_by_kind: dict[str, dict[str, None]] = {}
    for prefix, layer in model.named_modules():
        name = ".".join(part for part in prefix.split(".") if not part.isdigit())
        shards = [*_shards(layer)]
        if shards:
            kinds = dict.fromkeys(shard.kind for _, shard in shards)
            for kind in kinds:
                sizes = ", ".join(
                    _size(part, shard) for part, shard in shards if shard.kind == kind
                )
                layers_by_kind.setdefault(_KINDS[kind], {})[f"{name} ({sizes})"] = None
        elif any(parameter is not None for parameter in layer._parameters.values()):
            layers_by_kind.setdefault(_REPLICATED, {})[name] = None
    kinds_in_order = [*_KINDS.values(), _REPLICATED]
    return [
        f"{kind}: {', '.join(layers_by_kind[kind])}"
        for kind in kinds_in_order
        if kind in layers_by_kind
    ]


def _shards(layer: nn.Module) -> Iterator[tuple[str, Cut]]:
    """Yield ``(part, shard)`` of each sharded part; the name is "" for an undivided layer."""
    shards_by_part = getattr(layer, "cuts", None)
    if isinstance(shards_by_part, dict):
        yield from ((part, cut) for part, cut in shards_by_part.items() if isinstance(cut, Cut))
    elif isinstance(shard := getattr(layer, "cut", None), Cut):
        yield "", shard


def _size(part: str, shard: Cut) -> str:
    return f"{part} {shard.size} of {shard.whole}".lstrip()
