"""Answers as OpenAI's two interfaces tell them, whole and in chunks."""

from __future__ import annotations

import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from interposer.errors import RequestError
from interposer_models import Delta
from interposer_serve._generation import Piece
from interposer_serve._messages import answer_message

_json = json.JSONEncoder(ensure_ascii=False).encode
_MARK = "\0"
_PARTIAL = "\N{REPLACEMENT CHARACTER}"


@dataclass(slots=True)
class Answer:
    """The part of an answer that is there."""

    index: int
    text: str = ""
    pieces: list[Piece] = field(default_factory=list)
    reason: str | None = None

    def add(self, piece: Piece) -> None:
        """Take the next token."""
        self.text += piece.delta.text
        self.pieces.append(piece)
        self.reason = piece.delta.finish_reason

    @property
    def token_ids(self) -> list[int]:
        """The tokens, an ending one included."""
        return [piece.delta.token_id for piece in self.pieces]


class Format(ABC):
    """One of the interfaces, for one request.

    Attributes:
        id: of the response.
        kind: the word for a whole response; chunks have their own.
    """

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: str, tells_logprobs: bool) -> None:
        # Not from the system: a call of it would let the engine have the interpreter for a while.
        self.id = f"{self.prefix}-{random.getrandbits(128):032x}"
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
        if len(answer.pieces) == 1 or answer.reason is not None or self.tells_logprobs:
            return self._written(answer)
        # Of a token in between, all but the text is what it was for the one before.
        if answer.index not in self._frames:
            self._frames[answer.index] = self._frame(answer.index)
        text, frame = answer.pieces[-1].delta.text, self._frames[answer.index]
        return f"{frame[0]}{_json(text)}{frame[1]}" if text and frame else ""

    def _written(self, answer: Answer) -> str:
        return "".join(self.event([choice]) for choice in self.chunks(answer))

    def _frame(self, index: int) -> tuple[str, str] | None:
        """Return what stands around a text in between; None where texts are told in the end."""
        piece = Piece(index, Delta(_MARK, 0, 0.0, None), None)
        written = self._written(Answer(index, _MARK, [piece, piece]))
        head, mark, tail = written.rpartition(_json(_MARK))
        return (head, tail) if mark else None

    @abstractmethod
    def choice(self, answer: Answer) -> dict[str, Any]:
        """Return a whole answer."""

    @abstractmethod
    def chunks(self, answer: Answer) -> list[dict[str, Any]]:
        """Return what the newest token of an answer adds to a stream; perhaps nothing yet."""


class CompletionFormat(Format):
    """``/v1/completions``."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, model: str, tells_logprobs: bool, fronts: list[str] | None = None) -> None:
        """Tell answers of ``model``.

        Args:
            fronts: a text for each answer that stands in front of it; without, none does.
        """
        super().__init__(model, tells_logprobs)
        self._fronts = fronts or []

    def choice(self, answer: Answer) -> dict[str, Any]:
        """Return a whole answer."""
        text = self._front(answer) + answer.text
        return self._choice(answer.index, text, answer.pieces, 0, answer.reason)

    def _front(self, answer: Answer) -> str:
        return self._fronts[answer.index] if self._fronts else ""

    def chunks(self, answer: Answer) -> list[dict[str, Any]]:
        """Return the text of the newest token, and how the answer ended, if it has."""
        newest = answer.pieces[-1]
        text = newest.delta.text
        offset = len(answer.text) - len(text)
        if len(answer.pieces) == 1:
            text = self._front(answer) + text
        if not text and answer.reason is None and not self.tells_logprobs:
            return []
        return [self._choice(answer.index, text, [newest], offset, answer.reason)]

    def _choice(
        self, index: int, text: str, pieces: list[Piece], offset: int, reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self.tells_logprobs:
            offsets = []
            for piece in pieces:
                offsets.append(offset)
                offset += len(piece.delta.text)
            logprobs = {
                "tokens": [piece.token for piece in pieces],
                "token_logprobs": [piece.delta.logprob for piece in pieces],
                "top_logprobs": [_likely(p) for p in pieces]
                if any(p.likely for p in pieces)
                else None,
                "text_offset": offsets,
            }
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class ChatFormat(Format):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        tells_logprobs: bool,
        parse: Callable[[list[int]], dict[str, Any] | None] | None,
    ) -> None:
        """Tell answers of ``model``.

        Args:
            parse: returns the message that tokens are, for answers that may call tools; they are
                told when they are whole.
        """
        super().__init__(model, tells_logprobs)
        self._parse = parse

    def choice(self, answer: Answer) -> dict[str, Any]:
        """Return a whole answer."""
        message = answer_message(answer.text, self._parsed(answer))
        return {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer.pieces),
            "finish_reason": _reason(answer, message),
        }

    def chunks(self, answer: Answer) -> list[dict[str, Any]]:
        """Return the role, the text of the newest token, and how the answer ended, if it has."""
        newest, ended = answer.pieces[-1], answer.reason is not None
        deltas: list[dict[str, Any]] = []
        reason = answer.reason
        if len(answer.pieces) == 1:
            deltas.append({"role": "assistant", "content": ""})
        if self._parse is None:
            if newest.delta.text or self.tells_logprobs:
                deltas.append({"content": newest.delta.text})
        elif ended:
            message = self.choice(answer)["message"]
            reason = _reason(answer, message)
            calls = message.get("tool_calls", [])
            numbered = [{"index": index, **call} for index, call in enumerate(calls)]
            del message["role"]
            deltas.append({**message, "tool_calls": numbered} if numbered else message)
        told = [self._chunk(answer.index, delta, None) for delta in deltas]
        if self.tells_logprobs and told:
            told[-1]["logprobs"] = self._logprobs(
                [newest] if self._parse is None else answer.pieces
            )
        return [*told, self._chunk(answer.index, {}, reason)] if ended else told

    def _parsed(self, answer: Answer) -> dict[str, Any] | None:
        try:
            return None if self._parse is None else self._parse(answer.token_ids)
        except RequestError:
            return None  # the model did not write what its template describes; a text it is

    @staticmethod
    def _chunk(index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any] | None:
        if not self.tells_logprobs:
            return None
        return {"content": [_token(piece) for piece in pieces], "refusal": None}


def _likely(piece: Piece) -> dict[str, float]:
    """Return log probabilities by the texts of tokens, the chosen one's among them."""
    told = zip(piece.likely, piece.delta.top_logprobs, strict=True)
    found: dict[str, float] = {}
    for text, (_, logprob) in told:
        found.setdefault(text, logprob)  # parts of characters have one text together
    found.setdefault(piece.token or "", piece.delta.logprob)
    return found


def _token(piece: Piece) -> dict[str, Any]:
    told = zip(piece.likely, piece.delta.top_logprobs, strict=True)
    likely = [_spelled(text, logprob) for text, (_, logprob) in told]
    return {**_spelled(piece.token or "", piece.delta.logprob), "top_logprobs": likely}


def _spelled(text: str, logprob: float) -> dict[str, Any]:
    # The bytes of a part of a character are not known from its text.
    known = None if _PARTIAL in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": known}


def _reason(answer: Answer, message: dict[str, Any]) -> str | None:
    calls = answer.reason == "stop" and message.get("tool_calls")
    return "tool_calls" if calls else answer.reason


def usage(num_prompt_tokens: int, num_new_tokens: int) -> dict[str, int]:
    """Return the tokens that a request took."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
    }
