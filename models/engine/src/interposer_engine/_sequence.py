"""The state of one request in the engine: tokens, pages and progress."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from interposer_engine._constrained_decoding.constraints import Matcher
from interposer_engine._encoder_features import FeatureSource
from interposer_engine._encoder_pages import EncodedInput
from interposer_engine._prompt_runs import Run, without_runs
from interposer_engine._sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "constraint", "cancelled", "error"]
TopLogprobs = tuple[tuple[int, float], ...]
"""Ids of the likeliest tokens with their natural-log probabilities, the likeliest first."""


class PromptLogprob(NamedTuple):
    """A prompt token with its log probability, given the preceding tokens.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of the probability by the model's own logits.
        rank: 1 if no token is likelier.
        top_logprobs: Ids and log probabilities of the likeliest tokens at the position, as many as
            requested.
    """

    token_id: int
    logprob: float
    rank: int
    top_logprobs: TopLogprobs = ()


@dataclass(slots=True, eq=False)
class TokenSequence:
    """Prompt, output and cache pages of one request.

    Attributes:
        id: Number of the sequence in the engine.
        prompt: Token ids of the prompt, virtual ones for the tokens of runs; see ``Run``.
        params: Sampling parameters.
        seed: Seed of the request's noise; drawn if the parameters have none.
        runs: Runs of the prompt whose vectors an encoder has computed, in order.
        output: New tokens so far.
        logprobs: Log probability of each new token.
        num_computed: Number of tokens with keys and values in the cache.
        num_shared: Number of first tokens that were cached when the sequence started.
        pages: Cache pages of the sequence in each pool, in order.
        page_keys: Key of the empty prefix and of each whole page; see ``page_keys``. Empty without
            a prefix cache.
        checkpoint_positions: Numbers of tokens after which the recurrent state is saved for other
            sequences.
        state_tokens: Number of tokens in the recurrent state; -1 if the state includes draft
            tokens.
        source: Token ids or features of the encoder input; empty if the model has no encoder.
        source_key: Digest of the encoder input.
        encoded: Cache pages of the encoder input; None while the sequence has none.
        state_slot: Row of the state tensors; -1 while the sequence has none.
        adapter: Version number of the adapter in ``StepAdapters``; None without one.
        finish_reason: Why the sequence has ended; None before the end.
        error: The error, if the finish reason is ``"error"``.
        has_end_token: Whether the last output token ended the sequence and is not part of the text.
        matcher: Matcher of the constraint, advanced to the end of the output; None without one.
        top_logprobs: Likeliest tokens at each output position, if requested.
        prompt_logprobs: Log probabilities of the prompt tokens from the second on, as far as
            computed, if requested.
        no_speech_probability: Probability of the token that says that the sound holds no speech;
            None before the first token, and without rules for a transcript.
        unread: Events that the reader of the sequence has not taken yet, from the steps of any
            thread; None if only the caller of ``Engine.step`` gets the events.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    runs: tuple[Run, ...] = ()
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_computed: int = 0
    num_shared: int = 0
    pages: list[list[int]] = field(default_factory=lambda: [[]])
    page_keys: list[bytes] = field(default_factory=list)
    checkpoint_positions: list[int] = field(default_factory=list)
    state_tokens: int = 0
    source: list[int] | FeatureSource = field(default_factory=list)
    source_key: bytes = b""
    encoded: EncodedInput | None = None
    state_slot: int = -1
    adapter: int | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    has_end_token: bool = False
    matcher: Matcher | None = None
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    no_speech_probability: float | None = None
    unread: deque[Event] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def source_pages(self) -> list[int]:
        """Cache pages of the encoder input; empty while the sequence has none."""
        return [] if self.encoded is None else self.encoded.pages

    @property
    def request_ids(self) -> list[int]:
        """Token ids of the encoder input, or else of the prompt without the tokens of runs."""
        if isinstance(self.source, FeatureSource):
            return self.prompt
        return self.source or self.prompt_token_ids

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt without the tokens of runs."""
        return without_runs(self.prompt, self.runs) if self.runs else self.prompt

    @property
    def num_encoded_tokens(self) -> dict[str, int]:
        """Number of prompt tokens in runs of each kind, such as ``"image"``."""
        counts: dict[str, int] = {}
        for run in self.runs:
            counts[run.input.kind] = counts.get(run.input.kind, 0) + len(run.input)
        return counts

    @property
    def next_mutual_run(self) -> Run | None:
        """The run to compute next whose tokens attend in both directions; None if there is none."""
        for run in self.runs:
            if run.input.attends_both_ways and run.stop > self.num_computed:
                return run
        return None

    @property
    def num_missing_logprobs(self) -> int:
        """Number of prompt tokens whose requested log probabilities are not computed yet."""
        if self.params.prompt_logprobs is None:
            return 0
        # The first prompt token has no prediction.
        return len(self.prompt) - 1 - len(self.prompt_logprobs)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the tokens of prompt and output at the positions ``start`` to ``stop - 1``."""
        split = len(self.prompt)
        if start >= split:
            return self.output[start - split : stop - split]
        return self.prompt[start:stop] + self.output[: max(0, stop - split)]


class Event(NamedTuple):
    """A new token of a sequence, with log probabilities and finish reason.

    Attributes:
        sequence: The sequence.
        token_id: The token, which is not part of the output if the finish reason is ``"error"``.
        logprob: Natural logarithm of the probability.
        top_logprobs: Likeliest tokens at the position, if requested.
        finish_reason: Why the sequence ends with the token; None if it continues.
    """

    sequence: TokenSequence
    token_id: int
    logprob: float
    top_logprobs: TopLogprobs = ()
    finish_reason: FinishReason | None = None
