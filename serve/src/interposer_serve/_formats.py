"""Response formats of OpenAI's chat and completion APIs, for whole and streamed answers."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from interposer.errors import RequestError
from interposer_engine import Delta, PromptLogprob, TextTokenizer
from interposer_engine.answers import CallPart, Part, ReasoningPart, TextPart, ToolCall
from interposer_serve._answer import Answer, Usage
from interposer_serve._errors import ApiError
from interposer_serve._format import Format, LargeFields, new_id, to_json
from interposer_serve._reading import parse_within_limits

_PARTIAL = "\N{REPLACEMENT CHARACTER}"


Spell = Callable[[int], str]
"""Returns the text of one token; an incomplete character becomes U+FFFD."""


class OpenAIFormat(Format):
    """Base of the formats with choices.

    Attributes:
        id: Id of the response.
        kind: Value of the field ``object`` of a whole response; ``chunk_kind`` of a chunk.
        spell: Returns the text of one token.
        tells_logprobs: Whether the response has log probabilities.
        tells_usage: Whether the last chunk of a stream has the numbers of tokens.
    """

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(
        self, model: str, spell: Spell, *, tells_logprobs: bool, tells_usage: bool
    ) -> None:
        super().__init__()
        self.id = new_id(f"{self.prefix}-")
        self.spell = spell
        self.tells_logprobs = tells_logprobs
        self.tells_usage = tells_usage
        self.has_frames = not tells_logprobs
        self._model = model
        self._created = int(time.time())

    def response(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Return the fields of a whole response, without the choices."""
        return {**self._response(self.kind, []), "usage": self._usage(usage)}

    def large_fields(self, answers: Sequence[Answer]) -> LargeFields:
        """Return the choices."""
        return {"choices": [partial(self.choice, answer) for answer in answers]}

    def _response(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def write_events(self, answer: Answer, parts: Sequence[Part]) -> str:
        """Return one event for each chunk."""
        return "".join(self._event([choice]) for choice in self.chunks(answer, parts))

    def last_events(self, answers: Sequence[Answer], usage: Usage) -> str:
        """Return the event with the numbers of tokens, if requested, and the end of the stream."""
        last = self._event([], usage=self._usage(usage)) if self.tells_usage else ""
        return f"{last}data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **fields: Any) -> str:
        return f"data: {to_json({**self._response(self.chunk_kind, choices), **fields})}\n\n"

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """Return the usage object, with the numbers of tokens."""
        return {
            "prompt_tokens": usage.num_prompt_tokens,
            "completion_tokens": usage.num_new_tokens,
            "total_tokens": usage.num_prompt_tokens + usage.num_new_tokens,
            "prompt_tokens_details": {
                "cached_tokens": usage.num_cached_tokens,
                **usage.media_details,
            },
            "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        }

    @abstractmethod
    def choice(self, answer: Answer) -> dict[str, Any]:
        """Return the choice object of a complete answer."""

    @abstractmethod
    def chunks(self, answer: Answer, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Return the choice objects that the newest token adds to a stream, possibly none."""

    def prompt_logprobs(self, answer: Answer) -> list[dict[str, Any] | None]:
        """Return the log probabilities of the prompt tokens in vLLM's format."""
        return [None, *map(self._of_prompt, answer.deltas[0].prompt_logprobs)]

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


class ChatFormat(OpenAIFormat):
    """Formats the responses of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        spell: Spell,
        *,
        tells_logprobs: bool,
        tells_usage: bool,
        tells_prompt: bool,
    ) -> None:
        """Create the formatter of one chat request.

        Args:
            model: Name of the model in responses.
            spell: Returns the text of one token.
            tells_logprobs: Whether the response has log probabilities.
            tells_usage: Whether the last chunk of a stream has the numbers of tokens.
            tells_prompt: Whether the response has the log probabilities of the prompt.
        """
        super().__init__(model, spell, tells_logprobs=tells_logprobs, tells_usage=tells_usage)
        self._tells_prompt = tells_prompt

    def response(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Return the fields of a whole response, without the choices."""
        response = super().response(answers, usage)
        if self._tells_prompt:
            response["prompt_logprobs"] = self.prompt_logprobs(answers[0])
        return response

    def choice(self, answer: Answer) -> dict[str, Any]:
        """Return the choice object of a complete answer."""
        return {
            "index": answer.index,
            "message": _message(answer),
            "logprobs": self._logprobs(answer.deltas),
            "finish_reason": answer.finish_reason,
            **_note(answer),
        }

    def chunks(self, answer: Answer, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Return the chunks of the newest token: role, parts, and the finish reason at the end."""
        newest = answer.newest
        deltas = [*map(_delta, parts)]
        if self.tells_logprobs and not deltas:
            deltas.append({"content": ""})
        if len(answer.deltas) == 1:
            deltas.insert(0, {"role": "assistant", "content": ""})
        chunks = [self._chunk(newest.index, delta, None) for delta in deltas]
        if self.tells_logprobs:
            chunks[-1]["logprobs"] = self._logprobs([newest])
        if newest.finish_reason is not None:
            last = self._chunk(newest.index, {}, answer.finish_reason)
            chunks.append({**last, **_note(answer)})
        return chunks

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
    messages: list[dict[str, Any]], tokenizer: TextTokenizer, kinds: Collection[str]
) -> list[dict[str, Any]]:
    """Convert a client's messages for the chat template: parts of contents, arguments to objects.

    Args:
        messages: The messages, with ``Media`` in place of attachments.
        kinds: Kinds of media that the model takes.
    Raises: ApiError: the content has a part that is not text, or arguments are not valid JSON.
    """
    # Templates cannot handle null, which clients send as the content of messages with tool calls.
    filled = [
        {"content": "", **{name: value for name, value in message.items() if value is not None}}
        for message in messages
    ]
    try:
        plain = tokenizer.chat.plain(filled, kinds)
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
        arguments = parse_within_limits(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        message = f"{path}: arguments are {function['arguments']!r:.100}; allowed is JSON"
        raise ApiError(400, message, param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _message(answer: Answer) -> dict[str, Any]:
    """Return the assistant's message in OpenAI's format."""
    parsed = answer.parsed
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [_call(call) for call in parsed.calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id or new_id("call_", 24),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case TextPart(text):
            return {"content": text}
        case ReasoningPart(text):
            return {"reasoning_content": text}
        case CallPart(index, "", _, arguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
        case CallPart(index, name, call_id, arguments):
            return {"tool_calls": [{"index": index, **_call(ToolCall(name, arguments, call_id))}]}


def _note(answer: Answer) -> dict[str, str]:
    """Return the field that says why a tool call was not read, if one was not."""
    return {"note": answer.parsed.note} if answer.parsed.note else {}


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


class CompletionFormat(OpenAIFormat):
    """Formats the responses of ``/v1/completions``."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        model: str,
        spell: Spell,
        *,
        num_likely: int | None,
        tells_usage: bool,
        echoes: Sequence[Echo] = (),
        tells_prompt: bool = False,
        has_answer: bool = True,
    ) -> None:
        """Create the formatter of one completion request.

        Args:
            model: Name of the model in responses.
            spell: Returns the text of one token.
            num_likely: Number of most likely tokens to report per token; None for no logprobs.
            tells_usage: Whether the last chunk of a stream has the numbers of tokens.
            echoes: Prompt to repeat before each answer; empty for none.
            tells_prompt: Whether each answer has the log probabilities of its prompt.
            has_answer: Whether the response has the new tokens, and not only the prompt.
        """
        tells_logprobs = num_likely is not None
        super().__init__(model, spell, tells_logprobs=tells_logprobs, tells_usage=tells_usage)
        self._num_likely = num_likely or 0
        self._echoes = echoes
        self._tells_prompt = tells_prompt
        self._has_answer = has_answer

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return super()._usage(usage if self._has_answer else replace(usage, num_new_tokens=0))

    def choice(self, answer: Answer) -> dict[str, Any]:
        """Return the choice object of a complete answer."""
        choice = self._choice(answer.deltas, is_first=True)
        if self._tells_prompt:
            choice["prompt_logprobs"] = self.prompt_logprobs(answer)
        return choice

    def chunks(self, answer: Answer, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Return the chunk of the newest token; an empty list if the token adds no text."""
        newest, is_first = answer.newest, len(answer.deltas) == 1
        has_content = newest.text or newest.finish_reason is not None or self.tells_logprobs
        if not (has_content or (is_first and self._echoes)):
            return []
        return [self._choice([newest], is_first=is_first)]

    def _choice(self, deltas: Sequence[Delta], *, is_first: bool) -> dict[str, Any]:
        """Return the choice object for a part of an answer; the first part includes the echo."""
        index, new_tokens = deltas[-1].index, deltas if self._has_answer else []
        text = "".join(delta.text for delta in new_tokens)
        echo = self._echoes[index] if self._echoes else None
        logprobs = _Logprobs([], [], [], [])
        if echo is not None and is_first:
            text = echo.text + text
            if self.tells_logprobs:
                self._add_prompt(logprobs, echo, deltas[0])
        if self.tells_logprobs:
            start = 0 if echo is None else len(echo.text)
            for delta in new_tokens:
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
            "finish_reason": deltas[-1].finish_reason if self._has_answer else "length",
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
