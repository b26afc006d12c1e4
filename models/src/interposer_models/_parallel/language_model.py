"""The model of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import torch

from interposer import Resolver, explain
from interposer.errors import ConfigError
from interposer_models._language_model import LanguageModel
from interposer_models._packed.filling import relocate
from interposer_models._parallel.engine import RankedEngine
from interposer_models._parallel.placed_experts import (
    NOTE,
    ExpertLoads,
    better_placements,
    load_notes,
    loads_of,
    placed_layers,
)
from interposer_models._plan import Plan
from interposer_models._tokenizer import TextTokenizer
from interposer_models._transfer.meeting import Meeting
from interposer_models._transfer.receiver import WeightsFrom, at_rank


class RankedLanguageModel(LanguageModel):
    """A model that several processes compute; each call is made on every one of them.

    Where rank 0 was given the others by a command, it makes their calls. ``close`` gives back
    what the ranks share.
    """

    engine: RankedEngine

    def __init__(
        self, engine: RankedEngine, tokenizer: TextTokenizer, plan: Plan, *parts: Any
    ) -> None:
        super().__init__(engine, tokenizer, plan, *parts)
        self._plan = plan
        self._is_stored = True
        for layer in placed_layers(engine.model).values():
            layer.routes.forget()  # what the steps chose that measured the cache

    @property
    def resolver(self) -> Resolver:
        """The resolver that made the choices, with a note of how evenly ranks are loaded."""
        found = super().resolver
        kept = [note for note in found.notes if not note.startswith(NOTE)]
        found.notes[:] = [*kept, *load_notes(self.engine.model)]
        return found

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do as ``close``."""
        self.close()

    def close(self) -> None:
        """Give back the communicators; the model computes nothing afterwards."""
        self.engine.lead.close()
        for communicator in self._resolver.communicators.values():
            communicator.close()

    def explanations(self) -> list[dict[str, Any]]:
        """Return ``interposer.explain(model).to_dict()`` of each rank, in order.

        Raises: RankError: a rank was lost.
        """
        with self.engine.lock:
            return self.engine.lead.everywhere("explanation", (), self.explanation)

    def explanation(self) -> dict[str, Any]:
        """Return ``interposer.explain(model).to_dict()`` of this rank."""
        return explain(self).to_dict()

    def load_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> None:
        """Load a LoRA adapter on every rank; see ``LanguageModel.load_adapter``."""
        load = super().load_adapter
        with self.engine.lock:
            self.engine.lead.everywhere(
                "load_adapter",
                (name, path),
                lambda: load(name, path, replace=replace),
                replace=replace,
            )

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter on every rank; see ``LanguageModel.remove_adapter``."""
        remove = super().remove_adapter
        with self.engine.lock:
            self.engine.lead.everywhere("remove_adapter", (name,), lambda: remove(name))

    def update_weights(
        self,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | WeightsFrom,
    ) -> tuple[str, ...]:
        """Exchange weights on every rank; see ``LanguageModel.update_weights``.

        From a trainer, each rank receives what all others do, and keeps its share. So all of them
        are in the trainer's group.

        Raises: ConfigError: ranks that follow this one cannot be in the group.
        """
        lead, update = self.engine.lead, super().update_weights
        given: Any = tensors
        if not isinstance(tensors, WeightsFrom):
            given = [*(tensors.items() if isinstance(tensors, Mapping) else tensors)]
        elif not (lead.is_one_program or isinstance(tensors.group, Meeting)):
            raise ConfigError(
                "The process groups of this program do not hold the ranks that follow it. "
                "Try: WeightsFrom(Meeting(address, rank, size)), and the same address in "
                "send_weights"
            )

        def take() -> tuple[str, ...]:
            ranks = self._resolver.ranks
            if not isinstance(given, WeightsFrom):
                return update(given)
            return update(at_rank(given, 0 if ranks is None else ranks.rank))

        with self.engine.lock:
            found = lead.everywhere("update_weights", (given,), take)
        self._is_stored = False
        return cast("tuple[str, ...]", found[0])

    def expert_loads(self) -> dict[str, ExpertLoads]:
        """Return how many rows each expert got since it was placed, by the prefix of its layer.

        Every rank counts the same. Of models whose experts are not placed whole there is none.
        """
        return loads_of(self.engine.model)

    def rebalance_experts(self) -> dict[str, ExpertLoads]:
        """Place experts by their loads on every rank, and count anew; between steps, at any time.

        Each rank reads the experts that it is to hold from the files, whole layers of them where
        one tensor holds those of a layer. Requests go on: keys and values stay as they are.

        Returns: what was counted until now, with the new placements, of the layers whose ranks have
            less to do by these; others stay as they are.
        Raises:
            ConfigError: the weights are no longer those of the files, or are offloaded, or experts
                are not placed whole.
            CheckpointError: the files are no longer complete.
            RankError: it failed on some ranks only, which are no longer alike.
        """
        with self.engine.lock:
            loads = self.engine.lead.everywhere("rebalance_experts", (), self._rebalance)
        return cast("dict[str, ExpertLoads]", loads[0])

    def _rebalance(self) -> dict[str, ExpertLoads]:
        if not placed_layers(self.engine.model):
            raise ConfigError(
                "No experts of this model are placed whole. Try: load(..., expert_parallel=True)"
            )
        if not self._is_stored or self.weights is None:
            raise ConfigError(
                "Experts are read from the files again where they move, and update_weights() gave "
                f"the model others. Try: load {self.path} anew, or rebalance before the update"
            )
        moves = better_placements(self.engine.model)
        counted = self.expert_loads()
        if moves:
            with self._plan.numerics():
                renewed = relocate(self._plan, self.weights, moves)
            self._adapters.renew()
            if renewed:
                self.engine.runner.renew()
        self.engine.mix(repr([*moves.values()]))
        return {
            layer.prefix: replace(counted[layer.prefix], placement=placement)
            for layer, placement in moves.items()
        }
