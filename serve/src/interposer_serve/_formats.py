"""Format answers as OpenAI's chat and completion APIs do, whole and in chunks."""

from __future__ import annotations

import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from interposer_engine import Delta, PromptLogprob

_json = json.JSONEncoder(ensure_ascii=False).encode
compact_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_MARK = "\0"


Spell = Callable[[int], str]
"""Returns the text of one token; an incomplete character becomes U+FFFD."""


@dataclass(slots=True)
class Answer:
    """Tokens of an answer that have been generated so far."""

    index: int
    text: str = ""
    deltas: list[Delta] = field(default_factory=list)
    reason: str | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()

    def add(self, delta: Delta) -> None:
        """Append the next token."""
        self.text += delta.text
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.deltas.append(delta)
        self.reason = delta.finish_reason

    @property
    def token_ids(self) -> list[int]:
        """Token ids, including the end token if there is one."""
        return [delta.token_id for delta in self.deltas]


class Format(ABC):
    """Formatter of the answers to one request, for one of the two APIs.

    Attributes:
        id: Id of the response.
        kind: Value of the field ``object`` of a whole response; ``chunk_kind`` of a chunk.
        spell: Returns the text of one token.
        tells_logprobs: Whether the response has log probabilities.
    """

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: str, spell: Spell, tells_logprobs: bool) -> None:
        # uuid4 makes a system call, which would hand the GIL to the engine's thread for a while.
        self.id = f"{self.prefix}-{random.getrandbits(128):032x}"
        self.spell = spell
        self.tells_logprobs = tells_logprobs
        self._model = model
        self._created = int(time.time())
        self._frames: dict[int, tuple[str, str] | None] = {}

    def response(
        self, choices: list[dict[str, Any]], usage: dict[str, int] | None, *, chunk: bool = False
    ) -> dict[str, Any]:
        """Return a response or a chunk with some choices."""
        content: dict[str, Any] = {
            "id": self.id,
            "object": self.chunk_kind if chunk else self.kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        return content if usage is None else {**content, "usage": usage}

    def event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        """Return one server-sent event of a stream."""
        return f"data: {_json(self.response(choices, usage, chunk=True))}\n\n"

    def events(self, answer: Answer) -> str:
        """Return the events of an answer's newest token; "" if there are none yet."""
        if len(answer.deltas) == 1 or answer.reason is not None or self.tells_logprobs:
            return self._write_chunks(answer)
        # Events between the first and the last differ only in their text: reuse the rest.
        if answer.index not in self._frames:
            self._frames[answer.index] = self._frame(answer.index)
        text, frame = answer.deltas[-1].text, self._frames[answer.index]
        return f"{frame[0]}{_json(text)}{frame[1]}" if text and frame else ""

    def _write_chunks(self, answer: Answer) -> str:
        return "".join(self.event([choice]) for choice in self.chunks(answer))

    def _frame(self, index: int) -> tuple[str, str] | None:
        """Return the event text before and after a token's text.

        None if the format sends no text before the end of the answer.
        """
        delta = Delta(_MARK, 0, 0.0, None)
        chunks = self._write_chunks(Answer(index, _MARK, [delta, delta]))
        head, mark, tail = chunks.rpartition(_json(_MARK))
        return (head, tail) if mark else None

    @abstractmethod
    def choice(self, answer: Answer) -> dict[str, Any]:
        """Return the choice object of a whole answer."""

    @abstractmethod
    def chunks(self, answer: Answer) -> list[dict[str, Any]]:
        """Return the choice objects that the newest token adds to a stream; may be empty."""

    def prompt_logprobs(self, answer: Answer) -> list[dict[str, Any] | None]:
        """Return the log probabilities of the prompt's tokens in vLLM's format."""
        return [None, *map(self._of_prompt, answer.prompt_logprobs)]

    def _of_prompt(self, token: PromptLogprob) -> dict[str, Any]:
        entries = {
            token_id: (logprob, rank)
            for rank, (token_id, logprob) in enumerate(token.top_logprobs, 1)
        }
        entries[token.token_id] = (token.logprob, token.rank)
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": self.spell(token_id)}
            for token_id, (logprob, rank) in entries.items()
        }


def usage(num_prompt_tokens: int, num_new_tokens: int) -> dict[str, int]:
    """Return the usage object: the numbers of prompt and new tokens."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
    }


def with_parts(fields: dict[str, Any], parts: dict[str, str]) -> str:
    """Serialize an object to JSON that contains serialized values already.

    Args:
        fields: Values to serialize, by field name.
        parts: Serialized values by field name, which replace values of ``fields``.
    """
    members = [
        f"{compact_json(name)}:{parts.get(name) or compact_json(value)}"
        for name, value in fields.items()
    ]
    for name, part in parts.items():
        if name not in fields:
            members.append(f"{compact_json(name)}:{part}")
    return "{" + ",".join(members) + "}"
