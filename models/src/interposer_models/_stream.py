"""The tokens of a request as text, as they come and when all are there."""

from __future__ import annotations

from dataclasses import dataclass

from interposer_models._engine import sequence as sequences
from interposer_models._tokenizer import Detokenizer, TextTokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one request.

    Attributes:
        text: of the new tokens; empty where the model has no tokenizer.
        token_ids: new tokens, an ending one included.
        logprobs: natural-log probability of each, after penalties, biases and constraints, before
            temperature and truncation.
        finish_reason: ``"stop"`` for an end token, a stop text or a complete constraint,
            ``"length"`` for a limit, ``"constraint"`` where no token could follow though the text
            is incomplete.
        top_logprobs: ids and log probabilities of the likeliest tokens in place of each, where
            they were asked for; fewer where a constraint allows fewer.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: sequences.FinishReason
    top_logprobs: tuple[sequences.TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """The next token of a stream, with the text that it completes, perhaps none yet."""

    text: str
    token_id: int
    logprob: float
    finish_reason: sequences.FinishReason | None
    top_logprobs: sequences.TopLogprobs = ()


class Stream:
    """A reader of a sequence, with the text so far, cut at the first stop text.

    It reads from the sequence, not from a step's events, because any request's step may compute
    tokens of all others. Who made it with ``LanguageModel.start`` calls ``lm.engine.step()``, and
    ``lm.engine.cancel(stream.sequence)`` when it has ended or is wanted no more.

    Attributes:
        sequence: the request in the engine.
        text: what was read so far.
        stopped: whether a stop text was found.
    """

    def __init__(self, sequence: sequences.Sequence, tokenizer: TextTokenizer) -> None:
        self.sequence = sequence
        self.text = ""
        self.stopped = False
        self._num_read = 0
        self._sent = 0
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
        """Take the sequence's next token and return what it adds to the text."""
        token_id = self.sequence.output[self._num_read]
        logprob = self.sequence.logprobs[self._num_read]
        top = self.sequence.top_logprobs
        likely = top[self._num_read] if top else ()
        self._num_read += 1
        self.text += self._detokenizer.push(token_id, last=self.ended)
        found = [at for stop in self.sequence.params.stop if (at := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
        end = len(self.text) if self.ended else self._safe_end()
        new, self._sent = self.text[self._sent : end], max(self._sent, end)
        return Delta(new, token_id, logprob, self._reason(), likely)

    def completion(self) -> Completion:
        """Return everything that was produced."""
        reason = self._reason()
        assert reason is not None
        sequence = self.sequence
        # A step may have computed tokens behind a stop text.
        read = slice(self._num_read)
        told = tuple(sequence.output[read]), tuple(sequence.logprobs[read]), reason
        return Completion(self.text, *told, tuple(sequence.top_logprobs[read]))

    def _reason(self) -> sequences.FinishReason | None:
        if self.stopped:
            return "stop"
        return None if self.num_unread else self.sequence.finish_reason

    def _safe_end(self) -> int:
        """Return the end of the text that no stop text can still reach back into."""
        longest = max(map(len, self.sequence.params.stop), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self.sequence.params.stop):
                return len(self.text) - length
        return len(self.text)
