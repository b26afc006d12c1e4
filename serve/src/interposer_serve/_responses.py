"""OpenAI's Responses API: ``/v1/responses``, translated to a chat and back.

Source: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, WithJsonSchema

from interposer_engine.answers import (
    CallPart,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
)
from interposer_serve._answer import Answer, Usage
from interposer_serve._attachments import (
    RESPONSES_FORM,
    RESPONSES_SCHEMAS,
    Attachment,
    joined_contents,
)
from interposer_serve._errors import ApiError, shown
from interposer_serve._format import Format, LargeFields, new_id, to_json
from interposer_serve._requests import (
    FAIL_FAST,
    Body,
    BodyPart,
    CacheSalt,
    ChatBody,
    ObjectOfTexts,
    check_tool_types,
)
from interposer_serve._turns import joined_turns

_ITEMS = "'message', 'function_call', 'function_call_output' or 'reasoning'"
_TEXT = {"type": "string"}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": _TEXT},
}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_PART, *RESPONSES_SCHEMAS]}}]}
_MESSAGE_ITEM = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": _CONTENT,
    },
}
_CALL_ITEM = {
    "type": "object",
    "required": ["type", "name", "arguments"],
    "properties": {
        "type": {"const": "function_call"},
        "name": _TEXT,
        "arguments": {"type": "string", "contentMediaType": "application/json"},
        "call_id": _TEXT,
    },
}
_OUTPUT_ITEM = {
    "type": "object",
    "required": ["type", "call_id", "output"],
    "properties": {
        "type": {"const": "function_call_output"},
        "call_id": _TEXT,
        "output": _CONTENT,
    },
}
_REASONING_ITEM = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"const": "reasoning"}},
}
_ITEM = {"anyOf": [_MESSAGE_ITEM, _CALL_ITEM, _OUTPUT_ITEM, _REASONING_ITEM]}
_FORMATS = (
    "{'format': {'type': 'text'}}, or with the type 'json_object', or "
    "{'format': {'type': 'json_schema', 'name': ..., 'schema': {...}}}"
)


class FunctionTool(BodyPart):
    """A function that the model can call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def function(self, namespace: str | None = None) -> dict[str, Any]:
        """Return the tool in the format of chat templates."""
        function: dict[str, Any] = {"name": _full_name(self.name, namespace)}
        function["parameters"] = self.parameters or {}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function}


class NamespaceTool(BodyPart):
    """Functions that the model can call, under a common name."""

    type: Literal["namespace"]
    name: str
    description: str = ""
    tools: Annotated[list[FunctionTool], FAIL_FAST]


class NamedTool(BodyPart):
    """Choice of the function that the answer must call."""

    type: Literal["function"]
    name: str


class Reasoning(BodyPart):
    """Amount of reasoning before the answer."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class _Chat(ChatBody):
    """A chat request that names the fields of the Responses API in errors."""

    own_names: ClassVar = {
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning",
        "response_format": "text",
    }


class ResponsesBody(Body):
    """Request body of ``/v1/responses``."""

    attachment_form = RESPONSES_FORM
    input: str | Annotated[list[Annotated[dict[str, Any], WithJsonSchema(_ITEM)]], FAIL_FAST] = (
        Field(description="a text or a list of items")
    )
    instructions: str | None = Field(None, description="a text")
    max_output_tokens: int | None = Field(None, ge=1, description="an integer of at least 1")
    temperature: float | None = Field(None, description="a number from 0 to 2")
    top_p: float | None = Field(None, description="a number above 0, up to 1")
    stream: bool = Field(False, description="true or false")
    tools: Annotated[
        list[Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]], FAIL_FAST
    ] = Field([], description="a list of tools of the type 'function' or 'namespace'")
    tool_choice: Literal["auto", "none", "required"] | NamedTool = Field(
        "auto", description="'auto', 'none', 'required' or {'type': 'function', 'name': ...}"
    )
    text: dict[str, Any] | None = Field(None, description=_FORMATS)
    reasoning: Reasoning | None = Field(None, description="an object with effort")
    previous_response_id: str | None = Field(None, description="the id of a stored response")
    store: bool = Field(True, description="true or false")
    metadata: ObjectOfTexts | None = Field(None, description="an object of texts")
    include: Annotated[list[Literal["reasoning.encrypted_content"]], FAIL_FAST] = Field(
        [], description="a list, empty or with 'reasoning.encrypted_content'"
    )
    truncation: Literal["disabled"] = Field("disabled", description="'disabled'")
    background: Literal[False] = Field(False, description="false")
    parallel_tool_calls: bool = Field(True, description="true or false")
    stream_options: dict[str, Any] | None = Field(None, description="an object")
    # prompt_cache_key is no salt: OpenAI's clients send it to route requests that share a prefix.
    cache_salt: CacheSalt = ""
    # Describes the client, as metadata does.
    client_metadata: dict[str, Any] | None = Field(None, description="an object")

    @classmethod
    def read(cls, body: dict[str, Any]) -> Self:
        """Validate a parsed JSON object, and return the request body.

        Raises: ApiError: a field is unknown, unsupported or out of range.
        """
        check_tool_types(body.get("tools"), ("function", "namespace"))
        return super().read(body)

    def chat(self, earlier_messages: Sequence[dict[str, Any]]) -> ChatBody:
        """Return the equivalent chat request.

        Args:
            earlier_messages: Chat messages of the previous response.
        Raises: ApiError: an item is not one that the model can read.
        """
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [
                *joined_turns([*self._instructions(), *earlier_messages, *self.input_messages()])
            ],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "cache_salt": self.cache_salt,
            "response_format": self._response_format(),
        }
        fields["tools"] = [tool.function(namespace) for namespace, tool in self._functions()]
        fields["tool_choice"] = self.tool_choice
        if isinstance(self.tool_choice, NamedTool):
            function = {"name": self.tool_choice.name}
            fields["tool_choice"] = {"type": "function", "function": function}
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        return _Chat.read(fields)

    def _functions(self) -> Iterator[tuple[str | None, FunctionTool]]:
        """Yield each function with the name of its namespace, or None without one."""
        for tool in self.tools:
            if isinstance(tool, NamespaceTool):
                yield from ((tool.name, function) for function in tool.tools)
            else:
                yield None, tool

    def names_in_namespaces(self) -> dict[str, dict[str, str]]:
        """Return the fields of a call that name a function of a namespace, by its full name."""
        return {
            _full_name(tool.name, namespace): {"name": tool.name, "namespace": namespace}
            for namespace, tool in self._functions()
            if namespace is not None
        }

    def _instructions(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.instructions}] if self.instructions else []

    def input_messages(self) -> list[dict[str, Any]]:
        """Return the input as chat messages.

        Raises: ApiError: an item is not one that the model can read.
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not self.input:
            raise ApiError(400, "input is []; allowed is a text or items", param="input")
        return chat_messages("input", self.input)

    def input_items(self) -> list[dict[str, Any]]:
        """Return the input as a list of items."""
        if isinstance(self.input, str):
            content = [{"type": "input_text", "text": self.input}]
            return [{"type": "message", "role": "user", "content": content}]
        return self.input

    def _response_format(self) -> dict[str, Any] | None:
        text = self.text or {}
        text_format = text.get("format", {"type": "text"})
        is_default = text.get("verbosity") in (None, "medium")
        if text.keys() <= {"format", "verbosity"} and is_default and isinstance(text_format, dict):
            match text_format:
                case {"type": "text" | "json_object"}:
                    return text_format
                case {"type": "json_schema", **schema}:
                    return {"type": "json_schema", "json_schema": schema}
        message = f"text is {shown(self.text)}; allowed is {_FORMATS}"
        raise ApiError(400, message, param="text", code="invalid_value")


def _full_name(name: str, namespace: str | None) -> str:
    """Return the name of a function for the model, which knows no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def chat_messages(path: str, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return items as chat messages; consecutive items of the assistant become one message.

    Args:
        path: Name of the field that holds the items, for errors.
    Raises: ApiError: an item is not one that the model can read.
    """
    messages: list[dict[str, Any]] = []
    texts: list[str] = []

    def assistant(*, is_new: bool = False) -> dict[str, Any]:
        if is_new or not messages or messages[-1]["role"] != "assistant":
            complete()
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    def complete() -> None:
        """Set the content of the last message, if it is one of the assistant."""
        if messages and messages[-1]["role"] == "assistant":
            messages[-1]["content"] = "".join(texts)
        texts.clear()

    for index, item in enumerate(items):
        place = f"{path}[{index}]"
        match item:
            case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
                complete()
                content = _content(f"{place}.output", output)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case {"type": "function_call", "name": str(name), "arguments": str(arguments)}:
                item_id, namespace = item.get("call_id"), item.get("namespace")
                if not isinstance(item_id, str | None) or not isinstance(namespace, str | None):
                    raise _invalid_item(place, item)
                if arguments and not _is_json(arguments):
                    message = f"{place}.arguments is {arguments!r:.100}; allowed is JSON"
                    raise ApiError(400, message, param="input", code="invalid_value")
                function = {"name": _full_name(name, namespace), "arguments": arguments}
                call = {"id": item_id, "type": "function", "function": function}
                assistant().setdefault("tool_calls", []).append(call)
            case {"type": "reasoning"}:
                item_content = item.get("content")
                parts: list[Any] = item_content if isinstance(item_content, list) else []
                pieces = [part.get("text") for part in parts if isinstance(part, dict)]
                if reasoning := "".join(piece for piece in pieces if isinstance(piece, str)):
                    assistant(is_new=True)["reasoning_content"] = reasoning
            case {"role": str(role), "content": content} if item.get("type", "message") == (
                "message"
            ):
                content = _content(f"{place}.content", content)
                if role == "assistant":
                    if not isinstance(content, str):
                        raise _invalid_item(place, item)
                    assistant()
                    texts.append(content)
                else:
                    complete()
                    messages.append({"role": role, "content": content})
            case _:
                raise _invalid_item(place, item)
    complete()
    return messages


def _invalid_item(path: str, item: Any) -> ApiError:
    message = f"{path} is {shown(item)}; allowed is an item of type {_ITEMS}"
    return ApiError(400, message, param="input", code="invalid_value")


def _content(path: str, content: Any) -> str | list[Any]:
    """Return the text of a content; a list of parts if there are pictures or sounds."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        message = f"{path} is {shown(content)}; allowed is a text or a list of parts"
        raise ApiError(400, message, param="input", code="invalid_value")
    texts: list[str | list[Any]] = []
    for index, part in enumerate(content):
        match part:
            case Attachment():
                texts.append([part])
            case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                message = (
                    f"{path}[{index}] is {shown(part)}, which the model cannot read; allowed is "
                    "a text, or parts of the type 'input_text' or 'output_text'"
                )
                raise ApiError(400, message, param="input", code="not_honoured")
    return joined_contents(texts, "")


class ResponsesFormat(Format):
    """Formats the responses of ``/v1/responses``."""

    has_frames = False  # every event has a number

    def __init__(
        self,
        body: ResponsesBody,
        on_complete: Callable[[dict[str, Any], list[dict[str, Any]]], None],
    ) -> None:
        """Create the formatter of one request.

        Args:
            on_complete: Called with the complete response and its output items.
        """
        super().__init__()
        self.id = new_id("resp_")
        self._body = body
        self._created = int(time.time())
        self._on_complete = on_complete
        self._names_in_namespaces = body.names_in_namespaces()
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        self._open: type[Part] | int | None = None
        self._texts: list[str] = []

    def response(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Return the fields of a whole response."""
        if not self._items:
            self._items = self._all_items(answers[0])
        response = self._response(self._items, answers[0], usage)
        self._on_complete(response, self._items)
        return response

    def large_fields(self, answers: Sequence[Answer]) -> LargeFields:
        """Return the items of the output."""
        self._items = self._all_items(answers[0])
        return {"output": [partial(_same, item) for item in self._items]}

    def _response(
        self, output: list[dict[str, Any]], answer: Answer | None, usage: Usage | None
    ) -> dict[str, Any]:
        body = self._body
        status, details = "in_progress", None
        if answer is not None:
            status = "completed"
            if answer.finish_reason == "length":
                status, details = "incomplete", {"reason": "max_output_tokens"}
        choice = body.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": body.store,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_p": body.top_p,
            "truncation": body.truncation,
            "usage": usage and _usage(usage),
        }

    def first_events(self, num_prompt_tokens: int) -> str:
        """Return the events that the response exists and runs."""
        response = self._response([], None, None)
        kinds = ("response.created", "response.in_progress")
        return "".join(self._event(kind, response=response) for kind in kinds)

    def write_events(self, answer: Answer, parts: Sequence[Part]) -> str:
        """Return the events that add, extend and complete items of the output."""
        return "".join(event for part in parts for event in self._part_events(part))

    def _part_events(self, part: Part) -> list[str]:
        events = []
        key = part.index if isinstance(part, CallPart) else type(part)
        if key != self._open:
            events.extend(self._complete_item())
            self._open = key
            events.extend(self._add_item(part))
        text = part.arguments if isinstance(part, CallPart) else part.text
        self._texts.append(text)
        if text:
            fields: dict[str, Any] = {"logprobs": []} if isinstance(part, TextPart) else {}
            events.append(self._item_event(f"{_EVENTS[type(part)]}.delta", delta=text, **fields))
        return events

    def _add_item(self, part: Part) -> list[str]:
        match part:
            case TextPart():
                item = _message_item("", "in_progress")
            case ReasoningPart():
                item = _reasoning_item("", "in_progress")
            case CallPart(_, name, call_id, _):
                item = self._call_item(ToolCall(name, "", call_id), "in_progress")
        self._items.append(item)
        index = len(self._items) - 1
        started = {**item, "content": []} if isinstance(part, TextPart | ReasoningPart) else item
        events = [self._event("response.output_item.added", output_index=index, item=started)]
        if isinstance(part, TextPart | ReasoningPart):
            (content,) = item["content"]
            events.append(self._item_event("response.content_part.added", part=content))
        return events

    def _all_items(self, answer: Answer) -> list[dict[str, Any]]:
        """Return the output items of a complete answer."""
        items = []
        for part in answer.parsed.parts:
            match part:
                case TextPart(text):
                    items.append(_message_item(text))
                case ReasoningPart(text):
                    items.append(_reasoning_item(text))
                case ToolCall():
                    items.append(self._call_item(part))
        if not items:  # an empty answer is an empty text
            items.append(_message_item(""))
        if answer.finish_reason == "length" and items[-1]["type"] != "function_call":
            items[-1]["status"] = "incomplete"
        return items

    def _call_item(self, call: ToolCall, status: str = "completed") -> dict[str, Any]:
        return {
            "id": new_id("fc_"),
            "type": "function_call",
            "status": status,
            "call_id": call.id or new_id("call_", 24),
            "name": call.name,
            "arguments": call.arguments,
            **self._names_in_namespaces.get(call.name, {}),
        }

    def _complete_item(self, status: str = "completed") -> list[str]:
        """Return the events that complete the open item, if there is one."""
        if self._open is None:
            return []
        text, self._texts = "".join(self._texts), []
        item = self._items[-1]
        if item["type"] == "function_call":
            # A call is complete with its arguments, even if the answer is cut after them.
            status = "completed" if _is_json(text) else "incomplete"
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            item["arguments"] = text
            kind = f"{_EVENTS[CallPart]}.done"
            events.append(self._item_event(kind, name=item["name"], arguments=text))
        else:
            (content,) = item["content"]
            content["text"] = text
            is_text = item["type"] == "message"
            fields: dict[str, Any] = {"logprobs": []} if is_text else {}
            kind = _EVENTS[TextPart if is_text else ReasoningPart]
            events.append(self._item_event(f"{kind}.done", text=text, **fields))
            events.append(self._item_event("response.content_part.done", part=content))
        index = len(self._items) - 1
        events.append(self._event("response.output_item.done", output_index=index, item=item))
        self._open = None
        return events

    def last_events(self, answers: Sequence[Answer], usage: Usage) -> str:
        """Return the events that complete the last item and the response."""
        (answer,) = answers
        if not self._items:  # an empty answer is an empty text
            self._open = TextPart
            events = self._add_item(TextPart(""))
        else:
            events = []
        is_cut = answer.finish_reason == "length"
        events.extend(self._complete_item("incomplete" if is_cut else "completed"))
        response = self._response(self._items, answer, usage)
        self._on_complete(response, self._items)
        return "".join([*events, self._event(f"response.{response['status']}", response=response)])

    def error_event(self, error: ApiError) -> bytes:
        """Return the last event of a stream that an error ended."""
        content = {
            "type": "error",
            "sequence_number": self._num_events,
            "code": error.code,
            "message": str(error),
            "param": error.param,
        }
        # ASCII, because the message may quote half of a surrogate pair.
        return f"event: error\ndata: {json.dumps(content)}\n\n".encode()

    def _item_event(self, kind: str, **fields: Any) -> str:
        """Return an event about the open item."""
        item, index = self._items[-1], len(self._items) - 1
        position = {} if item["type"] == "function_call" else {"content_index": 0}
        return self._event(kind, item_id=item["id"], output_index=index, **position, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        content = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {to_json(content)}\n\n"


_EVENTS: dict[type[Part], str] = {
    TextPart: "response.output_text",
    ReasoningPart: "response.reasoning_text",
    CallPart: "response.function_call_arguments",
}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _message_item(text: str, status: str = "completed") -> dict[str, Any]:
    content = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    message = {"id": new_id("msg_"), "type": "message", "status": status, "role": "assistant"}
    return {**message, "content": [content]}


def _reasoning_item(text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    item = {"id": new_id("rs_"), "type": "reasoning", "status": status, "summary": []}
    return {**item, "content": content, "encrypted_content": None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            **usage.media_details,
        },
        "output_tokens": usage.num_new_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_new_tokens,
    }


def _same(item: dict[str, Any]) -> dict[str, Any]:
    return item
