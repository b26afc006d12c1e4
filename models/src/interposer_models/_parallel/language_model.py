"""The model of one rank; methods run on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import torch

from interposer import Resolver, explain
from interposer.errors import ConfigError
from interposer_models._language_model import LanguageModel
from interposer_models._packed.loading_steps import relocate
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
    """A model that several ranks compute; each call runs on every rank.

    If a command started the other ranks, rank 0 makes all calls. Otherwise every rank must make
    the same calls. ``close`` releases the memory that ranks share.
    """

    engine: RankedEngine

    def __init__(
        self, engine: RankedEngine, tokenizer: TextTokenizer, plan: Plan, *parts: Any
    ) -> None:
        super().__init__(engine, tokenizer, plan, *parts)
        self._plan = plan
        self._has_file_weights = True
        for layer in placed_layers(engine.model).values():
            layer.routes.forget()  # the routes of the steps that measured the cache

    @property
    def resolver(self) -> Resolver:
        """The resolver of the model, with a note on the balance of the ranks."""
        resolver = super().resolver
        other_notes = [note for note in resolver.notes if not note.startswith(NOTE)]
        resolver.notes[:] = [*other_notes, *load_notes(self.engine.model)]
        return resolver

    def __enter__(self) -> Self:
        """Return the model."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the model."""
        self.close()

    def close(self) -> None:
        """Close the communicators; the model is unusable afterwards."""
        self.engine.coordinator.close()
        for communicator in self._resolver.communicators.values():
            communicator.close()

    def explanations(self) -> list[dict[str, Any]]:
        """Return ``interposer.explain(model).to_dict()`` of each rank, in order.

        Raises: RankError: a rank was lost.
        """
        with self.engine.lock:
            return self.engine.coordinator.call_on_all("explanation", (), self.explanation)

    def explanation(self) -> dict[str, Any]:
        """Return ``interposer.explain(model).to_dict()`` of this rank."""
        return explain(self).to_dict()

    def load_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> None:
        """Load a LoRA adapter on every rank; see ``LanguageModel.load_adapter``."""
        load = super().load_adapter
        with self.engine.lock:
            self.engine.coordinator.call_on_all(
                "load_adapter",
                (name, path),
                lambda: load(name, path, replace=replace),
                replace=replace,
            )

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter from every rank; see ``LanguageModel.remove_adapter``."""
        remove = super().remove_adapter
        with self.engine.lock:
            self.engine.coordinator.call_on_all("remove_adapter", (name,), lambda: remove(name))

    def update_weights(
        self,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | WeightsFrom,
    ) -> tuple[str, ...]:
        """Replace weights on every rank; see ``LanguageModel.update_weights``.

        Each rank receives all weights from a trainer and keeps one shard of each. Therefore all
        ranks must be in the trainer's group.

        Raises: ConfigError: ranks that follow this one cannot be in the group.
        """
        coordinator, update = self.engine.coordinator, super().update_weights
        weights: Any = tensors
        if not isinstance(tensors, WeightsFrom):
            weights = [*(tensors.items() if isinstance(tensors, Mapping) else tensors)]
        elif not (coordinator.is_one_program or isinstance(tensors.group, Meeting)):
            raise ConfigError(
                "The process groups of this program do not hold the ranks that follow it. "
                "Try: WeightsFrom(Meeting(address, rank, size)), and the same address in "
                "send_weights"
            )

        def update_rank() -> tuple[str, ...]:
            ranks = self._resolver.ranks
            if not isinstance(weights, WeightsFrom):
                return update(weights)
            return update(at_rank(weights, 0 if ranks is None else ranks.rank))

        with self.engine.lock:
            results = coordinator.call_on_all("update_weights", (weights,), update_rank)
        self._has_file_weights = False
        return cast("tuple[str, ...]", results[0])

    def expert_loads(self) -> dict[str, ExpertLoads]:
        """Return the number of rows of each expert since it was placed, by prefix of the layer.

        The counts are equal on every rank. Empty without expert parallelism.
        """
        return loads_of(self.engine.model)

    def rebalance_experts(self) -> dict[str, ExpertLoads]:
        """Place experts by load on every rank, and reset the counts.

        Call this at any time between steps; requests continue, as keys and values stay unchanged.
        Each rank reads its new experts from the files: complete layers if one tensor stores all
        experts of a layer.

        Returns: the previous counts with the new placements, of each layer whose placement changed.
            Layers stay as they are if no placement balances them better.
        Raises:
            ConfigError: the weights differ from the files, weights are offloaded, or the model has
                no expert parallelism.
            CheckpointError: the files are incomplete.
            RankError: the call failed on some ranks only, so that ranks differ.
        """
        with self.engine.lock:
            loads = self.engine.coordinator.call_on_all("rebalance_experts", (), self._rebalance)
        return cast("dict[str, ExpertLoads]", loads[0])

    def _rebalance(self) -> dict[str, ExpertLoads]:
        if not placed_layers(self.engine.model):
            raise ConfigError(
                "No experts of this model are placed whole. Try: load(..., expert_parallel=True)"
            )
        if not self._has_file_weights or self.weights is None:
            raise ConfigError(
                "Experts are read from the files again where they move, and update_weights() gave "
                f"the model others. Try: load {self.path} anew, or rebalance before the update"
            )
        moves = better_placements(self.engine.model)
        loads = self.expert_loads()
        if moves:
            with self._plan.numerics():
                replaced_prefixes = relocate(self._plan, self.weights, moves)
            self._adapters.renew()
            if replaced_prefixes:  # captured graphs use the old operands
                self.engine.runner.renew()
        # Ranks that moved experts differently must fail at the next step.
        self.engine.mix(repr([*moves.values()]))
        return {
            layer.prefix: replace(loads[layer.prefix], placement=placement)
            for layer, placement in moves.items()
        }
