"""Writer of reasoning, text and tool calls; the inverse of the parser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from interposer.errors import RequestError
from interposer_engine._answers.formats import (
    AnswerFormat,
    CallFormat,
    ChannelFormat,
    JsonBody,
    NamedBody,
    NestedBody,
    PythonBody,
    TaggedBody,
)
from interposer_engine._answers.literals import JSON, PYTHON
from interposer_engine._answers.parts import ToolCall
from interposer_engine._answers.tools import (
    ToolSchemas,
    has_items,
    has_members,
    is_text,
    json_type,
    member_schema,
    schema_types,
    value_json,
)


def write_answer(
    format: AnswerFormat,
    reasoning: str = "",
    content: str = "",
    calls: Sequence[ToolCall] = (),
    tools: Iterable[Mapping[str, Any]] = (),
) -> str:
    """Return the text of an answer, from the end of a prompt that opens no reasoning.

    Raises: RequestError: the format cannot write a part.
    """
    if format.channels is not None:
        return _write_messages(format.channels, reasoning, content, calls, ToolSchemas(tools))
    pieces = []
    if reasoning:
        if format.reasoning is None:
            raise RequestError(f"The format {format.name!r} has no reasoning")
        pieces += [format.reasoning.open, reasoning, format.reasoning.close]
    if content:
        pieces += [_text_open(format), content, format.text_close]
    if calls:
        pieces.append(write_calls(format, calls, tools))
    return "".join(pieces)


def _text_open(format: AnswerFormat) -> str:
    """Return the marker before text for the user."""
    calls = format.calls
    if calls is not None and isinstance(calls.body, NamedBody) and calls.text_name:
        return calls.open + calls.text_name + calls.body.name_end
    return format.text_open


def write_calls(
    format: AnswerFormat, calls: Sequence[ToolCall], tools: Iterable[Mapping[str, Any]] = ()
) -> str:
    """Return the text of calls.

    Args:
        format: How the checkpoint writes answers.
        calls: The calls; at least one.
        tools: Tools of the request. Their schemas give the types of tagged parameters.
    Returns: The text. If the format requires ids, calls without an id get one.
    Raises: RequestError: the format has no calls, or cannot write a name, a key or a string.
    """
    if format.channels is not None:
        return _write_messages(format.channels, "", "", calls, ToolSchemas(tools))
    if format.calls is None:
        raise RequestError(f"The format {format.name!r} has no tool calls")
    return _CallWriter(format.calls, ToolSchemas(tools)).write(calls)


@dataclass(frozen=True, slots=True)
class Layout:
    """The texts around calls.

    Attributes:
        start: Text before all calls.
        open: Text before each call.
        close: Text after each call.
        separator: Text between two calls.
        end: Text after all calls.
    """

    start: str
    open: str
    close: str
    separator: str
    end: str


def layout_of(calls: CallFormat) -> Layout:
    """Return the texts around calls."""
    body = calls.body
    is_open_written = calls.writes_open or not calls.may_be_bare
    opened, closed = (calls.open, calls.close) if is_open_written else ("", "")
    if isinstance(body, JsonBody):
        is_list, is_shared = body.layout == "list", body.layout != "object"
    else:
        is_list = isinstance(body, PythonBody) and body.is_list
        is_shared = isinstance(body, PythonBody)
    if is_list:
        start, end = f"{calls.section_open}{opened}[", f"]{closed}{calls.section_close}"
        return Layout(start, "", "", ", ", end)
    if is_shared:
        start, end = calls.section_open + opened, closed + calls.section_close
        return Layout(start, "", "", calls.separator, end)
    return Layout(calls.section_open, opened, closed, calls.separator, calls.section_close)


class _CallWriter:
    def __init__(self, calls: CallFormat, tools: ToolSchemas) -> None:
        self._calls = calls
        self._tools = tools

    def write(self, calls: Sequence[ToolCall]) -> str:
        body, layout = self._calls.body, layout_of(self._calls)
        if isinstance(body, JsonBody):
            texts = [self._json(body, call) for call in calls]
        elif isinstance(body, NamedBody):
            texts = [self._named(body, index, call) for index, call in enumerate(calls)]
        elif isinstance(body, PythonBody):
            texts = [self._python(call) for call in calls]
        elif isinstance(body, NestedBody):
            texts = [self._nested(body, call) for call in calls]
        else:
            texts = [self._tagged(body, index, call) for index, call in enumerate(calls)]
        text = layout.separator.join(
            f"{layout.open}{body_text}{layout.close}" for body_text in texts
        )
        return f"{layout.start}{text}{layout.end}"

    def _json(self, body: JsonBody, call: ToolCall) -> str:
        if not body.name_key:
            return f"{{{JSON.write(call.name)}: {call.arguments}}}"
        items = [
            f"{JSON.write(body.name_key)}: {JSON.write(call.name)}",
            f"{JSON.write(body.arguments_keys[0])}: {call.arguments}",
        ]
        if body.id_key and call.id:
            id_item = f"{JSON.write(body.id_key)}: {JSON.write(call.id)}"
            items.insert(0 if body.is_id_first else 2, id_item)
        return "{" + ", ".join(items) + "}"

    def _named(self, body: NamedBody, index: int, call: ToolCall) -> str:
        header = self._plain(call.name, "{", body.name_end, body.id_after)
        if body.number_prefix:
            header = f"{body.number_prefix}{header}"
            has_own_id = call.id.rpartition(":")[0] == header
            header = call.id if has_own_id else f"{header}:{index}"
        if body.id_before:
            call_id = call.id or f"call_{index}"
            header = f"{self._plain(call_id, body.id_before)}{body.id_before}{header}"
        if body.id_after and call.id:
            header += body.id_after + self._plain(call.id, "{", body.name_end)
        arguments = call.arguments
        if body.notation is not JSON:
            arguments = self._written(body.notation.write, _arguments(call))
        return f"{header}{body.name_end}{arguments}"

    def _python(self, call: ToolCall) -> str:
        if not re.fullmatch(r"[\w.\-]+", call.name):
            raise self._refusal(f"the name {call.name!r:.100}")
        arguments = _arguments(call)
        for key in arguments:
            if not re.fullmatch(r"\w+", key):
                raise self._refusal(f"the key {key!r:.100}")
        items = (f"{key}={PYTHON.write(value)}" for key, value in arguments.items())
        return f"{call.name}({', '.join(items)})"

    def _nested(self, body: NestedBody, call: ToolCall) -> str:
        root = self._tools.schema(call.name)
        parameters = (
            self._element(body, key, value, member_schema(root, root, key), root)
            for key, value in _arguments(call).items()
        )
        name = self._plain(call.name, body.name_end)
        return f"{body.name_open}{name}{body.name_end}{''.join(parameters)}{body.end}"

    def _element(
        self, body: NestedBody, key: str, value: Any, schema: Any, root: Mapping[str, Any]
    ) -> str:
        """Return a value in tags. Members that the schema does not declare are in JSON."""
        types = schema_types(schema, root)
        if isinstance(value, dict) and has_members(schema, root):
            text = "".join(
                self._element(body, name, item, member_schema(schema, root, name), root)
                for name, item in value.items()
            )
        elif isinstance(value, list) and has_items(schema, root):
            items = member_schema(schema, root, None)
            text = "".join(self._element(body, body.item, item, items, root) for item in value)
        else:
            text = JSON.write(value)
            if isinstance(value, str) and (is_text(types) or value_json(value, types) == text):
                text = value
            if body.prefix in text:
                raise self._refusal(f"a string with {body.prefix!r}")
        return f"{body.tag(self._plain(key, '>', body.prefix))}{text}{body.end_tag(key)}"

    def _tagged(self, body: TaggedBody, index: int, call: ToolCall) -> str:
        name_end = body.name_end.strip() or "\n"
        pieces = [body.name_open, self._plain(call.name, name_end, body.key_open), body.name_end]
        if body.number_end:
            pieces += [str(index + 1), body.number_end]
        for key, value in _arguments(call).items():
            types = self._tools.types(call.name, key)
            key_end, text = self._tagged_value(body, value, types)
            pieces += [
                body.key_open,
                self._plain(key, *(marker for marker, _ in body.key_ends)),
                key_end,
                body.value_open,
                text,
            ]
        return "".join([*pieces, body.end])

    def _tagged_value(self, body: TaggedBody, value: Any, types: frozenset[str]) -> tuple[str, str]:
        """Return the marker after the key, and the value with the markers around it."""
        key_ends = {kind: marker for marker, kind in body.key_ends}
        key_end = key_ends.get("text" if isinstance(value, str) else json_type(value))
        key_end = key_end or key_ends.get("json") or key_ends["schema"]
        text, quotes = JSON.write(value), ("", "")
        if isinstance(value, str):
            is_plain = "text" in key_ends or is_text(types) or value_json(value, types) == text
            quotes = body.quotes_of(value, is_ambiguous=not is_plain)
            text = value if is_plain or quotes[0] else text
        close = quotes[1] + body.value_end
        if close.strip() in text:
            raise self._refusal(f"a string with {close.strip()!r}")
        return key_end, quotes[0] + text + close

    def _plain(self, text: str, *markers: str) -> str:
        """Return a name or key that stands before one of ``markers``."""
        if not text or text != text.strip() or any((m.strip() or m) in text for m in markers if m):
            raise self._refusal(f"the name {text!r:.100}")
        return text

    def _written(self, write: Any, value: Any) -> str:
        try:
            return str(write(value))
        except ValueError as error:
            raise self._refusal(str(error)) from None

    def _refusal(self, reason: str) -> RequestError:
        return RequestError(f"The call format {self._calls.name!r} cannot write {reason}")


def _arguments(call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call as a dict.

    Raises: RequestError: the arguments are no JSON object.
    """
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(
            f"The arguments of {call.name!r:.100} are {call.arguments!r:.200}, must be the text of "
            "a JSON object. Try: '{}'"
        )
    return arguments


def _write_messages(
    channels: ChannelFormat,
    reasoning: str,
    content: str,
    calls: Sequence[ToolCall],
    tools: ToolSchemas,
) -> str:
    """Return messages in channels, from the end of a prompt that names the role of the model."""
    end, call_end, answer_end = channels.ends
    messages = []
    if reasoning:
        messages.append((channels.channel + channels.reasoning_channel, reasoning, end))
    if content:
        # Text before calls goes to their channel; the last message is the answer.
        channel = channels.call_channel if calls else ""
        header = channels.channel + (channel or channels.text_channel)
        messages.append((header, content, end if calls else answer_end))
    for call in calls:
        body = call.arguments
        if channels.calls is not None:
            body = _CallWriter(channels.calls, tools).write([call])
        messages.append((channels.header(call.name), body, call_end))
    return channels.start.join(
        f"{header}{channels.message}{body}{closed}" for header, body, closed in messages
    )
