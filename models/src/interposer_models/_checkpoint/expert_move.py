"""The move of one layer's experts: what a rank is to hold is read, and then takes its place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from copy import copy
from dataclasses import replace

import torch

from interposer_models._checkpoint.expert_names import ExpertNames
from interposer_models._checkpoint.layer_group import Filling, LayerGroup
from interposer_models._checkpoint.tensor_places import TensorPlace
from interposer_models._checkpoint.weight_update import GroupUpdate
from interposer_ops.layers.expert_placement import ExpertPlacement
from interposer_ops.layers.placed_experts import PlacedExperts

Places = dict[str, TensorPlace]


class ExpertMove:
    """New experts of one layer, as far as their tensors have come; nothing is changed before.

    Groups whose experts stay are not read.

    Attributes:
        names: of the tensors to come, as checkpoints call them.
    """

    def __init__(
        self,
        layer: PlacedExperts,
        placement: ExpertPlacement,
        groups: Iterable[LayerGroup],
        names: ExpertNames,
    ) -> None:
        self._layer, self._placement, self._names = layer, placement, names
        below = f"{layer.prefix}."
        own = [
            group
            for group in groups
            if any(one is layer or one.prefix.startswith(below) for one in group.layers)
        ]
        before = {group: self._local(group) for group in own}
        held = layer.routes.placement
        # The names and slices of what a layer holds follow from its placement.
        layer.routes.placement = placement
        try:
            after = {group: self._stored(places) for group, places in before.items()}
        finally:
            layer.routes.placement = held
        self._places = {
            group: places for group, places in after.items() if _differ(places, group.places)
        }
        self._owners = {name: group for group, places in self._places.items() for name in places}
        self.names = self._owners.keys()
        self._fillings: dict[LayerGroup, Filling] = {}
        self._updates: dict[LayerGroup, GroupUpdate] = {}

    @property
    def missing(self) -> list[str]:
        """Names of tensors that have not come."""
        waiting = self._places.keys() - self._updates.keys()
        begun = self._fillings
        return [
            name
            for group in waiting
            for name in (begun[group].missing if group in begun else self._places[group])
        ]

    @property
    def is_complete(self) -> bool:
        """Say whether all tensors have come."""
        return len(self._updates) == len(self._places)

    def put(
        self,
        name: str,
        tensor: torch.Tensor,
        device: str,
        path: object,
        names: Collection[str] | None,
    ) -> None:
        """Take a tensor.

        Args:
            names: of all tensors that will come, if known.
        Raises: CheckpointError: it came before, or has the wrong shape or kind of dtype.
        """
        group = self._owners[name]
        filling = self._fillings.get(group)
        if filling is None:
            there = copy(group)
            there.places = self._places[group]
            filling = self._fillings[group] = Filling(there, device, True)
        filling.put(name, tensor, path)
        if not filling.awaits(names):
            filling.put_defaults()
            self._updates[group] = GroupUpdate.of(group, group.finalized(filling))
            del self._fillings[group]

    def finish(self, apply: Callable[[list[GroupUpdate]], None]) -> list[str]:
        """Let the layer hold them.

        Returns: prefixes of layers that got new operands, as these have another form.
        """
        updates = list(self._updates.values())
        apply(updates)
        for group, places in self._places.items():
            group.places = places
        self._layer.routes.take(self._placement)
        renewed = [update for update in updates if update.pairs is None]
        return [layer.prefix for update in renewed for layer in update.group.layers]

    def _local(self, group: LayerGroup) -> Places:
        return {self._names.local(name): place for name, place in group.places.items()}

    def _stored(self, local: Places) -> Places:
        slices, prefix = self._layer.slices, self._layer.prefix
        found = {}
        for name, place in local.items():
            cut = slices.get(("", name.removeprefix(f"{prefix}.")))
            is_stacked = cut is not None and place.slice is not None
            found[self._names.stored(name)] = replace(place, slice=cut) if is_stacked else place
        return found


def _differ(places: Places, before: Places) -> bool:
    """Say whether another tensor, or another part of one, belongs to a place."""
    return places.keys() != before.keys() or any(
        (place.index, place.slice) != (before[name].index, before[name].slice)
        for name, place in places.items()
    )
