"""Tokens of a request as text, one by one and as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from interposer_models._engine import sequence as sequences
from interposer_models._tokenizer import Detokenizer, TextTokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one request.

    Attributes:
        text: Text of the new tokens without an end token; empty if the model has no tokenizer.
        token_ids: New tokens, including an end token.
        logprobs: Natural-log probability of each new token, after penalties, biases and
            constraints, before temperature and truncation.
        finish_reason: ``"stop"`` for an end token, a stop text or a complete constraint;
            ``"length"`` for a limit; ``"constraint"`` if no token could follow although the text is
            incomplete.
        top_logprobs: Ids and log probabilities of the likeliest tokens at each position, if
            requested; fewer if a constraint allows fewer.
        prompt_token_ids: The prompt.
        prompt_logprobs: Log probabilities of the prompt tokens from the second on, if requested.
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
    """The next token of a stream, with the completed text, which may be empty.

    Attributes:
        index: Index of the answer, if the request has several.
        prompt_logprobs: As in ``Completion``, with the first token of an answer.
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
    """Reads the tokens of a sequence, and the text so far, cut at the first stop text.

    A stream reads the sequence instead of the events of steps, because a step of any request may
    compute tokens of this one. If you created the stream with ``LanguageModel.start``, call
    ``lm.engine.step()`` to compute tokens, and ``lm.engine.cancel(stream.sequence)`` at the end.

    ``read`` is ``take`` followed by ``delta``. If the request has no stop texts, ``delta`` may run
    in another thread than ``take`` and the engine.

    Attributes:
        sequence: The request in the engine.
        index: Index of the answer, if the request has several.
        text: Text of the tokens that were read so far.
        stopped: Whether a stop text was found.
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
        self._sent_prompt_logprobs = False
        self._detokenizer = Detokenizer(tokenizer)

    @property
    def ended(self) -> bool:
        """Whether the last token was read."""
        return self._finish_reason() is not None

    @property
    def num_unread(self) -> int:
        """Number of computed tokens that were not read yet."""
        return len(self.sequence.output) - self._num_read

    def read(self) -> Delta:
        """Take the next token of the sequence, and return the token with the added text."""
        return self.delta(self.take())

    def take(self) -> Token:
        """Take the next token of the sequence, without text; see ``delta``."""
        sequence, index = self.sequence, self._num_read
        top_logprobs = sequence.top_logprobs[index] if sequence.top_logprobs else ()
        self._num_read += 1
        return Token(
            sequence.output[index], sequence.logprobs[index], top_logprobs, self._finish_reason()
        )

    def delta(self, token: Token) -> Delta:
        """Return a token with the text that the token adds."""
        token_id, logprob, top_logprobs, reason = token
        if reason is not None and self.sequence.has_end_token:
            self.text += self._detokenizer.rest()
        else:
            self.text += self._detokenizer.push(token_id, last=reason is not None)
        stops = self.sequence.params.stop
        if stop_positions := [
            position for stop in stops if (position := self.text.find(stop)) >= 0
        ]:
            self.text = self.text[: min(stop_positions)]
            self.stopped, reason = True, "stop"
        # Hold back text that may become part of a stop text.
        end = len(self.text) if reason is not None else self._safe_end()
        new_text, self._sent = self.text[self._sent : end], max(self._sent, end)
        if self._sent_prompt_logprobs or self.sequence.params.prompt_logprobs is None:
            return Delta(new_text, token_id, logprob, reason, top_logprobs, self.index)
        self._sent_prompt_logprobs = True
        return Delta(
            new_text, token_id, logprob, reason, top_logprobs, self.index, self._prompt_logprobs
        )

    def completion(self) -> Completion:
        """Return the completion of an ended request.

        Raises: Exception: the error that ended the request.
        """
        if self.sequence.error is not None:
            raise self.sequence.error
        reason = self._finish_reason()
        assert reason is not None
        sequence = self.sequence
        # A step may have computed tokens after a stop text.
        read_tokens = slice(self._num_read)
        return Completion(
            self.text,
            tuple(sequence.output[read_tokens]),
            tuple(sequence.logprobs[read_tokens]),
            reason,
            tuple(sequence.top_logprobs[read_tokens]),
            tuple(sequence.source or sequence.prompt),
            self._prompt_logprobs,
        )

    @property
    def _prompt_logprobs(self) -> tuple[sequences.PromptLogprob, ...]:
        return tuple(self.sequence.prompt_logprobs)

    def _finish_reason(self) -> sequences.FinishReason | None:
        if self.stopped:
            return "stop"
        return None if self.num_unread else self.sequence.finish_reason

    def _safe_end(self) -> int:
        """Return the length of the text that cannot be part of a stop text any more."""
        stops = self.sequence.params.stop
        longest = max(map(len, stops), default=1) - 1
        # Hold back the longest end of the text that a stop text starts with.
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in stops):
                return len(self.text) - length
        return len(self.text)
