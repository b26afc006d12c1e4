"""Experts of a model that are placed whole on its ranks: their loads, and other places for them."""

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
    """The rows that the experts of one layer got since they were placed.

    Attributes:
        rows: of each expert, by its number. A token is a row of each expert that it chose.
        placement: where the experts are.
    """

    rows: tuple[int, ...]
    placement: ExpertPlacement

    @property
    def imbalance(self) -> float:
        """The rows of the most loaded rank over those of all ranks on average; 1 of no rows."""
        shares = self.placement.shares(self.rows)
        return max(shares) * len(shares) / total if (total := sum(shares)) else 1.0


def placed_layers(model: nn.Module) -> dict[str, PlacedExperts]:
    """Return the layers whose experts are placed whole, by their prefixes."""
    return {m.prefix: m for m in model.modules() if isinstance(m, PlacedExperts)}


def loads_of(model: nn.Module) -> dict[str, ExpertLoads]:
    """Return the loads of all layers whose experts are placed whole, the same on every rank."""
    return {
        prefix: ExpertLoads(tuple(layer.routes.counts()), layer.routes.placement)
        for prefix, layer in placed_layers(model).items()
    }


def better_placements(model: nn.Module) -> dict[PlacedExperts, ExpertPlacement]:
    """Return other placements of the layers whose ranks would have less to do by them."""
    found = {}
    for layer in placed_layers(model).values():
        before = layer.routes.placement
        after = balanced_placement(layer.routes.counts(), before)
        if after != before:
            found[layer] = after
    return found


def check_placed(model: nn.Module, resolver: Resolver, ranks: Ranks | None) -> None:
    """Raise ConfigError where experts are to be placed whole, and none of the model can be."""
    if ranks is None or ranks.experts is None or placed_layers(model):
        return
    reasons = [note for note in resolver.notes if note.startswith("experts of ")]
    told = "; ".join(reasons) or "it has no layer of experts that ranks share"
    raise ConfigError(
        f"expert_parallel is asked for, and nothing of this model can be placed so: {told}. "
        "Try: without it, which leaves each rank a share of every expert, or of none"
    )


def load_notes(model: nn.Module) -> Iterator[str]:
    """Yield how evenly the ranks were loaded, where experts are placed whole and have worked."""
    loads = loads_of(model)
    worked = {prefix: one for prefix, one in loads.items() if any(one.rows)}
    if worked:
        worst = max(worked, key=lambda prefix: worked[prefix].imbalance)
        rows = sum(sum(one.rows) for one in worked.values())
        yield (
            f"{NOTE}{rows} rows in {len(worked)} layers; the most loaded rank has "
            f"{worked[worst].imbalance:.2f} times the mean in {worst}"
        )
