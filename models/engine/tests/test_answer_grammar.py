"""A required call can only be written in the format of the checkpoint, with valid arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from interposer.errors import RequestError
from interposer_engine import Constraint
from interposer_engine._answers.formats import (
    FORMATS,
    MINIMAX_NAMESPACE,
    AnswerFormat,
    NamedBody,
)
from interposer_engine._answers.grammar import call_grammar
from interposer_engine._answers.parts import ToolCall
from interposer_engine._answers.writer import write_calls
from interposer_engine._constrained_decoding.grammar import compile_constraint, grammar_tokenizer

CALLING = [known for known in FORMATS if known.calls or known.channels]
BY_NAME = {known.name: known for known in FORMATS}
each_format = pytest.mark.parametrize("format", CALLING, ids=lambda known: known.name)
SCHEMA = {
    "type": "object",
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}}},
    "properties": {
        "at": {"type": "string"},
        "n": {"type": "integer"},
        "kind": {"enum": ["near", "far"]},
        "on": {"type": "boolean"},
        "list": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "point": {"$ref": "#/$defs/point"},
        "free": {"type": "object"},
        "maybe": {"type": ["integer", "null"]},
        "any": {},
    },
    "required": ["at", "kind"],
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
TOOLS: list[dict[str, Any]] = [LOOK, {"name": "look.again"}]
FULL: dict[str, Any] = {
    "at": "a 'b' \"c\"\n<d>\\",
    "n": -3,
    "kind": "far",
    "on": True,
    "list": ["x", None],
    "point": {"x": 1.5},
    "free": {"a": [1, {"b": None}]},
    "maybe": None,
    "any": ["y"],
}


def specials_of(format: AnswerFormat) -> list[str]:
    """Return the markers of a format that look like special tokens."""
    markers = {marker.strip() for marker in format.markers()}
    return sorted(m for m in markers if m.startswith("<") and m.endswith(">")) or ["<|none|>"]


class Recognizer:
    """Tells whether a constraint allows a text, token by token of one byte each."""

    def __init__(self, specials: Sequence[str] = ()) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {letter: index for index, letter in enumerate(alphabet)}
        self.tokenizer = Tokenizer(models.BPE(vocabulary, []))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens(list(specials))
        self.special_ids = {text: self._id(text) for text in specials}
        self._library, _ = grammar_tokenizer(
            self.tokenizer.to_str(), self.tokenizer.get_vocab_size()
        )

    def _id(self, text: str) -> int:
        index = self.tokenizer.token_to_id(text)
        assert index is not None
        return index

    def allows(self, constraint: Constraint, text: str) -> bool:
        matcher = compile_constraint(self._library, constraint, bounded=True).deep_copy()
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def look(**arguments: Any) -> ToolCall:
    return ToolCall("look", json.dumps(arguments))


@pytest.fixture(scope="module")
def plain() -> Recognizer:
    pytest.importorskip("llguidance")
    return Recognizer()


@each_format
def test_written_calls_are_allowed(format: AnswerFormat, plain: Recognizer) -> None:
    written = [
        write_calls(format, [call], TOOLS)
        for call in (look(**FULL), look(at="", kind="near"), ToolCall("look.again", "{}"))
    ]
    one = call_grammar(format, TOOLS, {})
    assert all(plain.allows(one, text) for text in written)
    special = Recognizer(specials_of(format))
    one = call_grammar(format, TOOLS, special.special_ids)
    assert all(special.allows(one, text) for text in written)


@each_format
def test_several_calls_are_allowed_only_if_they_are_to_be(
    format: AnswerFormat, plain: Recognizer
) -> None:
    two = write_calls(format, [look(at="a", kind="far"), ToolCall("look.again", "{}")], TOOLS)
    assert not plain.allows(call_grammar(format, TOOLS, {}), two)
    if format.channels is None:
        several = call_grammar(format, TOOLS, {}, parallel=True)
        assert plain.allows(several, two)
        assert plain.allows(several, write_calls(format, [look(at="a", kind="far")], TOOLS))


@each_format
def test_other_texts_are_not_allowed(format: AnswerFormat, plain: Recognizer) -> None:
    constraint = call_grammar(format, TOOLS, {})
    for call in (look(at="a"), look(at="a", kind="else"), look(kind="far"), ToolCall("wait", "{}")):
        assert not plain.allows(constraint, write_calls(format, [call], TOOLS))
    valid = write_calls(format, [look(at="a", kind="far")], TOOLS)
    assert not plain.allows(constraint, f"Well. {valid}")
    assert not plain.allows(constraint, valid[:-1])


@each_format
def test_open_reasoning_is_closed_before_the_call(format: AnswerFormat, plain: Recognizer) -> None:
    text = write_calls(format, [look(at="a", kind="far")], TOOLS)
    if format.channels:
        channels = format.channels
        opened = f"{channels.channel}{channels.reasoning_channel}{channels.message}"
        thought = f"{opened}I look.{channels.ends[0]}{channels.start}"
        assert plain.allows(call_grammar(format, TOOLS, {}), thought + text)
    elif format.reasoning:
        constraint = call_grammar(format, TOOLS, {}, in_reasoning=True)
        assert plain.allows(constraint, f"I look.{format.reasoning.close}{text}")
        assert not plain.allows(constraint, text)
    else:
        with pytest.raises(RequestError, match="has no reasoning that could be closed"):
            call_grammar(format, TOOLS, {}, in_reasoning=True)


def test_control_tokens_are_written_by_their_ids() -> None:
    constraint = call_grammar(BY_NAME["mistral"], TOOLS[1:], {"[TOOL_CALLS]": 9, "[ARGS]": 7})
    assert constraint.text.startswith('start: (<[9]> "look.again" <[7]> %json {"type": "object"')


def test_impossible_calls_are_refused() -> None:
    with pytest.raises(RequestError, match="cannot be required without tools"):
        call_grammar(CALLING[0], [], {})
    without_calls = replace(BY_NAME["hermes"], calls=None)
    with pytest.raises(RequestError, match="it has no tool calls"):
        call_grammar(without_calls, TOOLS, {})
    missing = {"name": "look", "parameters": {"required": ["at"]}}
    for name in ("qwen3_coder", "pythonic", "glm4"):
        with pytest.raises(RequestError, match="required parameter 'at' has no schema"):
            call_grammar(BY_NAME[name], [missing], {})
    dashed = {"name": "look", "parameters": {"properties": {"a-b": {}}}}
    with pytest.raises(RequestError, match="'a-b' is no keyword of Python"):
        call_grammar(BY_NAME["pythonic"], [dashed], {})
    unwritable = {"name": "look", "parameters": {"default": float("nan")}}
    with pytest.raises(RequestError, match="no JSON schema"):
        call_grammar(BY_NAME["hermes"], [unwritable], {})


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("a", True),
        ("<![CDATA[a</param>b]]>", True),
        ("<![CDATA[a", False),
        ("a<b", False),
        ("a\nb", False),
    ],
)
def test_a_string_that_needs_quotes_has_them(
    text: str, is_allowed: bool, plain: Recognizer
) -> None:
    tool = {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}
    written = f'<function name="look"><param name="at">{text}</param></function>'
    constraint = call_grammar(BY_NAME["minicpm5"], [tool], {})
    assert plain.allows(constraint, written) == is_allowed


@pytest.mark.parametrize(
    ("schema", "kind", "text", "is_allowed"),
    [
        ({"type": "integer"}, "number", "3", True),
        ({"type": "integer"}, "integer", "3", True),
        ({"type": "integer"}, "number", "3.5", False),
        ({"type": "integer"}, "string", "3", False),
        ({"type": ["string", "null"]}, "string", "null", True),
        ({"type": ["string", "null"]}, "null", "null", True),
        ({"type": ["string", "null"]}, "number", "3", False),
        ({"enum": ["a", 1]}, "string", "a", True),
        ({"enum": ["a", 1]}, "string", "b", False),
        ({"enum": ["a", 1]}, "number", "2", False),
        ({}, "array", "[1]", True),
        ({}, "array", "1", False),
    ],
)
def test_the_type_before_a_value_is_one_of_the_schema(
    schema: Any, kind: str, text: str, is_allowed: bool, plain: Recognizer
) -> None:
    tool = {"name": "look", "parameters": {"properties": {"at": schema}}}
    written = (
        '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="at" '
        f'type="{kind}"<|sep|>{text}<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>"
    )
    constraint = call_grammar(BY_NAME["kimi_k3"], [tool], {})
    assert plain.allows(constraint, written) == is_allowed


def test_a_call_may_follow_a_prompt_that_opens_it(plain: Recognizer) -> None:
    constraint = call_grammar(BY_NAME["functionary3_2"], TOOLS, {})
    assert plain.allows(constraint, "look.again\n{}")
    assert plain.allows(constraint, ">>>look.again\n{}")
    assert not plain.allows(constraint, "all\n{}")


def test_members_and_items_are_in_tags_as_the_schema_declares_them(plain: Recognizer) -> None:
    at = {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    at["items"]["required"] = ["x"]  # type: ignore[index]
    tool = {"name": "look", "parameters": {"properties": {"at": at}}}
    constraint = call_grammar(BY_NAME["minimax_m3"], [tool], {})
    for items, is_allowed in [
        ("", True),
        ("NS<item>NS<x>1NS</x>NS</item>NS<item>NS<x>2NS</x>NS</item>", True),
        ("NS<item>NS</item>", False),
        ("NS<item>NS<x>aNS</x>NS</item>", False),
        ("NS<item>1NS</item>", False),
        ("[]", False),
    ]:
        text = (
            'NS<tool_call>\nNS<invoke name="look">NS<at>' + items + "NS</at>NS</invoke>\n"
            "NS</tool_call>"
        ).replace("NS", MINIMAX_NAMESPACE)
        assert plain.allows(constraint, text) == is_allowed, items


@pytest.mark.parametrize("name", ["minimax_m3", "pythonic", "gemma4"])
def test_a_schema_may_refer_to_itself_in_many_places(name: str, plain: Recognizer) -> None:
    keys = "abcdefgh"
    node = {"anyOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/nodes"}, {"type": "null"}]}
    own = {"$ref": "#/$defs/node"}
    schema = {
        "type": "object",
        "$defs": {
            "node": {"type": "object", "properties": dict.fromkeys(keys, own) | {"x": node}},
            "nodes": {"type": "array", "items": own},
        },
        "properties": {"at": own},
    }
    tool = {"name": "look", "parameters": schema}
    value: Any = {"at": {"a": {"b": {"h": {"a": {"g": {}}}}}, "x": None}}
    call = ToolCall("look", json.dumps(value))
    constraint = call_grammar(BY_NAME[name], [tool], {})
    assert plain.allows(constraint, write_calls(BY_NAME[name], [call], [tool]))
    other = ToolCall("look", json.dumps({"at": {"a": {"b": 1}}}))
    assert not plain.allows(constraint, write_calls(BY_NAME[name], [other], [tool]))


def test_each_call_has_an_id_where_the_format_begins_with_it(plain: Recognizer) -> None:
    solar = BY_NAME["solar"]
    assert solar.calls is not None
    assert isinstance(solar.calls.body, NamedBody)
    text = write_calls(solar, [ToolCall("look.again", "{}", "x-1")])
    assert plain.allows(call_grammar(solar, TOOLS, {}), text)
