"""Anthropic's Messages API: ``/v1/messages``, translated to a chat and back.

Source: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isnan
from sys import float_info
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, WithJsonSchema

from interposer_engine.answers import CallPart, Part, ReasoningPart, TextPart, ToolCall
from interposer_serve._answer import Answer, Usage
from interposer_serve._attachments import (
    MESSAGES_FORM,
    MESSAGES_SCHEMAS,
    Attachment,
    joined_contents,
)
from interposer_serve._errors import ERROR_FORMATS, ApiError, ErrorFormat, shown
from interposer_serve._format import Format, LargeFields, new_id, to_json
from interposer_serve._requests import (
    FAIL_FAST,
    Body,
    BodyPart,
    CacheSalt,
    ChatBody,
    check_tool_types,
)
from interposer_serve._turns import joined_turns

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_INVALID = "invalid_request_error"
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Anthropic's clients send the request again without a thread if they get this code.
_NO_THREADS = "thread_unsupported_request"
# Models are trained with three levels.
_EFFORTS = {"xhigh": "high", "max": "high"}
_TEXT = {"type": "string"}
_BLOCK_FIELDS: dict[str, dict[str, Any]] = {
    "text": {"text": _TEXT},
    "thinking": {"thinking": _TEXT},
    "tool_use": {"id": _TEXT, "name": _TEXT, "input": {"type": "object"}},
    "tool_result": {"tool_use_id": _TEXT},
}
_BLOCK_SCHEMAS = [
    {
        "type": "object",
        "required": ["type", *fields],
        "properties": {"type": {"const": kind}, **fields},
    }
    for kind, fields in _BLOCK_FIELDS.items()
]
_BLOCK_SCHEMAS += MESSAGES_SCHEMAS
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": _BLOCK_SCHEMAS}}]},
    },
}
_BLOCKS = "'text', 'tool_use', 'tool_result' or 'thinking'"


class Tool(BodyPart):
    """A function that the model can call."""

    name: str
    input_schema: dict[str, Any]
    description: str = ""
    type: Literal["custom"] = "custom"
    strict: bool = False
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool = False

    @property
    def function(self) -> dict[str, Any]:
        """The tool in the format of chat templates."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ToolChoice(BodyPart):
    """Which of the tools the answer must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @property
    def choice(self) -> Any:
        """The field ``tool_choice`` of a chat request."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type


class Thinking(BodyPart):
    """Switch for the reasoning before the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(BodyPart):
    """JSON schema that the text of the answer must match."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")

    @property
    def response_format(self) -> dict[str, Any]:
        """The field ``response_format`` of a chat request."""
        return {"type": self.type, "json_schema": {"schema": self.json_schema}}


class OutputConfig(BodyPart):
    """Form of the answer, and how much the model reasons before it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None


class _Chat(ChatBody):
    """A chat request that names the fields of Anthropic's API in errors."""

    own_names: ClassVar = {"stop": "stop_sequences", "response_format": "output_config"}


class TokenCountBody(Body):
    """Request body of ``/v1/messages/count_tokens``."""

    attachment_form = MESSAGES_FORM

    messages: Annotated[
        list[Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]], Field(min_length=1), FAIL_FAST
    ] = Field(description="a list of messages with role and content")
    system: str | Annotated[list[dict[str, Any]], FAIL_FAST] = Field(
        "", description="a text or a list of text blocks"
    )
    tools: Annotated[list[Tool], FAIL_FAST] = Field(
        [], description="a list of tools with name and input_schema"
    )
    tool_choice: ToolChoice | None = Field(
        None, description="an object with the type 'auto', 'any', 'tool' or 'none'"
    )
    thinking: Thinking | None = Field(
        None, description="an object with the type 'enabled', 'disabled' or 'adaptive'"
    )
    # Counting encodes the pictures of the messages, whose vectors are cached.
    cache_salt: CacheSalt = ""
    # These fields change no token here: prompts are cached by their content, and no tool runs in
    # the server.
    cache_control: dict[str, Any] | None = Field(None, description="an object")
    context_management: dict[str, Any] | None = Field(None, description="an object")
    output_config: OutputConfig | None = Field(
        None,
        description="{'effort': 'low', 'medium', 'high', 'xhigh' or 'max', "
        "'format': {'type': 'json_schema', 'schema': {...}}}",
    )

    @classmethod
    def read(cls, body: dict[str, Any]) -> Self:
        """Validate a parsed JSON object, and return the request body.

        Raises: ApiError: a field is unknown, unsupported or out of range.
        """
        check_tool_types(body.get("tools"), ("custom",))
        return super().read(body)

    def chat(self) -> ChatBody:
        """Return the equivalent chat request.

        Raises: ApiError: a message has a block that the model cannot read.
        """
        return _Chat.read(self._chat_fields())

    def _chat_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*self._chat_messages()],
            "cache_salt": self.cache_salt,
        }
        if self.tools:
            fields["tools"] = [tool.function for tool in self.tools]
        if self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.choice
        fields["chat_template_kwargs"] = self._template_variables()
        return fields

    def _template_variables(self) -> dict[str, Any]:
        """Return the variables that say how much the model reasons; templates ignore unknown ones.

        Clients set the effort for all models, so a template without the variable is no error.
        """
        variables: dict[str, Any] = {}
        kind = "adaptive" if self.thinking is None else self.thinking.type
        if kind != "adaptive":
            variables |= dict.fromkeys(("enable_thinking", "thinking"), kind == "enabled")
        effort = None if self.output_config is None else self.output_config.effort
        if effort is not None and kind != "disabled":
            variables["reasoning_effort"] = _EFFORTS.get(effort, effort)
        return variables

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if system := _text("system", self.system):
            messages.append({"role": "system", "content": system})
        for index, message in enumerate(self.messages):
            messages.extend(_chat_messages(f"messages[{index}]", message))
        return [*joined_turns(messages)]


class MessagesBody(TokenCountBody):
    """Request body of ``/v1/messages``."""

    max_tokens: int = Field(ge=1, description="an integer of at least 1")
    stop_sequences: Annotated[list[str], FAIL_FAST] = Field(
        [], description="a list of up to 16 texts"
    )
    stream: bool = Field(False, description="true or false")
    temperature: float | None = Field(None, description="a number from 0 to 1")
    top_p: float | None = Field(None, description="a number above 0, up to 1")
    top_k: int | None = Field(None, description="0 or -1, or a positive integer")
    metadata: dict[str, Any] | None = Field(None, description="an object")
    service_tier: Literal["auto", "standard_only"] = Field(
        "auto", description="'auto' or 'standard_only'"
    )

    thread: dict[str, Any] | None = Field(None, description="null")

    def _chat_fields(self) -> dict[str, Any]:
        if self.thread is not None:
            raise ApiError(
                400,
                f"thread is {shown(self.thread)}, but this server stores no messages. Try: all "
                "messages, without thread",
                param="thread",
                code=_NO_THREADS,
            )
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        fields = {**super()._chat_fields(), **{name: getattr(self, name) for name in names}}
        if self.stop_sequences:
            fields["stop"] = self.stop_sequences
        if self.output_config is not None and self.output_config.format is not None:
            fields["response_format"] = self.output_config.format.response_format
        return fields


def _chat_messages(path: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the chat messages of a message: each result of a tool becomes a message."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise _invalid(f"{path}.role is {shown(role)}; allowed is 'user' or 'assistant'")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        allowed = "a text or a list of blocks"
        raise _invalid(f"{path}.content is {shown(content)}; allowed is {allowed}")
    texts, reasoning = list[str | list[Any]](), list[str]()
    calls = list[dict[str, Any]]()
    results = list[dict[str, Any]]()
    for index, block in enumerate(blocks):
        place = f"{path}.content[{index}]"
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case Attachment() if role == "user":
                texts.append([block])
            case {"type": "thinking", "thinking": str(text)}:
                reasoning.append(text)
            case {"type": "redacted_thinking"}:
                pass  # encrypted by another server, so unreadable here
            case {
                "type": "tool_use",
                "id": str(call_id),
                "name": str(name),
                "input": dict(values),
            }:
                function = {"name": name, "arguments": values}
                calls.append({"id": call_id, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                result = _result(f"{place}.content", block.get("content"))
                results.append({"role": "tool", "tool_call_id": call_id, "content": result})
            case _:
                raise _invalid(f"{place} is {shown(block)}; allowed is a block of type {_BLOCKS}")
    if results and not texts:
        return results
    chat_message: dict[str, Any] = {"role": role, "content": joined_contents(texts, "")}
    if reasoning:
        chat_message["reasoning_content"] = "".join(reasoning)
    if calls:
        chat_message["tool_calls"] = calls
    return [*results, chat_message]


def _result(path: str, value: Any) -> str | list[Any]:
    """Return the content of a tool's result: a text, or a list of parts if there are pictures."""
    if isinstance(value, list) and any(isinstance(block, Attachment) for block in value):
        return joined_contents(
            [[block] if isinstance(block, Attachment) else _text(path, [block]) for block in value],
            "\n",
        )
    return _text(path, value)


def _text(path: str, value: Any) -> str:
    """Return the text of a list of text blocks, of a text, or of nothing."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        blocks = [block for block in value if isinstance(block, dict)]
        values = [block.get("text") for block in blocks if block.get("type") == "text"]
        texts = [text for text in values if isinstance(text, str)]
        if len(texts) == len(value):
            return "\n".join(texts)
    raise _invalid(f"{path} is {shown(value)}; allowed is a text or a list of text blocks")


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, param=message.partition("[")[0].partition(" ")[0])


class MessagesFormat(Format):
    """Formats the responses of ``/v1/messages``."""

    def __init__(self, body: MessagesBody, decode: Callable[[list[int]], str]) -> None:
        """Create the formatter of one request.

        Args:
            decode: Returns the text of tokens, to find out which stop text ended the answer.
        """
        super().__init__()
        self._id = new_id("msg_", 24)
        self._model = body.model
        self._stops = body.stop_sequences
        self._decode = decode
        self._num_blocks = 0
        self._open: type[Part] | int | None = None

    def response(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Return the fields of a whole response, without the blocks of the content."""
        (answer,) = answers
        return {**self._message(_usage(usage)), **self._end(answer)}

    def large_fields(self, answers: Sequence[Answer]) -> LargeFields:
        """Return the blocks of the content."""
        blocks: list[Callable[[], Any]] = []
        for part in answers[0].parsed.parts:
            match part:
                case TextPart(text):
                    blocks.append(partial(_text_block, text))
                case ReasoningPart(text):
                    blocks.append(partial(_thinking_block, text))
                case ToolCall(name, arguments, call_id):
                    blocks.append(partial(_call_block, call_id, name, arguments))
        if not blocks:  # an empty answer is an empty text
            blocks.append(partial(_text_block, ""))
        return {"content": blocks}

    def _message(self, usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _end(self, answer: Answer) -> dict[str, Any]:
        """Return the fields that say why the answer ended."""
        reason = answer.finish_reason or ""
        stop = None
        if reason == "stop" and self._stops:
            text = self._decode([delta.token_id for delta in answer.deltas])
            removed_text = text[len(answer.text) :]
            stop = next((stop for stop in self._stops if removed_text.startswith(stop)), None)
        stop_reason = "stop_sequence" if stop else _STOP_REASONS.get(reason, "end_turn")
        return {"stop_reason": stop_reason, "stop_sequence": stop}

    def first_events(self, num_prompt_tokens: int) -> str:
        """Return the event with the empty message and the number of prompt tokens."""
        message = self._message(_usage(Usage(num_prompt_tokens)))
        return _event({"type": "message_start", "message": message})

    def events(self, answer: Answer, parts: Sequence[Part]) -> str:
        """Return the events of the newest token, which start a block if its kind changes."""
        if len(parts) == 1 and type(parts[0]) is self._open:
            return super().events(answer, parts)
        return self.write_events(answer, parts)

    def write_events(self, answer: Answer, parts: Sequence[Part]) -> str:
        """Return the events that start, extend and stop blocks of the content."""
        return "".join(event for part in parts for event in self._part_events(part))

    def _part_events(self, part: Part) -> list[str]:
        events = []
        match part:
            case TextPart(text):
                key: type[Part] | int = TextPart
                block = _text_block("")
                delta = {"type": "text_delta", "text": text}
            case ReasoningPart(text):
                key, block = ReasoningPart, _thinking_block("")
                delta = {"type": "thinking_delta", "thinking": text}
            case CallPart(index, name, call_id, arguments):
                key, block = index, _call_block(call_id, name, "{}")
                delta = {"type": "input_json_delta", "partial_json": arguments}
        if key != self._open:
            events.append(self._stop_block())
            self._open = key
            start = {"type": "content_block_start", "index": self._num_blocks}
            events.append(_event({**start, "content_block": block}))
        if not isinstance(part, CallPart) or part.arguments:
            change = {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
            events.append(_event(change))
        return events

    def _stop_block(self) -> str:
        if self._open is None:
            return ""
        self._open = None
        self._num_blocks += 1
        # The index of a frame is that of its block.
        self._frames.clear()
        return _event({"type": "content_block_stop", "index": self._num_blocks - 1})

    def last_events(self, answers: Sequence[Answer], usage: Usage) -> str:
        """Return the events with the stop reason and the number of tokens, and of the end."""
        if not self._num_blocks and self._open is None:  # an empty answer is an empty text
            self._open = TextPart
            first = {"type": "content_block_start", "index": 0}
            start = _event({**first, "content_block": _text_block("")})
        else:
            start = ""
        end = self._end(answers[0])
        change = {"type": "message_delta", "delta": end, "usage": _usage(usage)}
        return start + self._stop_block() + _event(change) + _event({"type": "message_stop"})

    def error_event(self, error: ApiError) -> bytes:
        """Return the last event of a stream that an error ended."""
        # ASCII, because the message may quote half of a surrogate pair.
        return f"event: error\ndata: {json.dumps(error_body(error))}\n\n".encode()


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error response in Anthropic's format."""
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else _INVALID)
    content: dict[str, Any] = {"type": kind, "message": str(error)}
    if error.code == _NO_THREADS:
        content["details"] = {"error_code": error.code, "unsupported": [error.param]}
    return {"type": "error", "error": content}


ERROR_FORMATS["/v1/messages"] = ErrorFormat(
    "MessagesError",
    {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
    error_body,
)


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_new_tokens,
    }


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking_block(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _call_block(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    call_id = call_id or new_id("toolu_", 24)
    parsed = json.loads(arguments, parse_float=_finite, parse_constant=_finite)
    return {"type": "tool_use", "id": call_id, "name": name, "input": parsed}


def _finite(text: str) -> float | None:
    """Return a number that JSON can hold: a model can write 1e999, which is infinite as a float."""
    value = float(text)
    return None if isnan(value) else min(max(value, -float_info.max), float_info.max)


def _event(content: Mapping[str, Any]) -> str:
    return f"event: {content['type']}\ndata: {to_json(content)}\n\n"
