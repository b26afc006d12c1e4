"""The state of one request in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from interposer_models._engine.constraints import Matcher
from interposer_models._engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "constraint", "cancelled", "error"]
TopLogprobs = tuple[tuple[int, float], ...]
"""Ids of likely tokens with their natural-log probabilities, the likeliest first."""


class PromptLogprob(NamedTuple):
    """A token of a prompt, as the model predicts it from those before it.

    Attributes:
        logprob: natural logarithm, of the model's own logits.
        rank: 1 where no token is likelier.
        top_logprobs: ids and log probabilities of the likeliest tokens in its place, as many as
            were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top_logprobs: TopLogprobs = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt, output and cache state of one request.

    Attributes:
        num_computed: tokens whose keys and values are in the cache.
        num_shared: first tokens of these that were there already when it began.
        seed: of this request's noise, drawn if the parameters name none.
        pages: cache pages that it holds in each pool, in order.
        page_keys: of the beginning and of whole pages, see ``page_keys``; none where the sequence
            shares no pages.
        borders: tokens after which its state is to be kept for others.
        state_tokens: that its state was computed from; -1 where guesses are among them.
        source: tokens that an encoder reads; none where the model has no encoder.
        source_pages: of the cache, with what layers read of the source.
        state_slot: row of the states that it holds; -1 while it has none.
        adapter: the version of its adapter, as ``StepAdapters`` counts them; None without one.
        matcher: of its constraint, which is where its output is; None without one.
        top_logprobs: of each token of the output, where the parameters ask for them.
        prompt_logprobs: of the prompt from its second token on, as far as they are known; likewise.
        error: of the finish reason ``"error"``.
        has_end_token: whether the last token of the output ended it, and is no part of the text.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_computed: int = 0
    num_shared: int = 0
    pages: list[list[int]] = field(default_factory=lambda: [[]])
    page_keys: list[bytes] = field(default_factory=list)
    borders: list[int] = field(default_factory=list)
    state_tokens: int = 0
    source: list[int] = field(default_factory=list)
    source_pages: list[int] = field(default_factory=list)
    state_slot: int = -1
    adapter: int | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    has_end_token: bool = False
    matcher: Matcher | None = None
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def num_untold(self) -> int:
        """Return how many tokens of the prompt want a log probability that is not known yet."""
        if self.params.prompt_logprobs is None:
            return 0
        return len(self.prompt) - 1 - len(self.prompt_logprobs)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the tokens at positions ``start`` to ``stop - 1`` of prompt and output."""
        split = len(self.prompt)
        if start >= split:
            return self.output[start - split : stop - split]
        return self.prompt[start:stop] + self.output[: max(0, stop - split)]


@dataclass(frozen=True, slots=True)
class Event:
    """A new token of a sequence, with its natural-log probability."""

    sequence: Sequence
    token_id: int
    logprob: float
