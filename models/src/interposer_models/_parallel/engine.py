"""The engine of one rank, which runs the same steps as the engines of all other ranks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from random import Random
from typing import Any
from zlib import crc32

import torch

from interposer.errors import RankError
from interposer_models._engine.engine import Engine
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._engine.sequence import Event, Sequence
from interposer_models._parallel.coordination import Coordinator, LocalCoordinator


class RankedEngine(Engine):
    """Runs the same requests as the engines of all other ranks.

    Attributes:
        coordinator: coordinates this rank with the others.
        digest: 32-bit digest of all requests and all tokens so far.
    """

    coordinator: Coordinator = LocalCoordinator()

    def __init__(
        self, *parts: Any, seed: int | None = None, shared_seed: int, **facts: Any
    ) -> None:
        """Create an engine without requests.

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
    def draws_repeat(self) -> bool:
        """Say whether requests without a seed draw the same noise in each run."""
        return self._is_seeded

    @property
    def trouble(self) -> str:
        """Why no step can be computed, such as a lost rank; empty if none is known."""
        return self.coordinator.trouble

    def agreed(self, flag: bool) -> bool:
        """Return the flag of rank 0."""
        return self.coordinator.decide(flag)

    def add(
        self,
        prompt: Items[int],
        params: SamplingParams,
        source: Items[int] | None = None,
        *,
        reads_texts: bool = False,
    ) -> Sequence:
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
        """Add an error to the digest; every rank must have the same error."""
        self.mix(type(error).__name__)

    def mix(self, text: str) -> None:
        """Add a text to the digest; every rank must add the same text."""
        self.digest = crc32(text.encode(), self.digest)

    def cancel(self, sequence: Sequence) -> None:
        """End a request early on all ranks; see ``Engine.cancel``."""
        if sequence.finish_reason is None:  # otherwise followers have removed the request
            self.coordinator.call_others("cancel", sequence.id)
            super().cancel(sequence)

    def step(self) -> list[Event]:
        """Compute the next step of all ranks; see ``Engine.step``."""
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
        token_ids: Items[int],
        adapter: str | None = None,
        num_prompt: int | None = None,
        source: Items[int] | None = None,
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
