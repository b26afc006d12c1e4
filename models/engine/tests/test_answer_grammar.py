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
from interposer_engine._answers.formats import FORMATS, AnswerFormat, NamedBody
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


def test_each_call_has_an_id_where_the_format_begins_with_it(plain: Recognizer) -> None:
    solar = BY_NAME["solar"]
    assert solar.calls is not None
    assert isinstance(solar.calls.body, NamedBody)
    text = write_calls(solar, [ToolCall("look.again", "{}", "x-1")])
    assert plain.allows(call_grammar(solar, TOOLS, {}), text)
