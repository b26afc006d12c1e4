"""The engine and the language model of one rank, whose methods run on every rank."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast
from zlib import crc32

import torch

from interposer import explain
from interposer.errors import ConfigError, RankError
from interposer_engine._closed_model import ClosedModel
from interposer_engine._distributed.estimate import (
    ExpertLoads,
    better_placements,
    load_notes,
    loads_of,
    placed_layers,
)
from interposer_engine._distributed.protocol import Coordinator, LocalCoordinator
from interposer_engine._embedded_input import PromptTokens
from interposer_engine._encoder_inputs import Source
from interposer_engine._engine import Engine
from interposer_engine._language_model import LanguageModel
from interposer_engine._packed.loading import relocate
from interposer_engine._plan import Plan
from interposer_engine._sampling_params import SamplingParams
from interposer_engine._sequence import Event, TokenSequence
from interposer_engine._tokenizer import TextTokenizer
from interposer_engine._weight_transfer.protocol import Meeting
from interposer_engine._weight_transfer.receiver import Tensors, WeightsFrom, at_rank


class RankedEngine(Engine):
    """Engine of one rank that runs the same requests as the engines of all other ranks.

    Attributes:
        coordinator: coordinates this rank with the others.
        digest: 32-bit digest of all requests and all tokens so far.
    """

    coordinator: Coordinator = LocalCoordinator()

    def __init__(
        self, *parts: Any, seed: int | None = None, shared_seed: int, **facts: Any
    ) -> None:
        """Create the rank's engine without requests.

        Args:
            seed: as for ``Engine``.
            shared_seed: a random seed that rank 0 drew, used if ``seed`` is None.
        """
        super().__init__(*parts, seed=seed, **facts)
        self._is_seeded = seed is not None
        self._seeds = Random(shared_seed if seed is None else seed)
        self.digest = 0
        self._has_new_requests = False

    @property
    def has_fixed_seed(self) -> bool:
        """Say whether requests without a seed draw the same noise in every run."""
        return self._is_seeded

    @property
    def trouble(self) -> str:
        """Reason why no step can be computed, such as a lost rank; "" if none is known."""
        return self.coordinator.trouble

    def agree(self, flag: bool) -> bool:
        """Return rank 0's ``flag`` on every rank, for decisions that depend on time or chance."""
        return self.coordinator.decide(flag)

    def add(
        self,
        prompt: PromptTokens,
        params: SamplingParams,
        source: Source | None = None,
        *,
        reads_texts: bool = False,
    ) -> TokenSequence:
        """Queue a request on all ranks; see ``Engine.add``."""
        self.coordinator.call_others("add", prompt, params, source, reads_texts)
        self._has_new_requests = True
        try:
            sequence = super().add(prompt, params, source, reads_texts=reads_texts)
        except Exception as error:
            self.mark(error)
            raise
        # Followers compute the same digest from the same requests and tokens.
        tokens = array("q", (sequence.seed, *sequence.prompt, *sequence.source))
        self.digest = crc32(tokens.tobytes(), self.digest)
        return sequence

    def mark(self, error: Exception) -> None:
        """Add an error to this rank's digest of events, which ranks compare."""
        self.mix(type(error).__name__)

    def mix(self, text: str) -> None:
        """Add a text to this rank's digest of events, which ranks compare."""
        self.digest = crc32(text.encode(), self.digest)

    def cancel(self, sequence: TokenSequence) -> None:
        """End a request early on all ranks; see ``Engine.cancel``."""
        if sequence.finish_reason is None:  # otherwise followers have removed the request
            self.coordinator.call_others("cancel", sequence.id)
            super().cancel(sequence)

    def step(self) -> list[Event]:
        """Compute the next step on all ranks; see ``Engine.step``."""
        if not self.busy:
            return []
        speculates = self.speculation is not None
        try:
            self.coordinator.begin(self.digest, fresh=self._has_new_requests, speculates=speculates)
            self._has_new_requests = False
            events = super().step()
        except RankError as error:
            raise self.coordinator.reason(error) from error
        drawn_tokens = array("q", (n for e in events for n in (e.sequence.id, e.token_id)))
        self.digest = crc32(drawn_tokens.tobytes(), self.digest)
        return events

    def logits(
        self,
        token_ids: PromptTokens,
        adapter: str | None = None,
        num_prompt: int | None = None,
        source: Source | None = None,
    ) -> torch.Tensor:
        """Compute logits on all ranks; see ``Engine.logits``."""
        self.coordinator.call_others("logits", token_ids, adapter, num_prompt, source)
        try:
            return super().logits(token_ids, adapter, num_prompt, source)
        except RankError as error:
            raise self.coordinator.reason(error) from error
        except Exception as error:
            self.mark(error)
            raise


class RankedLanguageModel(LanguageModel):
    """A language model that several ranks compute; each method call runs on every rank.

    If a command started the other ranks, rank 0 makes all calls. Otherwise every rank must make
    the same calls. ``close`` also releases the memory that ranks share. Processes that ``launched``
    started end with its block.
    """

    engine: RankedEngine

    def __init__(
        self, engine: RankedEngine, tokenizer: TextTokenizer, plan: Plan, *parts: Any
    ) -> None:
        super().__init__(engine, tokenizer, plan, *parts)
        self._plan = plan
        self._has_file_weights = True
        for layer in placed_layers(engine.model).values():
            layer.routes.reset_counts()  # the routes of the steps that measured the cache

    @property
    def current_notes(self) -> list[str]:
        """Notes for ``explain`` that change while the model runs."""
        return [*super().current_notes, *load_notes(self.engine.model)]

    def _release(self) -> None:
        """Release the model, and close the communicators to the other ranks."""
        self.engine.coordinator.close()
        for communicator in self._resolver.communicators.values():
            communicator.close()
        self._plan = ClosedModel.of(self.path)
        super()._release()

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

    def update_weights(self, tensors: Tensors | WeightsFrom) -> tuple[str, ...]:
        """Replace weights on every rank; see ``LanguageModel.update_weights``.

        Each rank receives all weights from a trainer and keeps one shard of each. Therefore all
        ranks must be in the trainer's group.

        Raises: ConfigError: ranks that follow this one cannot be in the group.
        """
        coordinator, update = self.engine.coordinator, super().update_weights
        weights: Any = tensors
        if not isinstance(tensors, str | Path | WeightsFrom):
            weights = [*(tensors.items() if isinstance(tensors, Mapping) else tensors)]
        elif isinstance(tensors, WeightsFrom) and not (
            coordinator.is_one_program or isinstance(tensors.group, Meeting)
        ):
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
        """Return the number of rows that each expert computed since its placement, by layer prefix.

        The counts are equal on every rank. Empty without expert parallelism.
        """
        return loads_of(self.engine.model)

    def rebalance_experts(self) -> dict[str, ExpertLoads]:
        """Place experts on ranks by their load, and reset the row counts.

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
                "This model runs without expert parallelism. Try: load(..., expert_parallel=True)"
            )
        if not self._has_file_weights or self.weights is None:
            raise ConfigError(
                "Experts that move to another rank are read from the files, but update_weights() "
                f"has replaced the weights. Try: load {self.path} again, or rebalance before that"
            )
        moves = better_placements(self.engine.model)
        loads = self.expert_loads()
        if moves:
            with self._plan.numerics():
                replaced_prefixes = relocate(self._plan, self.weights, moves)
            self._adapters.reread_base_weights()
            if replaced_prefixes:  # captured graphs use the old operands
                self.engine.runner.refresh_operands()
        # Ranks that moved experts differently must fail at the next step.
        self.engine.mix(repr([*moves.values()]))
        return {
            layer.prefix: replace(loads[layer.prefix], placement=placement)
            for layer, placement in moves.items()
        }
