"""The tokens of a request as text, as they come and when all are there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from interposer_models._engine import sequence as sequences
from interposer_models._tokenizer import Detokenizer, TextTokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one request.

    Attributes:
        text: of the new tokens without an end token; empty where the model has no tokenizer.
        token_ids: new tokens, an ending one included.
        logprobs: natural-log probability of each, after penalties, biases and constraints, before
            temperature and truncation.
        finish_reason: ``"stop"`` for an end token, a stop text or a complete constraint,
            ``"length"`` for a limit, ``"constraint"`` where no token could follow though the text
            is incomplete.
        top_logprobs: ids and log probabilities of the likeliest tokens in place of each, where
            they were asked for; fewer where a constraint allows fewer.
        prompt_token_ids: the prompt.
        prompt_logprobs: of each of its tokens but the first, where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: sequences.FinishReason
    top_logprobs: tuple[sequences.TopLogprobs, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[sequences.PromptLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """The next token of a stream, with the text that it completes, perhaps none yet.

    Attributes:
        index: of the answer that it belongs to, where a request has several.
        prompt_logprobs: as those of a ``Completion``, with the first token of an answer.
    """

    text: str
    token_id: int
    logprob: float
    finish_reason: sequences.FinishReason | None
    top_logprobs: sequences.TopLogprobs = ()
    index: int = 0
    prompt_logprobs: tuple[sequences.PromptLogprob, ...] = ()


class Token(NamedTuple):
    """A generated token that is not detokenized yet."""

    token_id: int
    logprob: float
    top_logprobs: sequences.TopLogprobs
    finish_reason: sequences.FinishReason | None


class Stream:
    """A reader of a sequence, with the text so far, cut at the first stop text.

    It reads from the sequence, not from a step's events, because any request's step may compute
    tokens of all others. Who made it with ``LanguageModel.start`` calls ``lm.engine.step()``, and
    ``lm.engine.cancel(stream.sequence)`` when it has ended or is wanted no more.

    ``read`` is ``take`` and ``delta`` after each other. Where no text stops the request, another
    thread may call ``delta`` than the one that steps the engine and takes.

    Attributes:
        sequence: the request in the engine.
        index: of the answer, where a request has several.
        text: of the tokens that were read so far.
        stopped: whether a stop text was found.
    """

    def __init__(
        self, sequence: sequences.Sequence, tokenizer: TextTokenizer, index: int = 0
    ) -> None:
        self.sequence = sequence
        self.index = index
        self.text = ""
        self.stopped = False
        self._num_read = 0
        self._sent = 0
        self._told_prompt = False
        self._detokenizer = Detokenizer(tokenizer)

    @property
    def ended(self) -> bool:
        """Say whether the last token was read."""
        return self._reason() is not None

    @property
    def num_unread(self) -> int:
        """Return how many computed tokens were not read."""
        return len(self.sequence.output) - self._num_read

    def read(self) -> Delta:
        """Take the sequence's next token and return the text that it adds."""
        return self.delta(self.take())

    def take(self) -> Token:
        """Take the sequence's next token, for ``delta`` to make a text of."""
        sequence, place = self.sequence, self._num_read
        likely = sequence.top_logprobs[place] if sequence.top_logprobs else ()
        self._num_read += 1
        return Token(sequence.output[place], sequence.logprobs[place], likely, self._reason())

    def delta(self, token: Token) -> Delta:
        """Return the text that a token adds to the text of the tokens before it."""
        token_id, logprob, likely, reason = token
        if reason is not None and self.sequence.has_end_token:
            self.text += self._detokenizer.rest()
        else:
            self.text += self._detokenizer.push(token_id, last=reason is not None)
        stops = self.sequence.params.stop
        if found := [at for stop in stops if (at := self.text.find(stop)) >= 0]:
            self.text = self.text[: min(found)]
            self.stopped, reason = True, "stop"
        end = len(self.text) if reason is not None else self._safe_end()
        new, self._sent = self.text[self._sent : end], max(self._sent, end)
        if self._told_prompt or self.sequence.params.prompt_logprobs is None:
            return Delta(new, token_id, logprob, reason, likely, self.index)
        self._told_prompt = True
        return Delta(new, token_id, logprob, reason, likely, self.index, self._prompt_logprobs)

    def completion(self) -> Completion:
        """Return everything that was produced.

        Raises: the error that ended the request.
        """
        if self.sequence.error is not None:
            raise self.sequence.error
        reason = self._reason()
        assert reason is not None
        sequence = self.sequence
        # A step may have computed tokens behind a stop text.
        read = slice(self._num_read)
        told = tuple(sequence.output[read]), tuple(sequence.logprobs[read]), reason
        likely, prompt = tuple(sequence.top_logprobs[read]), sequence.source or sequence.prompt
        return Completion(self.text, *told, likely, tuple(prompt), self._prompt_logprobs)

    @property
    def _prompt_logprobs(self) -> tuple[sequences.PromptLogprob, ...]:
        return tuple(self.sequence.prompt_logprobs)

    def _reason(self) -> sequences.FinishReason | None:
        if self.stopped:
            return "stop"
        return None if self.num_unread else self.sequence.finish_reason

    def _safe_end(self) -> int:
        """Return the end of the text that no stop text can still reach back into."""
        stops = self.sequence.params.stop
        longest = max(map(len, stops), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in stops):
                return len(self.text) - length
        return len(self.text)
