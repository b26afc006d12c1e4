"""The move of one layer's experts to another placement, under expert parallelism."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from copy import copy
from dataclasses import replace

import torch

from interposer_models._checkpoint.expert_names import ExpertNames
from interposer_models._checkpoint.layer_group import LayerGroup, PendingWeights
from interposer_models._checkpoint.tensor_places import TensorPlace
from interposer_models._checkpoint.weight_update import GroupUpdate
from interposer_ops.layers.expert_placement import ExpertPlacement
from interposer_ops.layers.placed_experts import PlacedExperts

Places = dict[str, TensorPlace]


class ExpertMove:
    """Collects the new experts of one layer; the layer changes in ``finish`` only.

    Groups of experts that stay on this rank are not read again.

    Attributes:
        names: names of the tensors to read, as in the checkpoint.
    """

    def __init__(
        self,
        layer: PlacedExperts,
        placement: ExpertPlacement,
        groups: Iterable[LayerGroup],
        names: ExpertNames,
    ) -> None:
        self._layer, self._placement, self._names = layer, placement, names
        prefix = f"{layer.prefix}."
        layer_groups = [
            group
            for group in groups
            if any(member is layer or member.prefix.startswith(prefix) for member in group.layers)
        ]
        local_places = {group: self._local(group) for group in layer_groups}
        placement_before = layer.routes.placement
        # Stored names and slices follow from the placement: set the new one to compute them.
        layer.routes.placement = placement
        try:
            places_after = {group: self._stored(places) for group, places in local_places.items()}
        finally:
            layer.routes.placement = placement_before
        self._places = {
            group: places for group, places in places_after.items() if _differ(places, group.places)
        }
        self._owners = {name: group for group, places in self._places.items() for name in places}
        self.names = self._owners.keys()
        self._pending: dict[LayerGroup, PendingWeights] = {}
        self._updates: dict[LayerGroup, GroupUpdate] = {}

    @property
    def missing(self) -> list[str]:
        """Names of the tensors that have not arrived."""
        pending = self._pending
        return [
            name
            for group in self._places.keys() - self._updates.keys()
            for name in (pending[group].missing if group in pending else self._places[group])
        ]

    @property
    def is_complete(self) -> bool:
        """Say whether all tensors have arrived."""
        return len(self._updates) == len(self._places)

    def put(
        self,
        name: str,
        tensor: torch.Tensor,
        device: str,
        path: object,
        names: Collection[str] | None,
    ) -> None:
        """Store a tensor, and prepare the group once all tensors have arrived.

        Args:
            names: names of all tensors that will arrive, if known.
        Raises: CheckpointError: the tensor arrives twice, or has the wrong shape or kind of dtype.
        """
        group = self._owners[name]
        pending = self._pending.get(group)
        if pending is None:
            # The group keeps its old places until ``finish``.
            moved_group = copy(group)
            moved_group.places = self._places[group]
            pending = self._pending[group] = PendingWeights(moved_group, device, True)
        pending.put(name, tensor, path)
        if not pending.awaits(names):
            pending.write_defaults()
            self._updates[group] = GroupUpdate.of(group, group.finalized_states(pending))
            del self._pending[group]

    def finish(self, apply: Callable[[list[GroupUpdate]], None]) -> list[str]:
        """Put the new experts into the layer.

        Returns: prefixes of the layers whose new operands differ in form, so that objects were
            replaced instead of written in place.
        """
        updates = list(self._updates.values())
        apply(updates)
        for group, places in self._places.items():
            group.places = places
        self._layer.routes.take(self._placement)
        replaced = [update for update in updates if update.pairs is None]
        return [layer.prefix for update in replaced for layer in update.group.layers]

    def _local(self, group: LayerGroup) -> Places:
        return {self._names.local(name): place for name, place in group.places.items()}

    def _stored(self, local_places: Places) -> Places:
        slices, prefix = self._layer.slices, self._layer.prefix
        places = {}
        for name, place in local_places.items():
            # Only a stacked tensor of all experts has a slice; tensors of single experts have none.
            shard = slices.get(("", name.removeprefix(f"{prefix}.")))
            is_stacked = shard is not None and place.slice is not None
            places[self._names.stored(name)] = replace(place, slice=shard) if is_stacked else place
        return places


def _differ(places: Places, previous: Places) -> bool:
    """Say whether the places read other tensors, or other parts of the same tensors."""
    return places.keys() != previous.keys() or any(
        (place.index, place.slice) != (previous[name].index, previous[name].slice)
        for name, place in places.items()
    )
