"""Response formats of OpenAI's chat and completion APIs, for whole and streamed answers.

An answer is the list of its deltas so far.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from interposer.errors import RequestError
from interposer_engine import Delta, PromptLogprob, TextTokenizer
from interposer_serve._errors import ApiError

_json = json.JSONEncoder(ensure_ascii=False).encode
compact_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_MARK = "\0"
_PARTIAL = "\N{REPLACEMENT CHARACTER}"


Spell = Callable[[int], str]
"""Returns the text of one token; an incomplete character becomes U+FFFD."""


class Format(ABC):
    """Base of formatters that write the answers to one request in the format of an API.

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
        """Return a response, or a chunk of a stream, with some choice objects."""
        content: dict[str, Any] = {
            "id": self.id,
            "object": self.chunk_kind if chunk else self.kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        return content if usage is None else {**content, "usage": usage}

    def event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        """Return a server-sent event with some choice objects."""
        return f"data: {_json(self.response(choices, usage, chunk=True))}\n\n"

    def events(self, answer: Sequence[Delta]) -> str:
        """Return the server-sent events of an answer's newest token; "" if there are none yet."""
        newest = answer[-1]
        if len(answer) == 1 or newest.finish_reason is not None or self.tells_logprobs:
            return self._write_chunks(answer)
        # Events between the first and the last differ only in their text: reuse the rest.
        if newest.index not in self._frames:
            self._frames[newest.index] = self._frame(newest.index)
        frame = self._frames[newest.index]
        return f"{frame[0]}{_json(newest.text)}{frame[1]}" if newest.text and frame else ""

    def _write_chunks(self, answer: Sequence[Delta]) -> str:
        return "".join(self.event([choice]) for choice in self.chunks(answer))

    def _frame(self, index: int) -> tuple[str, str] | None:
        """Return the text of a stream event before and after the text of a token.

        None if the format sends no text before the end of the answer.
        """
        chunks = self._write_chunks([Delta(_MARK, 0, 0.0, None, index=index)] * 2)
        head, mark, tail = chunks.rpartition(_json(_MARK))
        return (head, tail) if mark else None

    @abstractmethod
    def choice(self, answer: Sequence[Delta]) -> dict[str, Any]:
        """Return the choice object of a complete answer."""

    @abstractmethod
    def chunks(self, answer: Sequence[Delta]) -> list[dict[str, Any]]:
        """Return the choice objects that the newest token adds to a stream, possibly none."""

    def prompt_logprobs(self, answer: Sequence[Delta]) -> list[dict[str, Any] | None]:
        """Return the log probabilities of the prompt tokens in vLLM's format."""
        return [None, *map(self._of_prompt, answer[0].prompt_logprobs)]

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


def _text(answer: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in answer)


class ChatFormat(Format):
    """Formats the responses of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        spell: Spell,
        tells_logprobs: bool,
        parse: Callable[[list[int]], dict[str, Any] | None] | None,
    ) -> None:
        """Create the formatter of one chat request.

        Args:
            model: Name of the model in responses.
            spell: Returns the text of one token.
            tells_logprobs: Whether the response has log probabilities.
            parse: Parses the tokens of a complete answer that may call tools. A stream then sends
                such an answer only at the end. None if the request offers no tools.
        """
        super().__init__(model, spell, tells_logprobs)
        self._parse = parse

    def choice(self, answer: Sequence[Delta]) -> dict[str, Any]:
        """Return the choice object of a complete answer."""
        message = _answer_message(_text(answer), self._parsed(answer))
        is_call = answer[-1].finish_reason == "stop" and message.get("tool_calls")
        return {
            "index": answer[-1].index,
            "message": message,
            "logprobs": self._logprobs(answer),
            "finish_reason": "tool_calls" if is_call else answer[-1].finish_reason,
        }

    def chunks(self, answer: Sequence[Delta]) -> list[dict[str, Any]]:
        """Return the chunks of the newest token: role, text, and the finish reason at the end."""
        newest = answer[-1]
        reason: str | None = newest.finish_reason
        deltas: list[dict[str, Any]] = []
        if len(answer) == 1:
            deltas.append({"role": "assistant", "content": ""})
        if self._parse is None:
            if newest.text or self.tells_logprobs:
                deltas.append({"content": newest.text})
        # Only a complete answer can be parsed, so send text or calls at the end.
        elif reason is not None:
            choice = self.choice(answer)
            message, reason = choice["message"], choice["finish_reason"]
            calls = message.get("tool_calls", [])
            indexed_calls = [{"index": index, **call} for index, call in enumerate(calls)]
            del message["role"]  # sent in the first chunk
            deltas.append({**message, "tool_calls": indexed_calls} if indexed_calls else message)
        chunks = [self._chunk(newest.index, delta, None) for delta in deltas]
        if self.tells_logprobs and chunks:
            chunks[-1]["logprobs"] = self._logprobs([newest] if self._parse is None else answer)
        return chunks if reason is None else [*chunks, self._chunk(newest.index, {}, reason)]

    def _parsed(self, answer: Sequence[Delta]) -> dict[str, Any] | None:
        try:
            if self._parse is not None:
                return self._parse([delta.token_id for delta in answer])
        except RequestError:
            pass  # the answer does not match the response template, so send it as text
        return None

    @staticmethod
    def _chunk(index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        if not self.tells_logprobs:
            return None
        return {"content": [self._token(delta) for delta in deltas], "refusal": None}

    def _token(self, delta: Delta) -> dict[str, Any]:
        likely = [self._entry(*entry) for entry in delta.top_logprobs]
        return {**self._entry(delta.token_id, delta.logprob), "top_logprobs": likely}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.spell(token_id)
        # U+FFFD stands for an incomplete character, whose bytes are unknown here.
        token_bytes = None if _PARTIAL in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": token_bytes}


def template_messages(
    messages: list[dict[str, Any]], tokenizer: TextTokenizer
) -> list[dict[str, Any]]:
    """Convert a client's messages for the chat template: contents to text, arguments to objects.

    Raises: ApiError: the content has a part that is not text, or arguments are not valid JSON.
    """
    # Templates cannot handle null, which clients send as the content of messages with tool calls.
    filled = [
        {"content": "", **{name: value for name, value in message.items() if value is not None}}
        for message in messages
    ]
    try:
        plain = tokenizer.chat.plain(filled)
    except RequestError as error:
        raise ApiError(400, str(error), param="messages", code="not_honoured") from None
    for index, message in enumerate(plain):
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            path = f"messages[{index}].tool_calls"
            message["tool_calls"] = [_with_parsed_arguments(path, call) for call in calls]
    return plain


def _with_parsed_arguments(path: str, call: Any) -> Any:
    """Return a tool call with parsed arguments, which OpenAI's API sends as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        message = f"{path}: arguments are {function['arguments']!r:.100}; allowed is JSON"
        raise ApiError(400, message, param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _answer_message(text: str, parsed: dict[str, Any] | None) -> dict[str, Any]:
    """Return the assistant's message in OpenAI's format.

    Args:
        text: Text of the answer.
        parsed: The answer as parsed by the checkpoint's response template; None without one.
    """
    if parsed is None:
        return {"role": "assistant", "content": text}
    message: dict[str, Any] = {"role": "assistant", "content": parsed.get("content") or None}
    if parsed.get("thinking"):
        message["reasoning_content"] = parsed["thinking"]
    if calls := parsed.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    else:
        message["content"] = message["content"] or ""
    return message


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": function.get("name", ""), "arguments": text},
    }


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt that a completion response repeats before the answer.

    Attributes:
        pieces: Pieces of the text, one per token.
    """

    text: str
    token_ids: Sequence[int]
    pieces: Sequence[str]


@dataclass(slots=True)
class _Logprobs:
    """The lists of the response field ``logprobs``, with one item per token."""

    tokens: list[str]
    values: list[float | None]
    likely: list[dict[str, float] | None]
    offsets: list[int]


class CompletionFormat(Format):
    """Formats the responses of ``/v1/completions``."""

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
        """Create the formatter of one completion request.

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

    def choice(self, answer: Sequence[Delta]) -> dict[str, Any]:
        """Return the choice object of a complete answer."""
        choice = self._choice(answer, is_first=True)
        if self._tells_prompt:
            choice["prompt_logprobs"] = self.prompt_logprobs(answer)
        return choice

    def chunks(self, answer: Sequence[Delta]) -> list[dict[str, Any]]:
        """Return the chunk of the newest token; an empty list if the token adds no text."""
        newest, is_first = answer[-1], len(answer) == 1
        has_content = newest.text or newest.finish_reason is not None or self.tells_logprobs
        if not (has_content or (is_first and self._echoes)):
            return []
        return [self._choice([newest], is_first=is_first)]

    def _choice(self, deltas: Sequence[Delta], *, is_first: bool) -> dict[str, Any]:
        """Return the choice object for a part of an answer; the first part includes the echo."""
        text, index = _text(deltas), deltas[-1].index
        echo = self._echoes[index] if self._echoes else None
        logprobs = _Logprobs([], [], [], [])
        if echo is not None and is_first:
            text = echo.text + text
            if self.tells_logprobs:
                self._add_prompt(logprobs, echo, deltas[0])
        if self.tells_logprobs:
            start = 0 if echo is None else len(echo.text)
            for delta in deltas:
                offset = start + delta.offset
                self._add(logprobs, delta.token_id, delta.logprob, delta.top_logprobs, offset)
        content = {
            "tokens": logprobs.tokens,
            "token_logprobs": logprobs.values,
            "top_logprobs": logprobs.likely if self._num_likely else None,
            "text_offset": logprobs.offsets,
        }
        return {
            "index": index,
            "text": text,
            "logprobs": content if self.tells_logprobs else None,
            "finish_reason": deltas[-1].finish_reason,
        }

    def _add_prompt(self, logprobs: _Logprobs, echo: Echo, first: Delta) -> None:
        offset = 0
        for piece in echo.pieces:
            logprobs.offsets.append(offset)
            offset += len(piece)
        # The model predicts no first token, so it has no log probability.
        logprobs.tokens.append(self.spell(echo.token_ids[0]))
        logprobs.values.append(None)
        logprobs.likely.append(None)
        for token in first.prompt_logprobs:
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
        """Return the log probabilities of the top tokens and the sampled token, by token text."""
        logprobs: dict[str, float] = {}
        for token_id, value in likely:
            # Several tokens can have the text U+FFFD: keep the most likely one.
            logprobs.setdefault(self.spell(token_id), value)
        logprobs.setdefault(text, logprob)
        return logprobs


def usage(num_prompt_tokens: int, num_new_tokens: int) -> dict[str, int]:
    """Return the usage object, with the numbers of prompt tokens and new tokens."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
    }


def with_parts(fields: dict[str, Any], parts: dict[str, str]) -> str:
    """Return the JSON text of an object of which some parts are already serialized.

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
