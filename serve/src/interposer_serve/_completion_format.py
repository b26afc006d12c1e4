"""Answers of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from interposer_models import Delta
from interposer_serve._formats import Answer, Format, Spell


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that stands in front of its answers.

    Attributes:
        pieces: of the text, by the tokens that complete them.
    """

    text: str
    token_ids: Sequence[int]
    pieces: Sequence[str]


@dataclass(slots=True)
class _Logprobs:
    """The columns of ``logprobs``."""

    tokens: list[str]
    values: list[float | None]
    likely: list[dict[str, float] | None]
    offsets: list[int]


class CompletionFormat(Format):
    """``/v1/completions``."""

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
        """Tell answers of ``model``.

        Args:
            spell: see ``Spell``.
            num_likely: of the likeliest tokens that are told with each; None tells no logprobs.
            echoes: for each answer what stands in front of it; without, nothing does.
            tells_prompt: tell the log probabilities of the prompt beside each answer.
        """
        super().__init__(model, spell, num_likely is not None)
        self._num_likely = num_likely or 0
        self._echoes = echoes
        self._tells_prompt = tells_prompt

    def choice(self, answer: Answer) -> dict[str, Any]:
        """Return a whole answer."""
        told = self._choice(answer, answer.text, answer.deltas, 0, is_first=True)
        if self._tells_prompt:
            told["prompt_logprobs"] = self.prompt_logprobs(answer)
        return told

    def chunks(self, answer: Answer) -> list[dict[str, Any]]:
        """Return the text of the newest token, and how the answer ended, if it has."""
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
        """Return a part of an answer, with the prompt before the first one.

        Args:
            offset: characters of the answer before the part.
            is_first: no part stands before it.
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
        told = {
            "tokens": logprobs.tokens,
            "token_logprobs": logprobs.values,
            "top_logprobs": logprobs.likely if self._num_likely else None,
            "text_offset": logprobs.offsets,
        }
        return {
            "index": answer.index,
            "text": text,
            "logprobs": told if self.tells_logprobs else None,
            "finish_reason": answer.reason,
        }

    def _add_prompt(self, logprobs: _Logprobs, echo: Echo, answer: Answer) -> None:
        offset = 0
        for piece in echo.pieces:
            logprobs.offsets.append(offset)
            offset += len(piece)
        # Nothing stands before the first token that could predict it.
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
        """Return log probabilities by the texts of tokens, the chosen one's among them."""
        found: dict[str, float] = {}
        for each, value in likely:
            found.setdefault(self.spell(each), value)  # parts of characters have one text together
        found.setdefault(text, logprob)
        return found
