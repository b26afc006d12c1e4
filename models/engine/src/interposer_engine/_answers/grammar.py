"""Constraints that enforce tool calls in the format of a checkpoint.

Grammars are texts in the Lark syntax of llguidance, where ``%json`` is a JSON value of a schema and
``<[7]>`` is the special token 7.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
from interposer_engine._answers.rules import (
    Grammar,
    NotationGrammar,
    choices_of,
    in_regex,
    joined,
    properties_of,
)
from interposer_engine._answers.tools import (
    ToolSchemas,
    has_items,
    has_members,
    is_text,
    referenced,
    schema_types,
)
from interposer_engine._answers.writer import layout_of
from interposer_engine._sampling_params import Constraint

_NUMBER = "/[0-9]{1,4}/"  # of a call


def call_grammar(
    format: AnswerFormat,
    tools: Iterable[Mapping[str, Any]],
    special_ids: Mapping[str, int],
    *,
    parallel: bool = False,
    in_reasoning: bool = False,
) -> Constraint:
    """Return the constraint that allows calls of ``tools`` and nothing else.

    Parameters appear in the order of the schema. Calls in Python and calls with tagged parameters
    can only have parameters that the schema lists.

    Args:
        format: How the checkpoint writes answers.
        tools: Tools as chat templates read them, with JSON schemas.
        special_ids: Ids of special tokens by text, because a grammar must name such tokens by id.
        parallel: Whether to allow several calls, else exactly one.
        in_reasoning: Whether the prompt ends within reasoning. If so, the constraint allows any
            reasoning and its closing marker before the calls.
    Raises: RequestError: the format has no calls, there are no tools, or a schema cannot be
        enforced in the format.
    """
    schemas = ToolSchemas(tools)
    if not schemas:
        raise RequestError("A call cannot be required without tools. Try: tool_choice 'auto'")
    grammar = Grammar(special_ids)
    writer = _CallGrammar(grammar, format, schemas)
    start = writer.calls(parallel)
    if in_reasoning and format.channels is None:
        if format.reasoning is None:
            raise _refusal(format.name, "it has no reasoning that could be closed")
        start = f"{grammar.text_until(format.reasoning.close)} {start}"
    return Constraint.grammar(grammar.text(start))


class _CallGrammar:
    """Terms for the calls of one format."""

    def __init__(self, grammar: Grammar, format: AnswerFormat, tools: ToolSchemas) -> None:
        self._grammar = grammar
        self._format = format
        self._tools = tools

    def calls(self, parallel: bool) -> str:
        """Return the term of one call, or of one or more calls."""
        calls = self._format.calls
        if self._format.channels is not None:
            return self._messages(self._format.channels)
        if calls is None:
            raise _refusal(self._format.name, "it has no tool calls")
        layout = layout_of(calls)
        first = layout.start + layout.open
        if not parallel:
            return self._alternatives(calls, first, layout.close + layout.end)
        # Literals include the separator before them, because the lexer of llguidance takes the
        # longest literal that may come, and a separator may be the beginning of the end.
        following = self._alternatives(calls, layout.separator + layout.open, layout.close)
        opening = self._alternatives(calls, first, layout.close)
        return joined(opening, f"{following}*", self._grammar.literal(layout.end))

    def _alternatives(self, calls: CallFormat, before: str, after: str) -> str:
        terms = [self._call(calls, name, before, after) for name in self._tools.names]
        return f"({' | '.join(terms)})"

    def _call(self, calls: CallFormat, name: str, before: str, after: str) -> str:
        """Return the term of a call of one tool between two texts."""
        body, schema = calls.body, _object_schema(self._tools.schema(name))
        literal, json_term = self._grammar.literal, self._grammar.json
        if isinstance(body, JsonBody):
            # Ids are left out; the server gives each call an id.
            key = f"{JSON.write(body.name_key)}: " if body.name_key else ""
            separator = f", {JSON.write(body.arguments_keys[0])}" if body.name_key else ""
            opened = f"{before}{{{key}{JSON.write(name)}{separator}: "
            return joined(literal(opened), json_term(schema, schema), literal("}" + after))
        if isinstance(body, NamedBody):
            header = self._header(body, name, before)
            if body.notation is JSON:
                return joined(header, json_term(schema, schema), literal(after))
            value = NotationGrammar(self._grammar, body.notation, schema).value(schema)
            return joined(header, value, literal(after))
        if isinstance(body, PythonBody):
            items = [
                (self._python_item(key, item, schema), required)
                for key, item, required in properties_of(schema)
            ]
            arguments = self._grammar.sequence(items, '", "')
            return joined(literal(f"{before}{name}("), arguments, literal(")" + after))
        if isinstance(body, NestedBody):
            parameters = self._members(body, schema, schema)
            opened = literal(before + body.name_open + name + body.name_end)
            return joined(opened, parameters, literal(body.end + after))
        header = literal(before + body.name_open + name + body.name_end)
        if body.number_end:
            header = joined(header, _NUMBER, literal(body.number_end))
        items = [
            (self._parameter(body, name, key, item), required)
            for key, item, required in properties_of(schema)
        ]
        parameters = self._grammar.sequence(items, "")
        return joined(header, parameters, literal(body.end + after))

    def _header(self, body: NamedBody, name: str, before: str) -> str:
        """Return the term of a name, with an id if each call has one."""
        literal = self._grammar.literal
        if body.number_prefix:
            opened = literal(f"{before}{body.number_prefix}{name}:")
            return joined(opened, _NUMBER, literal(body.name_end))
        if body.id_before:
            name_terms = literal(body.id_before + name + body.name_end)
            return joined(literal(before), r"/[A-Za-z0-9_\-]{1,40}/", name_terms)
        if body.text_name:
            # The prompt of such a format ends with the marker that is before each call.
            opened = literal(before)
            return f"({opened})? {literal(name + body.name_end)}"
        return literal(before + name + body.name_end)

    def _parameter(self, body: TaggedBody, name: str, key: str, schema: Any) -> str:
        types, literal = self._tools.types(name, key), self._grammar.literal
        kinds = {kind: marker for marker, kind in body.key_ends}
        if "number" in kinds:
            return self._typed_parameter(body, name, key, schema)
        is_plain = is_text(types)
        key_end = kinds.get("text" if is_plain else "json") or kinds["schema"]
        opened = literal(body.key_open + key + key_end + body.value_open)
        choices = choices_of(schema) if is_plain else None
        if choices is not None:
            options = " | ".join(self._quoted(body, str(choice)) for choice in choices)
            return f"{opened} ({options})"
        if is_plain and body.quotes[0]:
            quoted = self._grammar.text_until(body.quotes[1] + body.value_end)
            plain = f"/[^{in_regex(body.quoted)}]*/ {literal(body.value_end)}"
            return f"{opened} ({literal(body.quotes[0])} {quoted} | {plain})"
        if is_plain:
            return f"{opened} {self._grammar.text_until(body.value_end)}"
        root = self._tools.schema(name)
        value = self._grammar.json(schema if isinstance(schema, Mapping) else {}, root)
        return f"{opened} {value} {literal(body.value_end)}"

    def _quoted(self, body: TaggedBody, text: str) -> str:
        """Return the term of a string with its closing marker, and with quotes if it needs any."""
        opened, closed = body.quotes_of(text)
        return self._grammar.literal(opened + text + closed + body.value_end)

    def _typed_parameter(self, body: TaggedBody, name: str, key: str, schema: Any) -> str:
        """Return the term of a parameter whose type is in a marker before the value."""
        root, literal = self._tools.schema(name), self._grammar.literal
        types, choices = self._tools.types(name, key), choices_of(referenced(schema, root))
        options = []
        for marker, kind in body.key_ends:
            opened = literal(body.key_open + key + marker + body.value_open)
            if kind == "text" and "string" in types:
                texts = [choice for choice in choices or () if isinstance(choice, str)]
                values = [literal(text + body.value_end) for text in texts]
                if choices is None:
                    values = [self._grammar.text_until(body.value_end)]
                options += [f"{opened} {value}" for value in values]
            # Chat templates declare integers as numbers.
            elif kind in types or (kind == "number" and "integer" in types):
                kinds = {"number", "integer"} if kind == "number" else {kind}
                typed = {"type": sorted(types & kinds)}
                value = self._grammar.json({"allOf": [schema, typed]} if schema else typed, root)
                options.append(f"{opened} {value} {literal(body.value_end)}")
        return f"({' | '.join(options)})"

    def _members(self, body: NestedBody, schema: Any, root: Mapping[str, Any]) -> str:
        """Return the term of the members of an object in nested tags."""
        items = [
            (self._element(body, key, item, root), required)
            for key, item, required in properties_of(schema)
        ]
        return self._grammar.sequence(items, "")

    def _element(self, body: NestedBody, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        """Return the term of a value in tags."""
        literal = self._grammar.literal
        opened, end = literal(body.tag(key)), body.end_tag(key)
        target, types = referenced(schema, root), schema_types(schema, root)
        choices = choices_of(target) if is_text(types) else None
        if choices is not None:
            options = " | ".join(literal(f"{choice}{end}") for choice in choices)
            return f"{opened} ({options})"
        # Members and items are rules of their own, because a schema may refer to itself.
        if has_members(schema, root):
            members = self._grammar.schema_rule(
                "members", target, lambda: self._members(body, target, root)
            )
            return f"{opened} {members} {literal(end)}"
        if has_items(schema, root):
            items = self._grammar.schema_rule(
                "items",
                target,
                lambda: f"({self._element(body, body.item, target['items'], root)})*",
            )
            return f"{opened} {items} {literal(end)}"
        if "string" in types:
            return f"{opened} {self._grammar.text_until(end)}"
        value = self._grammar.json(target if isinstance(target, Mapping) else {}, root)
        return f"{opened} {value} {literal(end)}"

    def _python_item(self, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        if not re.fullmatch(r"\w+", key):
            raise _refusal(self._format.name, f"the key {key!r:.100} is no keyword of Python")
        value = NotationGrammar(self._grammar, PYTHON, root).value(schema)
        return f"{self._grammar.literal(key + '=')} {value}"

    def _messages(self, channels: ChannelFormat) -> str:
        """Return the term of a message with a call, after any reasoning.

        The answer ends with each call, so there is exactly one.
        """
        literal = self._grammar.literal
        calls = []
        for name in self._tools.names:
            schema = _object_schema(self._tools.schema(name))
            opened = channels.header(name) + channels.message
            if channels.calls is None:
                calls.append(joined(literal(opened), self._grammar.json(schema, schema)))
            else:
                layout = layout_of(channels.calls)
                opened += layout.start + layout.open
                closed = layout.close + layout.end
                calls.append(self._call(channels.calls, name, opened, closed))
        opened = literal(f"{channels.channel}{channels.reasoning_channel}{channels.message}")
        end = self._grammar.text_until(channels.ends[0])
        reasoning = f"({joined(opened, end, literal(channels.start))})?"
        return joined(reasoning, f"({' | '.join(calls)})", literal(channels.ends[1]))


def _object_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "object", **schema}


def _refusal(name: str, reason: str) -> RequestError:
    return RequestError(
        f"A call cannot be required in the format {name!r}: {reason}. Try: tool_choice 'auto'"
    )
