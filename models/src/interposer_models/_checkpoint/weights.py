"""The weights of a model: loaded from a checkpoint, and exchanged for new ones later."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from interposer import PluggableLayer
from interposer.errors import CheckpointError, ConfigError
from interposer_models._checkpoint.expert_move import ExpertMove
from interposer_models._checkpoint.expert_names import ExpertNames
from interposer_models._checkpoint.layer_group import Filling, LayerGroup, State, groups_of
from interposer_models._checkpoint.offer import Offer, Room
from interposer_models._checkpoint.row_room import RowRoom
from interposer_models._checkpoint.spare_memory import SpareMemory
from interposer_models._checkpoint.tensor_places import absent_biases, held_elsewhere, places_of
from interposer_models._checkpoint.unplaced_tensor import unplaced
from interposer_models._checkpoint.weight_check import WeightCheck
from interposer_models._checkpoint.weight_update import GroupUpdate
from interposer_ops.devices import host_memory
from interposer_ops.layers.expert_placement import ExpertPlacement
from interposer_ops.layers.placed_experts import PlacedExperts

Progress = Callable[[int], None]
"""Told the bytes of every tensor that was placed."""

Keep = Callable[[int, LayerGroup], None]

# Some writers store tables that are derived from the config.
_DERIVED = ("rotary_emb.inv_freq",)
_LISTED = 5

Tensors = Iterable[tuple[str, torch.Tensor]]
Moves = Mapping[PlacedExperts, ExpertPlacement]


class Weights:
    """Knows the place of every tensor of a model that was built on the meta device.

    Attributes:
        device: where parameters are allocated.
        fixed: why they cannot be exchanged; empty where they can.
        check: searches every tensor that has a place for NaN and infinity; None for no search.
    """

    fixed: str = ""

    def __init__(self, model: nn.Module, device: str, check: WeightCheck | None = None) -> None:
        self.device = device
        self.check = check
        layers = [module for module in model.modules() if isinstance(module, PluggableLayer)]
        self._experts = ExpertNames(layers)
        local, self._tied = places_of(layers)
        places = {self._experts.stored(name): place for name, place in local.items()}
        self._unread: tuple[str, ...] = getattr(model, "unread", ())
        # Of a family whose checkpoints name tensors in several ways; None is what nobody needs.
        self._family_name: Callable[[str], str | None] = getattr(model, "renamed", str)
        frame = getattr(getattr(model, "config", None), "frame", None)
        self._decoder: str = getattr(frame, "decoder", "")
        self._elsewhere = held_elsewhere(layers)
        absent = frozenset(map(self._experts.stored, absent_biases(layers)))
        self._absent = absent - places.keys()
        self._groups = groups_of(layers, places)
        self._spare = SpareMemory()
        self._owners = {name: group for group in self._groups for name in group.places}

    def __contains__(self, stored: object) -> bool:
        """Say whether the model has a place for the tensor that a checkpoint calls ``stored``."""
        return isinstance(stored, str) and self._renamed(stored) in self._owners

    def _renamed(self, stored: str) -> str | None:
        """Return the name of a tensor in the model, or None if the model does not use it.

        A decoder that was saved without its head has names without that of the decoder.
        """
        name = self._family_name(stored)
        if name is None or name in self._owners or not self._decoder:
            return name
        longer = self._family_name(f"{self._decoder}.{stored}")
        is_known = longer is not None and (
            longer in self._owners
            or longer in self._absent
            or longer in self._elsewhere
            or self._experts.is_elsewhere(longer)
        )
        return longer if is_known else name

    def groups(self) -> Iterator[tuple[int, LayerGroup]]:
        """Yield the groups that have tensors in a checkpoint, and their numbers."""
        return ((number, group) for number, group in enumerate(self._groups) if group.places)

    def load(
        self,
        tensors: Tensors,
        path: object,
        progress: Progress | None = None,
        names: Collection[str] | None = None,
        keep: Keep | None = None,
        borrows: bool = False,
    ) -> None:
        """Fill every layer and finalize it as soon as its tensors are there.

        So the form in which a checkpoint stores weights, and the memory for it, is held for few
        layers at a time. A tensor must stay as it is until its layer is finalized. Whatever is
        raised, the model is on the meta device again.

        Args:
            names: of all tensors that will come, if known: then no layer waits for one that is
                optional and will not come.
            keep: told every group that has tensors, with its number, when it is finalized: layers
                hold nothing of it afterwards, until ``restore``.
            borrows: with ``keep``, layers may write to tensors as to copies of their own.
        Raises: CheckpointError: a tensor is unknown, missing, stored twice, of the wrong shape or
            kind of dtype, or holds what no weight can be computed with.
        """
        with self._whole(), host_memory.reused():
            self._load(tensors, path, progress, names, keep, borrows)
        host_memory.trim()

    @torch.no_grad()
    def restore(self, states_of: Callable[[int, LayerGroup], Iterable[State]]) -> None:
        """Let groups that have tensors hold these states; the others are finalized.

        Whatever is raised, the model is on the meta device again.
        """
        with self._whole():
            for number, group in enumerate(self._groups):
                if group.places:
                    group.take(states_of(number, group))
            for group in self._groups:
                if not group.places:
                    group.finalize(Filling(group, self.device))

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for group in self._groups:
                group.reset()
            raise

    @torch.no_grad()
    def _load(
        self,
        tensors: Tensors,
        path: object,
        progress: Progress | None,
        names: Collection[str] | None,
        keep: Keep | None,
        borrows: bool,
    ) -> None:
        def finalize(group: LayerGroup, filling: Filling) -> None:
            filling.put_defaults()
            group.finalize(filling)
            if filling.refusal is not None:
                raise filling.refusal
            if keep is not None:
                keep(numbers[group], group)
                group.reset()

        numbers = {group: number for number, group in enumerate(self._groups)}
        is_left = keep is not None and borrows
        fillings: dict[LayerGroup, Filling] = {}
        waiting = dict.fromkeys(self._groups)
        stand_ins: dict[str, str] = {}
        if names is not None:
            names = {self._renamed(name) or name for name in names}
            stand_ins = self._stand_ins(names)
            names |= {*stand_ins.values()}
        for stored, tensor in tensors:
            name = self._renamed(stored) or stored
            if name in stand_ins:
                name = stand_ins[name]
                group: LayerGroup | None = self._owners[name]
            else:
                group = self._owner(stored, tensor, path)
            if group is not None:
                if group not in waiting:
                    raise CheckpointError(path, f"holds the tensor {name!r} twice")
                filling = fillings.get(group)
                if filling is None:
                    _check_form(group, name, tensor, path)
                    filling = fillings[group] = Filling(group, self.device, True, is_left)
                self._put(filling, stored, name, tensor, path)
                if not filling.awaits(names):
                    finalize(group, filling)
                    del waiting[group], fillings[group]
            if progress is not None:
                progress(tensor.nbytes)
        missing = [
            name
            for group in waiting
            for name in (fillings[group].missing if group in fillings else group.places)
            if not group.places[name].is_optional
        ]
        if missing:
            raise CheckpointError(
                path, f"lacks the tensor {_listed(missing)}", "copy the checkpoint again"
            )
        for group in waiting:
            if keep is None or group.places:
                begun = fillings.pop(group) if group in fillings else None
                finalize(group, begun or Filling(group, self.device))

    def update(self, tensors: Offer, path: object) -> tuple[str, ...]:
        """Exchange the weights of the layers that ``tensors`` name, all of them or none.

        A layer gets all of its tensors together, those of the layers that it fuses included. What
        it is to hold is computed first, layer by layer, and held beside the present weights until
        the last one is there and the giver agrees; nothing that can fail comes after that. Where it
        has the form of what is held, it is written there, so that whoever keeps the operands keeps
        the right ones.

        Returns: prefixes of layers for which it has another form, so that they got new operands.
        Raises:
            CheckpointError: as ``load``, or only some tensors of a layer are given, or none at all.
                Nothing was changed.
            ConfigError: the weights are offloaded.
        """
        if self.fixed:
            raise ConfigError(self.fixed)
        with self._spare.used(keeps=tensors.keeps_memory):
            prefixes = self._update(tensors, path)
        host_memory.trim()
        return prefixes

    @torch.no_grad()
    def _update(self, tensors: Offer, path: object) -> tuple[str, ...]:
        fillings: dict[LayerGroup, Filling] = {}
        updates: dict[LayerGroup, GroupUpdate] = {}
        tied: set[str] = set()

        def filling_of(group: LayerGroup) -> Filling:
            if group not in fillings:
                # The only one of its group is finalized before another one is asked for.
                fillings[group] = Filling(group, self.device, len(group.places) == 1)
            return fillings[group]

        def room_for(stored: str, shape: Sequence[int], dtype: torch.dtype) -> Room | None:
            name = self._renamed(stored) or stored
            group = self._owners.get(name)
            # A tensor without a room comes whole, and what is wrong with it is told then.
            if group is None or group in updates or not group.places[name].takes_rows(shape, dtype):
                return None
            return filling_of(group).room(name)

        for stored, tensor in tensors.given(room_for):
            if isinstance(tensor, RowRoom):
                name = self._renamed(stored) or stored
                full = self._owners[name]
                fillings[full].fill(name)
                if self.check is not None:
                    values = fillings[full].values(name)
                    refusal = self.check.refusal(stored, values, path)
                    fillings[full].refusal = fillings[full].refusal or refusal
                if not fillings[full].missing:
                    updates[full] = _update_of(full, fillings.pop(full))
                continue
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(path, f"{stored!r} is {type(tensor).__name__}, not a tensor")
            name = self._renamed(stored) or stored
            group = self._owner(stored, tensor, path)
            if group is None:
                tied |= {name} & self._tied.keys()
                continue
            if group in updates:
                raise CheckpointError(path, f"holds the tensor {name!r} twice")
            if group not in fillings:
                _check_form(group, name, tensor, path)
            filling = filling_of(group)
            tensor = tensor.detach()
            self._put(filling, stored, name, tensor, path, tensors.gives(tensor))
            if not filling.missing:
                updates[group] = _update_of(group, fillings.pop(group))
        for group, filling in fillings.items():
            given = sorted(group.places.keys() - filling.missing)
            filling.put_defaults()
            if filling.missing:
                raise CheckpointError(
                    path,
                    f"lacks the tensor {_listed(filling.missing)}, which goes together with "
                    f"{_listed(given)}",
                    "give all tensors of these layers in one update",
                )
            updates[group] = _update_of(group, filling)
        self._check_tied(tied, updates, path)
        if not updates:
            raise CheckpointError(path, "holds no tensor of the model", "is its iterator used up?")
        tensors.agree()
        _apply(list(updates.values()))
        if tensors.keeps_memory:
            self._spare.put(old for each in updates.values() for _, old, _ in each.memories)
        renewed = [update for update in updates.values() if update.pairs is None]
        return tuple(layer.prefix for update in renewed for layer in update.group.layers)

    def _put(
        self,
        filling: Filling,
        stored: str,
        name: str,
        tensor: torch.Tensor,
        path: object,
        is_given: bool = False,
    ) -> None:
        """Put a tensor to its place, and note a refusal of numbers that are not finite."""
        # Codes of 4 bits may be stored under a dtype of floats, where any bits are right.
        if self.check is None or filling.group.places[name].takes_any_form:
            filling.put(name, tensor, path, is_given)
            return
        is_finite = filling.put(name, tensor, path, is_given, self.check.copy)
        refusal = self.check.refusal(stored, filling.values(name), path, tensor, is_finite)
        filling.refusal = filling.refusal or refusal

    @torch.no_grad()
    def relocate(
        self, moves: Moves, tensors: Tensors, names: Collection[str] | None, path: object
    ) -> tuple[str, ...]:
        """Let layers of experts hold others, layer by layer, and count their rows anew.

        Args:
            moves: where the experts of a layer are to be.
            tensors: of the whole checkpoint; of those of other layers and ranks none is read.
            names: of all of them, if known.
        Returns: as ``update``.
        Raises:
            CheckpointError: as ``load``. The layers that were done keep their new experts, and the
                others those that they had.
            ConfigError: the weights are offloaded.
        """
        if self.fixed:
            raise ConfigError(self.fixed)
        moving = [ExpertMove(*move, self._groups, self._experts) for move in moves.items()]
        owners = {name: move for move in moving for name in move.names}
        if names is not None:
            names = {self._renamed(name) or name for name in names}
        renewed = [prefix for move in moving if move.is_complete for prefix in move.finish(_apply)]
        with host_memory.reused():
            for stored, tensor in tensors:
                name = self._renamed(stored) or stored
                if (move := owners.get(name)) is None:
                    continue
                move.put(name, tensor, self.device, path, names)
                if move.is_complete:
                    renewed += move.finish(_apply)
        host_memory.trim()
        self._owners = {name: group for group in self._groups for name in group.places}
        missing = [name for move in moving for name in move.missing]
        if missing:
            raise CheckpointError(
                path, f"lacks the tensor {_listed(missing)}", "copy the checkpoint again"
            )
        return tuple(renewed)

    def _stand_ins(self, names: Collection[str]) -> dict[str, str]:
        """Return the tensor that each tied one fills, of those that come under that name alone."""
        used = {n: name for name, n in self._tied.items() if name in names and n not in names}
        return {name: n for n, name in used.items()}

    def _owner(self, stored: str, tensor: torch.Tensor, path: object) -> LayerGroup | None:
        """Return the group of a tensor of the checkpoint, or None if the model does not use it."""
        name = self._renamed(stored)
        group = None if name is None else self._owners.get(name)
        if name is None or group is not None or name in self._tied or name.endswith(_DERIVED):
            return group
        if name.startswith(self._unread) or name in self._elsewhere:
            return None
        if self._experts.is_elsewhere(name):
            return None
        if name not in self._absent:
            raise unplaced(stored, name, path)
        # Writers of GPTQ and AWQ give every layer a bias, of zeros where the model has none.
        offsets = tensor.bool()
        if offsets.any():
            raise CheckpointError(
                path,
                f"holds the tensor {name!r}, {int(offsets.sum())} of whose {offsets.numel()} "
                "numbers are not 0, but the model has no bias there",
                "correct config.json if the layer has one",
            )
        return None

    def _check_tied(
        self, tied: Iterable[str], updates: dict[LayerGroup, GroupUpdate], path: object
    ) -> None:
        for name in sorted(tied):
            used = self._tied[name]
            if self._owners[used] not in updates:
                raise CheckpointError(
                    path, f"holds {name!r}, which is tied to {used!r}", f"give {used!r} instead"
                )


def _update_of(group: LayerGroup, filling: Filling) -> GroupUpdate:
    """Return the change of a group to new weights.

    Raises: CheckpointError: a layer refuses them, or one is not finite.
    """
    states = group.finalized(filling)
    if filling.refusal is not None:
        raise filling.refusal
    return GroupUpdate.of(group, states)


@torch.inference_mode()  # in which tensors of either mode can be written
def _apply(updates: list[GroupUpdate]) -> None:
    try:
        for update in updates:
            update.apply()
    except BaseException:
        # Cut off in the middle, the model would be half the old one and half the new one.
        for update in updates:
            update.apply()
        raise


def _check_form(group: LayerGroup, name: str, tensor: torch.Tensor, path: object) -> None:
    """Raise CheckpointError for another shape, before memory of the expected one is taken."""
    place = group.places[name]
    if not place.takes_any_form:
        place.fitting(name, place.share(name, tensor, path), path)


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return ", ".join(map(repr, known[:_LISTED])) + more
