"""The response format of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from interposer_engine import Delta
from interposer_serve._formats import Answer, Format, Spell


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that the response repeats before the answer.

    Attributes:
        pieces: Pieces of the text, one per token.
    """

    text: str
    token_ids: Sequence[int]
    pieces: Sequence[str]


@dataclass(slots=True)
class _Logprobs:
    """The lists in the field ``logprobs``, with one item per token."""

    tokens: list[str]
    values: list[float | None]
    likely: list[dict[str, float] | None]
    offsets: list[int]


class CompletionFormat(Format):
    """Formatter for the responses of ``/v1/completions``."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        model: str,
        spell: Spell,
        num_likely: int | None,
        echoes: Sequence[Echo] = (),
        tells_prompt: bool = False,
    ) -> None:
        """Create the formatter of one request.

        Args:
            model: Name of the model in responses.
            spell: Returns the text of one token.
            num_likely: Number of most likely tokens to report per token; None for no logprobs.
            echoes: Prompt to repeat before each answer; empty for none.
            tells_prompt: Whether each answer has the log probabilities of its prompt.
        """
        super().__init__(model, spell, num_likely is not None)
        self._num_likely = num_likely or 0
        self._echoes = echoes
        self._tells_prompt = tells_prompt

    def choice(self, answer: Answer) -> dict[str, Any]:
        """Return the choice object of a complete answer."""
        choice = self._choice(answer, answer.text, answer.deltas, 0, is_first=True)
        if self._tells_prompt:
            choice["prompt_logprobs"] = self.prompt_logprobs(answer)
        return choice

    def chunks(self, answer: Answer) -> list[dict[str, Any]]:
        """Return the chunk for the newest token; empty if the token adds no text."""
        newest, text = answer.deltas[-1], answer.deltas[-1].text
        is_first = len(answer.deltas) == 1
        if not (
            text or (is_first and self._echoes) or answer.reason is not None or self.tells_logprobs
        ):
            return []
        offset = len(answer.text) - len(text)
        return [self._choice(answer, text, [newest], offset, is_first=is_first)]

    def _choice(
        self, answer: Answer, text: str, deltas: list[Delta], offset: int, *, is_first: bool
    ) -> dict[str, Any]:
        """Return the choice object of a part of an answer; the first part includes the echo.

        Args:
            offset: Number of characters of the answer before this part.
            is_first: Whether this is the first part.
        """
        echo = self._echoes[answer.index] if self._echoes else None
        logprobs = _Logprobs([], [], [], [])
        if echo is not None:
            offset += len(echo.text)
            if is_first:
                text = echo.text + text
                if self.tells_logprobs:
                    self._add_prompt(logprobs, echo, answer)
        if self.tells_logprobs:
            for delta in deltas:
                self._add(logprobs, delta.token_id, delta.logprob, delta.top_logprobs, offset)
                offset += len(delta.text)
        content = {
            "tokens": logprobs.tokens,
            "token_logprobs": logprobs.values,
            "top_logprobs": logprobs.likely if self._num_likely else None,
            "text_offset": logprobs.offsets,
        }
        return {
            "index": answer.index,
            "text": text,
            "logprobs": content if self.tells_logprobs else None,
            "finish_reason": answer.reason,
        }

    def _add_prompt(self, logprobs: _Logprobs, echo: Echo, answer: Answer) -> None:
        offset = 0
        for piece in echo.pieces:
            logprobs.offsets.append(offset)
            offset += len(piece)
        # The model predicts no first token, so it has no log probability.
        logprobs.tokens.append(self.spell(echo.token_ids[0]))
        logprobs.values.append(None)
        logprobs.likely.append(None)
        for token in answer.prompt_logprobs:
            self._add(logprobs, token.token_id, token.logprob, token.top_logprobs, None)

    def _add(
        self,
        logprobs: _Logprobs,
        token_id: int,
        logprob: float,
        likely: Sequence[tuple[int, float]],
        offset: int | None,
    ) -> None:
        text = self.spell(token_id)
        logprobs.tokens.append(text)
        logprobs.values.append(logprob)
        if self._num_likely:
            logprobs.likely.append(self._likely(text, logprob, likely[: self._num_likely]))
        if offset is not None:
            logprobs.offsets.append(offset)

    def _likely(
        self, text: str, logprob: float, likely: Iterable[tuple[int, float]]
    ) -> dict[str, float]:
        """Return log probabilities by token text, including the sampled token."""
        logprobs: dict[str, float] = {}
        for token_id, value in likely:
            # Several tokens can have the text U+FFFD: keep the most likely one.
            logprobs.setdefault(self.spell(token_id), value)
        logprobs.setdefault(text, logprob)
        return logprobs
