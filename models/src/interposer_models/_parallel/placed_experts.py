"""Expert parallelism: loads of the experts on each rank, and better placements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from interposer import Ranks, Resolver
from interposer.errors import ConfigError
from interposer_ops.layers.expert_placement import ExpertPlacement, balanced_placement
from interposer_ops.layers.placed_experts import PlacedExperts

NOTE = "expert loads: "


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """The number of rows that each expert of one layer has computed since the last placement.

    Attributes:
        rows: rows of each expert, by number. A token is one row of each expert that it is
            routed to.
        placement: the rank of each expert.
    """

    rows: tuple[int, ...]
    placement: ExpertPlacement

    @property
    def imbalance(self) -> float:
        """Rows of the most loaded rank, divided by the mean of all ranks; 1 without rows."""
        rows_by_rank = self.placement.shares(self.rows)
        return (
            max(rows_by_rank) * len(rows_by_rank) / total if (total := sum(rows_by_rank)) else 1.0
        )


def placed_layers(model: nn.Module) -> dict[str, PlacedExperts]:
    """Return the layers under expert parallelism, by prefix."""
    return {m.prefix: m for m in model.modules() if isinstance(m, PlacedExperts)}


def loads_of(model: nn.Module) -> dict[str, ExpertLoads]:
    """Return the expert loads of all layers under expert parallelism; equal on every rank."""
    return {
        prefix: ExpertLoads(tuple(layer.routes.counts()), layer.routes.placement)
        for prefix, layer in placed_layers(model).items()
    }


def better_placements(model: nn.Module) -> dict[PlacedExperts, ExpertPlacement]:
    """Return new placements for the layers that a new placement balances better."""
    placements = {}
    for layer in placed_layers(model).values():
        current = layer.routes.placement
        balanced = balanced_placement(layer.routes.counts(), current)
        if balanced != current:
            placements[layer] = balanced
    return placements


def check_placed(model: nn.Module, resolver: Resolver, ranks: Ranks | None) -> None:
    """Raise ConfigError if expert parallelism is requested but unsupported by all layers."""
    if ranks is None or ranks.experts is None or placed_layers(model):
        return
    # Layers that declined expert parallelism have noted the reason.
    reasons = [note for note in resolver.notes if note.startswith("experts of ")]
    explanation = "; ".join(reasons) or "it has no layer of experts that ranks share"
    raise ConfigError(
        f"expert_parallel is asked for, and nothing of this model can be placed so: {explanation}. "
        "Try: without it, which leaves each rank a share of every expert, or of none"
    )


def load_notes(model: nn.Module) -> Iterator[str]:
    """Yield a note on the balance of ranks, if experts are placed and have computed rows."""
    loads = loads_of(model)
    used_layers = {
        prefix: layer_loads for prefix, layer_loads in loads.items() if any(layer_loads.rows)
    }
    if used_layers:
        worst = max(used_layers, key=lambda prefix: used_layers[prefix].imbalance)
        rows = sum(sum(layer_loads.rows) for layer_loads in used_layers.values())
        yield (
            f"{NOTE}{rows} rows in {len(used_layers)} layers; the most loaded rank has "
            f"{used_layers[worst].imbalance:.2f} times the mean in {worst}"
        )
