"""The weights of a model: loaded from a checkpoint, and updated later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from interposer import PluggableLayer
from interposer.errors import CheckpointError, ConfigError
from interposer_engine._checkpoint.layers import (
    LayerGroup,
    PendingWeights,
    RowBuffer,
    State,
    groups_of,
)
from interposer_engine._checkpoint.tensors import (
    ExpertNames,
    absent_biases,
    held_elsewhere,
    places_of,
    unplaced_tensor_error,
)
from interposer_engine._checkpoint.updates import ExpertMove, GroupUpdate, Offer, TensorBuffer
from interposer_engine._checkpoint.weight_check import WeightCheck
from interposer_ops.devices import host_memory
from interposer_ops.layers.moe.placement import ExpertPlacement
from interposer_ops.layers.moe.sharded_experts import ExpertParallelExperts

_ALIGNED_BYTES = 64
_ALL_BYTES = 1 << 62


class SpareMemory:
    """Memory that a weight update has freed, kept for the allocations of the next update.

    The system clears new memory, and a virtual machine may have to request memory from the host.
    Both take longer than receiving weights.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._maps: host_memory.Spare | None = None

    @contextmanager
    def used(self, *, keeps: bool) -> Iterator[None]:
        """Allocate host memory from the spare memory first, within a ``with`` block.

        Args:
            keeps: whether memory that becomes free is kept for the next block.
        """
        if not keeps:
            self._clear()
        elif self._maps is None:
            self._maps = host_memory.Spare(_ALL_BYTES)
        with host_memory.reused(self._maps), host_memory.placed(self._take):
            yield

    def put(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Keep the memory of replaced weights for the next ``used`` block."""
        self._free.clear()
        for storage in storages:
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            # Kernels expect the alignment that the allocator guarantees.
            if memory.data_ptr() % _ALIGNED_BYTES == 0:
                self._free[memory.nbytes].append(memory)

    def _take(self, num_bytes: int, lasting: bool) -> torch.Tensor | None:
        memories = self._free.get(num_bytes) if lasting else None
        return memories.pop() if memories else None

    def _clear(self) -> None:
        self._free.clear()
        if self._maps is not None:
            self._maps.close()
            self._maps = None


Progress = Callable[[int], None]
"""Called with the number of bytes of every tensor that was placed."""

Keep = Callable[[int, LayerGroup], None]

# Some writers store tables that the model computes from the config.
_DERIVED = ("rotary_emb.inv_freq",)
_MAX_LISTED = 5

Tensors = Iterable[tuple[str, torch.Tensor]]
Moves = Mapping[ExpertParallelExperts, ExpertPlacement]


class Weights:
    """The weights of a model built on the meta device, with the place of every tensor.

    Attributes:
        device: where parameters are allocated.
        fixed: why weights cannot be updated; empty if they can.
        check: the check for NaN and infinity; None for no check.
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
        # Translates checkpoint names of the model family; None for tensors that are not needed.
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
        """Say whether the model has a place for the checkpoint tensor ``stored``."""
        return isinstance(stored, str) and self._model_name(stored) in self._owners

    def _model_name(self, stored: str) -> str | None:
        """Return the model's name of a checkpoint tensor; None for an unused tensor.

        A decoder that was saved without the head has names without the decoder's prefix.
        """
        name = self._family_name(stored)
        if name is None or name in self._owners or not self._decoder:
            return name
        prefixed = self._family_name(f"{self._decoder}.{stored}")
        is_known = prefixed is not None and (
            prefixed in self._owners
            or prefixed in self._absent
            or prefixed in self._elsewhere
            or self._experts.is_elsewhere(prefixed)
        )
        return prefixed if is_known else name

    def groups(self) -> Iterator[tuple[int, LayerGroup]]:
        """Yield ``(number, group)`` of each layer group that has tensors in a checkpoint."""
        return ((number, group) for number, group in enumerate(self._groups) if group.places)

    def load(
        self,
        tensors: Tensors,
        path: object,
        progress: Progress | None = None,
        names: Collection[str] | None = None,
        keep: Keep | None = None,
        can_borrow: bool = False,
    ) -> None:
        """Load every layer, and finalize each layer as soon as all tensors have arrived.

        The checkpoint's form of the weights is in memory for few layers at a time. A tensor must
        stay unchanged until its layer is finalized. If an error is raised, the model is on the meta
        device again.

        Args:
            tensors: names and tensors of the checkpoint, in any order.
            path: path of the checkpoint, for error messages.
            progress: called with the bytes of each tensor.
            names: names of all tensors that will arrive, if known: then no layer waits for an
                optional tensor that will not arrive.
            keep: called with the number of a group and the group, after the group is finalized. The
                layers of the group are then on the meta device until ``restore``.
            can_borrow: with ``keep``, layers may use tensors as parameters, and may write to them.
        Raises: CheckpointError: a tensor is unknown, missing, stored twice, not finite, or of the
            wrong shape or kind of dtype.
        """
        with self._reset_on_error(), host_memory.reused():
            self._load(tensors, path, progress, names, keep, can_borrow)
        host_memory.trim()

    @torch.no_grad()
    def restore(self, states_of: Callable[[int, LayerGroup], Iterable[State]]) -> None:
        """Set layer groups to the states that ``states_of`` returns, and finalize all other groups.

        If an error is raised, the model is on the meta device again.
        """
        with self._reset_on_error():
            for number, group in enumerate(self._groups):
                if group.places:
                    group.set_states(states_of(number, group))
            for group in self._groups:
                if not group.places:
                    group.finalize(PendingWeights(group, self.device))

    @contextmanager
    def _reset_on_error(self) -> Iterator[None]:
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
        can_borrow: bool,
    ) -> None:
        def finalize(group: LayerGroup, pending: PendingWeights) -> None:
            pending.write_defaults()
            group.finalize(pending)
            if pending.refusal is not None:
                raise pending.refusal
            if keep is not None:
                keep(numbers[group], group)
                group.reset()

        numbers = {group: number for number, group in enumerate(self._groups)}
        is_result_copied = keep is not None and can_borrow
        pending_by_group: dict[LayerGroup, PendingWeights] = {}
        unfinished = dict.fromkeys(self._groups)
        stand_ins: dict[str, str] = {}
        if names is not None:
            names = {self._model_name(name) or name for name in names}
            stand_ins = self._stand_ins(names)
            names |= {*stand_ins.values()}
        for stored, tensor in tensors:
            name = self._model_name(stored) or stored
            # A tied tensor that arrives alone fills the tensor of the first layer.
            if name in stand_ins:
                name = stand_ins[name]
                group: LayerGroup | None = self._owners[name]
            else:
                group = self._owner(stored, tensor, path)
            if group is not None:
                if group not in unfinished:
                    raise CheckpointError(path, f"holds the tensor {name!r} twice")
                pending = pending_by_group.get(group)
                if pending is None:
                    _check_form(group, name, tensor, path)
                    pending = pending_by_group[group] = PendingWeights(
                        group, self.device, True, is_result_copied
                    )
                self._put(pending, stored, name, tensor, path)
                if not pending.awaits(names):
                    finalize(group, pending)
                    del unfinished[group], pending_by_group[group]
            if progress is not None:
                progress(tensor.nbytes)
        missing = [
            name
            for group in unfinished
            for name in (
                pending_by_group[group].missing if group in pending_by_group else group.places
            )
            if not group.places[name].is_optional
        ]
        if missing:
            raise CheckpointError(
                path, f"lacks the tensor {_name_list(missing)}", "copy the checkpoint again"
            )
        # Groups without tensors, and those that only wait for optional ones.
        for group in unfinished:
            if keep is None or group.places:
                pending = pending_by_group.pop(group, None)
                finalize(group, pending or PendingWeights(group, self.device))

    def update(self, tensors: Offer, path: object) -> tuple[str, ...]:
        """Replace the weights of all layers whose tensors an offer contains: either all or none.

        All tensors of a layer must arrive, for a fused layer those of all fused layers. New states
        are prepared layer by layer, next to the current weights, until the last tensor has arrived
        and the offer is confirmed; nothing after that can fail. If a new state has the form of the
        current one, tensors are written in place, so that kernels and graphs that keep operands use
        the new weights.

        Returns: prefixes of layers whose new state has another form, so that they have new
            operands.
        Raises:
            CheckpointError: as ``load``, or tensors of a layer are missing, or there are none at
                all. Nothing was changed.
            ConfigError: the weights are offloaded.
        """
        if self.fixed:
            raise ConfigError(self.fixed)
        # New states need as much memory as the current weights: reuse that of the last update.
        with self._spare.used(keeps=tensors.keeps_memory):
            prefixes = self._update(tensors, path)
        host_memory.trim()
        return prefixes

    @torch.no_grad()
    def _update(self, tensors: Offer, path: object) -> tuple[str, ...]:
        pending_by_group: dict[LayerGroup, PendingWeights] = {}
        updates: dict[LayerGroup, GroupUpdate] = {}
        tied: set[str] = set()

        def pending_of(group: LayerGroup) -> PendingWeights:
            if group not in pending_by_group:
                # A group of one tensor is finalized before the next tensor arrives, which may
                # overwrite this one: borrowing is safe.
                pending_by_group[group] = PendingWeights(group, self.device, len(group.places) == 1)
            return pending_by_group[group]

        def buffer_for(
            stored: str, shape: Sequence[int], dtype: torch.dtype
        ) -> TensorBuffer | None:
            name = self._model_name(stored) or stored
            group = self._owners.get(name)
            # A tensor without a buffer arrives complete, and is checked then.
            if group is None or group in updates or not group.places[name].takes_rows(shape, dtype):
                return None
            return pending_of(group).row_buffer(name)

        for stored, tensor in tensors.tensors(buffer_for):
            if isinstance(tensor, RowBuffer):
                name = self._model_name(stored) or stored
                owner = self._owners[name]
                pending = pending_by_group[owner]
                pending.mark_complete(name)
                if self.check is not None:
                    refusal = self.check.refusal(stored, pending.values(name), path)
                    pending.refusal = pending.refusal or refusal
                if not pending.missing:
                    updates[owner] = _update_of(owner, pending_by_group.pop(owner))
                continue
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(path, f"{stored!r} is {type(tensor).__name__}, not a tensor")
            name = self._model_name(stored) or stored
            group = self._owner(stored, tensor, path)
            if group is None:
                tied |= {name} & self._tied.keys()
                continue
            if group in updates:
                raise CheckpointError(path, f"holds the tensor {name!r} twice")
            if group not in pending_by_group:
                _check_form(group, name, tensor, path)
            pending = pending_of(group)
            tensor = tensor.detach()
            self._put(pending, stored, name, tensor, path, tensors.is_exclusive(tensor))
            if not pending.missing:
                updates[group] = _update_of(group, pending_by_group.pop(group))
        for group, pending in pending_by_group.items():
            arrived = sorted(group.places.keys() - pending.missing)
            pending.write_defaults()
            if pending.missing:
                raise CheckpointError(
                    path,
                    f"lacks the tensor {_name_list(pending.missing)}, which goes together with "
                    f"{_name_list(arrived)}",
                    "give all tensors of these layers in one update",
                )
            updates[group] = _update_of(group, pending)
        self._check_tied(tied, updates, path)
        if not updates:
            mend = "pass tensors; an iterator can be used only once"
            raise CheckpointError(path, "holds no tensor of the model", mend)
        tensors.confirm()
        _apply(list(updates.values()))
        if tensors.keeps_memory:
            # After the swap, the second storage of each entry has the old memory.
            self._spare.put(old for update in updates.values() for _, old, _ in update.memories)
        replaced = [update for update in updates.values() if update.pairs is None]
        return tuple(layer.prefix for update in replaced for layer in update.group.layers)

    def _put(
        self,
        pending: PendingWeights,
        stored: str,
        name: str,
        tensor: torch.Tensor,
        path: object,
        is_exclusive: bool = False,
    ) -> None:
        """Store a tensor of an update, and record a refusal if a value is not finite."""
        # Parameters of any form may be packed 4-bit values under a float dtype: any bits are valid.
        if self.check is None or pending.group.places[name].takes_any_form:
            pending.put(name, tensor, path, is_exclusive)
            return
        is_finite = pending.put(name, tensor, path, is_exclusive, self.check.copy)
        refusal = self.check.refusal(stored, pending.values(name), path, tensor, is_finite)
        pending.refusal = pending.refusal or refusal

    @torch.no_grad()
    def relocate(
        self, moves: Moves, tensors: Tensors, names: Collection[str] | None, path: object
    ) -> tuple[str, ...]:
        """Move experts between ranks, layer by layer, and reset the row counts of the experts.

        Args:
            moves: the new placement of the experts of each layer.
            tensors: tensors of the complete checkpoint; other layers and ranks are skipped.
            names: names of all tensors, if known.
        Returns: as ``update``.
        Raises:
            CheckpointError: as ``load``. Layers that were complete keep the new experts, and the
                others the old ones.
            ConfigError: the weights are offloaded.
        """
        if self.fixed:
            raise ConfigError(self.fixed)
        expert_moves = [ExpertMove(*move, self._groups, self._experts) for move in moves.items()]
        owners = {name: move for move in expert_moves for name in move.names}
        if names is not None:
            names = {self._model_name(name) or name for name in names}
        replaced_prefixes = [
            prefix for move in expert_moves if move.is_complete for prefix in move.finish(_apply)
        ]
        with host_memory.reused():
            for stored, tensor in tensors:
                name = self._model_name(stored) or stored
                if (move := owners.get(name)) is None:
                    continue
                move.put(name, tensor, self.device, path, names)
                if move.is_complete:
                    replaced_prefixes += move.finish(_apply)
        host_memory.trim()
        self._owners = {name: group for group in self._groups for name in group.places}
        missing = [name for move in expert_moves for name in move.missing]
        if missing:
            raise CheckpointError(
                path, f"lacks the tensor {_name_list(missing)}", "copy the checkpoint again"
            )
        return tuple(replaced_prefixes)

    def _stand_ins(self, names: Collection[str]) -> dict[str, str]:
        """Map the name of a tied tensor that arrives alone to the tensor's name in the model."""
        # Of several tied names that arrive, the last one fills the tensor.
        tied_by_original = {
            original: tied
            for tied, original in self._tied.items()
            if tied in names and original not in names
        }
        return {tied: original for original, tied in tied_by_original.items()}

    def _owner(self, stored: str, tensor: torch.Tensor, path: object) -> LayerGroup | None:
        """Return the layer group of a checkpoint tensor; None if the model does not use the tensor.

        Raises: CheckpointError: the model has no place for the tensor.
        """
        name = self._model_name(stored)
        group = None if name is None else self._owners.get(name)
        if name is None or group is not None or name in self._tied or name.endswith(_DERIVED):
            return group
        if name.startswith(self._unread) or name in self._elsewhere:
            return None
        if self._experts.is_elsewhere(name):
            return None
        if name not in self._absent:
            raise unplaced_tensor_error(stored, name, path)
        # GPTQ and AWQ writers store a bias for every layer, zeros if the model has no bias.
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
            original = self._tied[name]
            if self._owners[original] not in updates:
                raise CheckpointError(
                    path,
                    f"holds {name!r}, which is tied to {original!r}",
                    f"give {original!r} instead",
                )


def _update_of(group: LayerGroup, pending: PendingWeights) -> GroupUpdate:
    """Prepare the update of a layer group to new weights.

    Raises: CheckpointError: a layer refuses the weights, or a number is not finite.
    """
    states = group.finalized_states(pending)
    if pending.refusal is not None:
        raise pending.refusal
    return GroupUpdate.of(group, states)


@torch.inference_mode()  # both inference and normal tensors can be written in this mode
def _apply(updates: list[GroupUpdate]) -> None:
    try:
        for update in updates:
            update.apply()
    except BaseException:
        # Finish an interrupted update: a mix of old and new weights would be useless.
        for update in updates:
            update.apply()
        raise


def _check_form(group: LayerGroup, name: str, tensor: torch.Tensor, path: object) -> None:
    """Refuse a tensor of the wrong shape, before memory for the expected shape is allocated."""
    place = group.places[name]
    if not place.takes_any_form:
        place.fitting(name, place.shard(name, tensor, path), path)


def _name_list(names: Iterable[str]) -> str:
    sorted_names = sorted(names)
    remainder = (
        f" and {len(sorted_names) - _MAX_LISTED} more" if len(sorted_names) > _MAX_LISTED else ""
    )
    return ", ".join(map(repr, sorted_names[:_MAX_LISTED])) + remainder
