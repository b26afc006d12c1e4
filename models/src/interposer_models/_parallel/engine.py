"""The engine of one rank, which does what those of the other ranks do."""

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
from interposer_models._parallel.lead import Lead, Silent


class RankedEngine(Engine):
    """Runs the requests that every rank runs.

    Attributes:
        lead: what the ranks follow.
        digest: of all requests and all tokens so far, 32 bits.
    """

    lead: Lead = Silent()

    def __init__(
        self, *parts: Any, seed: int | None = None, shared_seed: int, **facts: Any
    ) -> None:
        """Take no request yet.

        Args:
            seed: as ``Engine`` takes it.
            shared_seed: that rank 0 drew, where there is none.
        """
        super().__init__(*parts, seed=seed, **facts)
        self._repeats = seed is not None
        self._seeds = Random(shared_seed if seed is None else seed)
        self.digest = 0
        self._fresh = False

    @property
    def draws_repeat(self) -> bool:
        """Say whether the noise of requests that name no seed is the same each time."""
        return self._repeats

    @property
    def trouble(self) -> str:
        """The reason why no step can be computed, such as a lost rank; else empty."""
        return self.lead.trouble

    def agreed(self, flag: bool) -> bool:
        """Return what rank 0 says."""
        return self.lead.decide(flag)

    def add(
        self,
        prompt: Items[int],
        params: SamplingParams,
        source: Items[int] | None = None,
        *,
        reads_texts: bool = False,
    ) -> Sequence:
        """Queue a request on all ranks; see ``Engine.add``."""
        self.lead.tell("add", prompt, params, source, reads_texts)
        self._fresh = True
        try:
            sequence = super().add(prompt, params, source, reads_texts=reads_texts)
        except Exception as error:
            self.mark(error)
            raise
        tokens = array("q", (sequence.seed, *sequence.prompt, *sequence.source))
        self.digest = crc32(tokens.tobytes(), self.digest)
        return sequence

    def mark(self, error: Exception) -> None:
        """Have an error in the digest, which is to come on every rank."""
        self.mix(type(error).__name__)

    def mix(self, text: str) -> None:
        """Have in the digest what is to be the same on every rank."""
        self.digest = crc32(text.encode(), self.digest)

    def cancel(self, sequence: Sequence) -> None:
        """End a request early on all ranks; see ``Engine.cancel``."""
        if sequence.finish_reason is None:
            self.lead.tell("cancel", sequence.id)
            super().cancel(sequence)

    def step(self) -> list[Event]:
        """Compute the next step of all ranks; see ``Engine.step``."""
        if not self.busy:
            return []
        speculates = self.speculation is not None
        try:
            self.lead.begin(self.digest, fresh=self._fresh, speculates=speculates)
            self._fresh = False
            events = super().step()
        except RankError as error:
            raise self.lead.reason(error) from error
        drawn = array("q", (n for e in events for n in (e.sequence.id, e.token_id)))
        self.digest = crc32(drawn.tobytes(), self.digest)
        return events

    def logits(
        self,
        token_ids: Items[int],
        adapter: str | None = None,
        num_prompt: int | None = None,
        source: Items[int] | None = None,
    ) -> torch.Tensor:
        """Compute logits on all ranks; see ``Engine.logits``."""
        self.lead.tell("logits", token_ids, adapter, num_prompt, source)
        try:
            return super().logits(token_ids, adapter, num_prompt, source)
        except RankError as error:
            raise self.lead.reason(error) from error
        except Exception as error:
            self.mark(error)
            raise
