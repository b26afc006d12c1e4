"""The front door: text in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interposer import Placement, Resolver
from interposer.errors import RequestError
from interposer_models import sequence as sequences
from interposer_models.engine import Engine
from interposer_models.sampling_params import SamplingParams
from interposer_models.tokenizer import Detokenizer, TextTokenizer

__all__ = ["Completion", "Delta", "LanguageModel"]

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a request produced.

    Attributes:
        token_ids: new tokens, an ending one included.
        logprobs: natural-log probability of each, after penalties, before temperature and
            truncation.
        finish_reason: ``"stop"`` for an end token or stop text, ``"length"`` for a limit.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: sequences.FinishReason


@dataclass(frozen=True, slots=True)
class Delta:
    """The next token of a stream, with the text that it completes, perhaps none yet."""

    text: str
    token_id: int
    logprob: float
    finish_reason: sequences.FinishReason | None


class LanguageModel:
    """A loaded model. ``interposer.explain`` says what it was built from. Not thread-safe."""

    def __init__(
        self, engine: Engine, tokenizer: TextTokenizer, resolver: Resolver, placement: Placement
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.resolver = resolver
        self.placement = placement

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **settings: Any,
    ) -> list[Completion]:
        """Return the completion of each prompt, in order; all run as one continuous batch.

        Args:
            prompts: a text, or a sequence of texts or of lists of token ids.
            params: for all prompts, or one for each.
            **settings: fields of ``SamplingParams``, instead of ``params``.
        Raises: RequestError: a prompt or parameter is unusable; then none was run.
        """
        texts: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        chosen = _params(params, settings, len(texts))
        streams: list[_Stream] = []
        try:
            for prompt, own in zip(texts, chosen, strict=True):
                streams.append(self._start(prompt, own))
            while not all(stream.ended for stream in streams):
                self._advance(streams)
        finally:
            for stream in streams:
                self.engine.cancel(stream.sequence)
        return [stream.completion() for stream in streams]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any
    ) -> Iterator[Delta]:
        """Yield the completion of ``prompt`` token by token; closing the iterator cancels it.

        Raises: RequestError: at the call, before the first token.
        """
        stream = self._start(prompt, _params(params, settings, 1)[0])
        return self._deltas(stream)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits after every token, ``[T, V]`` float32."""
        return self.engine.logits(token_ids)

    def _start(self, prompt: Prompt, params: SamplingParams) -> _Stream:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return _Stream(self.engine.add(token_ids, params), self.tokenizer)

    def _deltas(self, stream: _Stream) -> Iterator[Delta]:
        try:
            while not stream.ended:
                yield from self._advance([stream])
        finally:
            self.engine.cancel(stream.sequence)

    def _advance(self, streams: Sequence[_Stream]) -> list[Delta]:
        by_id = {stream.sequence.id: stream for stream in streams}
        deltas = []
        for event in self.engine.step():
            stream = by_id.get(event.sequence.id)
            if stream is not None:
                deltas.append(stream.push(event.token_id, event.logprob))
                if stream.ended:
                    self.engine.cancel(stream.sequence)
        return deltas


class _Stream:
    """A sequence with its text so far, cut at the first stop text."""

    def __init__(self, sequence: sequences.Sequence, tokenizer: TextTokenizer) -> None:
        self.sequence = sequence
        self.text = ""
        self.stopped = False
        self._sent = 0
        self._detokenizer = Detokenizer(tokenizer)

    @property
    def ended(self) -> bool:
        return self.stopped or self.sequence.finish_reason is not None

    def push(self, token_id: int, logprob: float) -> Delta:
        """Take the sequence's next token and return what it adds to the text."""
        finished = self.sequence.finish_reason is not None
        self.text += self._detokenizer.push(token_id, last=finished)
        found = [at for stop in self.sequence.params.stop if (at := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
        end = len(self.text) if self.ended else self._safe_end()
        new, self._sent = self.text[self._sent : end], max(self._sent, end)
        return Delta(new, token_id, logprob, self._reason())

    def completion(self) -> Completion:
        """Return everything that was produced."""
        reason = self._reason()
        assert reason is not None
        sequence = self.sequence
        return Completion(self.text, tuple(sequence.output), tuple(sequence.logprobs), reason)

    def _reason(self) -> sequences.FinishReason | None:
        return "stop" if self.stopped else self.sequence.finish_reason

    def _safe_end(self) -> int:
        """Return the end of the text that no stop text can still reach back into."""
        for length in range(max(map(len, self.sequence.params.stop), default=1) - 1, 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self.sequence.params.stop):
                return len(self.text) - length
        return len(self.text)


def _params(
    params: SamplingParams | Sequence[SamplingParams] | None, settings: dict[str, Any], count: int
) -> list[SamplingParams]:
    if params is not None and settings:
        raise RequestError(f"Give either params or single settings, not both: {sorted(settings)}")
    if params is None:
        return [SamplingParams(**settings)] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} params were given for {count} prompts")
    return list(params)
