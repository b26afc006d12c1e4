"""Answers as OpenAI's two interfaces tell them, whole and in chunks."""

from __future__ import annotations

import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from interposer_models import Delta, PromptLogprob

_json = json.JSONEncoder(ensure_ascii=False).encode
compact_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_MARK = "\0"


Spell = Callable[[int], str]
"""Returns the own text of a token; a part of a character shows as U+FFFD."""


@dataclass(slots=True)
class Answer:
    """The part of an answer that is there."""

    index: int
    text: str = ""
    deltas: list[Delta] = field(default_factory=list)
    reason: str | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()

    def add(self, delta: Delta) -> None:
        """Take the next token."""
        self.text += delta.text
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.deltas.append(delta)
        self.reason = delta.finish_reason

    @property
    def token_ids(self) -> list[int]:
        """The tokens, an ending one included."""
        return [delta.token_id for delta in self.deltas]


class Format(ABC):
    """One of the interfaces, for one request.

    Attributes:
        id: of the response.
        kind: the word for a whole response; chunks have their own.
    """

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: str, spell: Spell, tells_logprobs: bool) -> None:
        # Not from the system: a call of it would let the engine have the interpreter for a while.
        self.id = f"{self.prefix}-{random.getrandbits(128):032x}"
        self.spell = spell
        self.tells_logprobs = tells_logprobs
        self._model = model
        self._created = int(time.time())
        self._frames: dict[int, tuple[str, str] | None] = {}

    def response(
        self, choices: list[dict[str, Any]], usage: dict[str, int] | None, *, chunk: bool = False
    ) -> dict[str, Any]:
        """Return the object around choices."""
        told: dict[str, Any] = {
            "id": self.id,
            "object": self.chunk_kind if chunk else self.kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        return told if usage is None else {**told, "usage": usage}

    def event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        """Return an event of a stream."""
        return f"data: {_json(self.response(choices, usage, chunk=True))}\n\n"

    def events(self, answer: Answer) -> str:
        """Return the events that tell the newest token of an answer; perhaps none yet."""
        if len(answer.deltas) == 1 or answer.reason is not None or self.tells_logprobs:
            return self._written(answer)
        # Of a token in between, all but the text is what it was for the one before.
        if answer.index not in self._frames:
            self._frames[answer.index] = self._frame(answer.index)
        text, frame = answer.deltas[-1].text, self._frames[answer.index]
        return f"{frame[0]}{_json(text)}{frame[1]}" if text and frame else ""

    def _written(self, answer: Answer) -> str:
        return "".join(self.event([choice]) for choice in self.chunks(answer))

    def _frame(self, index: int) -> tuple[str, str] | None:
        """Return what stands around a text in between; None where texts are told in the end."""
        delta = Delta(_MARK, 0, 0.0, None)
        written = self._written(Answer(index, _MARK, [delta, delta]))
        head, mark, tail = written.rpartition(_json(_MARK))
        return (head, tail) if mark else None

    @abstractmethod
    def choice(self, answer: Answer) -> dict[str, Any]:
        """Return a whole answer."""

    @abstractmethod
    def chunks(self, answer: Answer) -> list[dict[str, Any]]:
        """Return what the newest token of an answer adds to a stream; perhaps nothing yet."""

    def prompt_logprobs(self, answer: Answer) -> list[dict[str, Any] | None]:
        """Return the log probabilities of the tokens of a prompt, as vLLM tells them."""
        return [None, *map(self._of_prompt, answer.prompt_logprobs)]

    def _of_prompt(self, token: PromptLogprob) -> dict[str, Any]:
        likely = {
            each: (logprob, rank) for rank, (each, logprob) in enumerate(token.top_logprobs, 1)
        }
        told = {**likely, token.token_id: (token.logprob, token.rank)}
        return {
            str(each): {"logprob": logprob, "rank": rank, "decoded_token": self.spell(each)}
            for each, (logprob, rank) in told.items()
        }


def usage(num_prompt_tokens: int, num_new_tokens: int) -> dict[str, int]:
    """Return the tokens that a request took."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
    }


def with_parts(fields: dict[str, Any], parts: dict[str, str]) -> str:
    """Return an object as JSON, some of whose fields are JSON already."""
    own = [
        f"{compact_json(name)}:{parts.get(name) or compact_json(value)}"
        for name, value in fields.items()
    ]
    more = [f"{compact_json(name)}:{part}" for name, part in parts.items() if name not in fields]
    return "{" + ",".join([*own, *more]) + "}"
