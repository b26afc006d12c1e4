"""Every answer that the writer writes is read back as it was, however it is split into tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from random import Random
from string import ascii_letters, digits
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tests.landing import num_examples

from interposer.errors import RequestError
from interposer_engine._answer_reader import parts_of
from interposer_engine._answers.formats import (
    FORMATS,
    HARMONY,
    AnswerFormat,
    JsonBody,
    NestedBody,
    TaggedBody,
)
from interposer_engine._answers.parser import AnswerParser
from interposer_engine._answers.parts import (
    CallPart,
    ParsedAnswer,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
)
from interposer_engine._answers.writer import write_answer, write_calls

CALLING = [known for known in FORMATS if known.calls or known.channels]
each_format = pytest.mark.parametrize("format", CALLING, ids=lambda known: known.name)

WORD = st.text("abcdefgh", min_size=1, max_size=6)
# What JSON, Python and the tags of some format write in a special way.
ODD = st.sampled_from(
    ["<tool_call>", "</parameter", "[TOOL_CALLS]", "}", "{", "\\", '"', "'", "\n", "é", "𝄞", "null"]
)
TEXT = st.lists(st.text(max_size=4) | ODD, max_size=5).map("".join)
INTEGER = st.integers(-(2**70), 2**70)
NUMBER = INTEGER | st.floats(allow_nan=False, allow_infinity=False)
VALUE = st.recursive(
    TEXT | NUMBER | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORD, inner, max_size=3),
    max_leaves=5,
)
TYPED: Mapping[str, st.SearchStrategy[Any]] = {
    "string": TEXT,
    "integer": INTEGER,
    "number": NUMBER,
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(VALUE, max_size=3),
    "object": st.dictionaries(WORD, VALUE, max_size=3),
}


@st.composite
def parameters(draw: st.DrawFn) -> tuple[Any, Any]:
    """Draw the schema of a parameter and a value of it."""
    types = draw(st.lists(st.sampled_from([*TYPED]), max_size=2, unique=True))
    if not types:
        return {}, draw(VALUE)
    value = draw(TYPED[draw(st.sampled_from(types))])
    return draw(st.sampled_from([{"type": types}, _any_of(types)])), value


def _any_of(types: Sequence[str]) -> Any:
    return {"anyOf": [{"type": name} for name in types]} if len(types) > 1 else {"type": types[0]}


@st.composite
def tools_and_calls(draw: st.DrawFn) -> tuple[list[Any], list[ToolCall]]:
    """Draw tools and a call of each, with distinct names and ids."""
    names = draw(st.lists(WORD, min_size=1, max_size=3, unique=True))
    tools, calls = [], []
    for index, name in enumerate(names):
        drawn = draw(st.dictionaries(WORD, parameters(), max_size=3))
        schema = {"type": "object", "properties": {key: kind for key, (kind, _) in drawn.items()}}
        tools.append({"type": "function", "function": {"name": name, "parameters": schema}})
        arguments = {key: value for key, (_, value) in drawn.items()}
        calls.append(ToolCall(name, json.dumps(arguments), f"id{index}"))
    return tools, calls


def parsed(
    format: AnswerFormat, pieces: Iterable[str], tools: Iterable[Any] = ()
) -> tuple[ParsedAnswer, list[Part]]:
    """Return an answer that comes in pieces, and its parts."""
    parser = AnswerParser(format, tools, random=Random(0))
    parts = [part for piece in pieces for part in parser.push_text(piece)]
    parts += parser.end()
    return parser.answer, parts


def assembled(parts: Iterable[Part]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Return content, reasoning, and name, id and arguments of each call, from parts."""
    content, reasoning = "", ""
    calls: list[tuple[str, str, str]] = []
    for part in parts:
        if isinstance(part, TextPart):
            content += part.text
        elif isinstance(part, ReasoningPart):
            reasoning += part.text
        else:
            if part.index == len(calls):
                calls.append((part.name, "", ""))
            name, call_id, arguments = calls[part.index]
            # Clients read name and id in the first piece of a call only.
            assert not arguments or (part.name, part.id) == ("", "")
            calls[part.index] = (name, call_id + part.id, arguments + part.arguments)
    return content, reasoning, calls


def in_order(parts: Iterable[Part]) -> list[str | int]:
    """Return the texts and reasoning of an answer, and the indices of its calls, in order."""
    joined: list[Any] = []
    for kind, group in groupby(parts, lambda part: getattr(part, "index", type(part))):
        own = [part for part in group if not isinstance(part, CallPart)]
        joined.append("".join(part.text for part in own) if own else kind)
    return joined


def is_bare(format: AnswerFormat) -> bool:
    return format.calls is not None and format.calls.may_be_bare


def expected_ids(format: AnswerFormat, calls: Sequence[ToolCall]) -> list[str]:
    """Return the ids that the format keeps, or else generates."""
    if format.calls is None or not format.calls.carries_ids:
        random, length = Random(0), format.calls.id_length if format.calls else 0
        return ["".join(random.choices(ascii_letters + digits, k=length)) for _ in calls]
    prefix = getattr(format.calls.body, "number_prefix", "")
    if prefix:
        return [f"{prefix}{call.name}:{index}" for index, call in enumerate(calls)]
    return [call.id for call in calls]


def test_each_family_and_each_kind_of_calls_has_its_own_name() -> None:
    names = [known.name for known in FORMATS]
    assert len(names) == len(set(names))
    kinds = {known.calls.name: known.calls for known in FORMATS if known.calls}
    assert all(kinds[known.calls.name] == known.calls for known in FORMATS if known.calls)


@each_format
@settings(max_examples=num_examples(60), deadline=None)
@given(drawn=tools_and_calls(), data=st.data())
def test_written_answers_are_read_back(
    format: AnswerFormat, drawn: tuple[list[Any], list[ToolCall]], data: st.DataObject
) -> None:
    tools, calls = drawn
    words = st.lists(WORD, max_size=3).map(" ".join)
    content = "" if is_bare(format) else data.draw(words)
    has_reasoning = format.reasoning is not None or format.channels is not None
    reasoning = data.draw(words) if has_reasoning else ""
    try:
        text = write_answer(format, reasoning, content, calls, tools)
    except RequestError:  # a string holds the tag that ends it
        reject()
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    for split in (pieces, list(text)):
        answer, parts = parsed(format, split, tools)
        assert (answer.content, answer.reasoning, answer.note) == (content, reasoning, "")
        assert [call.name for call in answer.calls] == [call.name for call in calls]
        assert [call.id for call in answer.calls] == expected_ids(format, calls)
        for actual, expected in zip(answer.calls, calls, strict=True):
            assert json.loads(actual.arguments) == json.loads(expected.arguments)
        streamed = [(call.name, call.id, call.arguments) for call in answer.calls]
        assert assembled(parts) == (content, reasoning, streamed)


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"properties": {"at": {"type": "string"}, "n": {"type": "integer"}}},
    },
}
CALL = ToolCall("look", '{"at": "a\\"b", "n": 3}')


@each_format
def test_calls_are_read_back_wherever_the_text_is_split(format: AnswerFormat) -> None:
    text = write_calls(format, [CALL, CALL], [LOOK])
    for position in range(len(text)):
        answer, _ = parsed(format, [text[:position], text[position:]], [LOOK])
        assert [json.loads(call.arguments) for call in answer.calls] == [{"at": 'a"b', "n": 3}] * 2
        assert (answer.content, answer.note) == ("", "")


@each_format
def test_text_after_and_between_calls_is_content(format: AnswerFormat) -> None:
    if format.channels or is_bare(format):
        pytest.skip("the format has no text after a call")
    text = write_calls(format, [CALL], [LOOK])
    answer, _ = parsed(format, f"One.\n{text}\nTwo.\n{text}\nThree.\n", [LOOK])
    assert (len(answer.calls), answer.note) == (2, "")
    assert answer.content.split() == ["One.", "Two.", "Three."]
    assert [part if isinstance(part, ToolCall) else part.text.strip() for part in answer.parts] == [
        "One.", answer.calls[0], "Two.", answer.calls[1], "Three."
    ]  # fmt: skip


@each_format
def test_arguments_are_streamed_before_they_are_complete(format: AnswerFormat) -> None:
    call = ToolCall("look", json.dumps({"at": "word " * 20, "n": 3}))
    text = write_calls(format, [call], [LOOK])
    parser = AnswerParser(format, [LOOK])
    middle = text.index("word word word") + 40
    parts = [part for character in text[:middle] for part in parser.push_text(character)]
    assert all(isinstance(part, CallPart) for part in parts)
    ((name, _, arguments),) = assembled(parts)[2]
    assert name == "look"
    assert '"at": "word word word word' in arguments
    assert parser.answer.calls == ()


@each_format
def test_calls_of_unknown_tools_are_text(format: AnswerFormat) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    text = write_calls(format, [CALL], [LOOK])
    answer, parts = parsed(format, text, [other])
    assert answer.calls == ()
    assert not any(isinstance(part, CallPart) for part in parts)
    for marker in format.ignored:
        text = text.replace(marker, "")
    assert answer.content == text.strip()
    if not is_bare(format):
        assert "there is no tool 'look'" in answer.note


@each_format
def test_without_tools_marked_calls_of_any_name_are_read(format: AnswerFormat) -> None:
    answer, _ = parsed(format, write_calls(format, [CALL], [LOOK]))
    assert [call.name for call in answer.calls] == ([] if is_bare(format) else ["look"])


@each_format
def test_an_unfinished_call_is_left_out_with_a_note(format: AnswerFormat) -> None:
    text = write_calls(format, [ToolCall("look", '{"at": "some words"}')], [LOOK])
    cut = text.index("words")
    answer, parts = parsed(format, text[:cut], [LOOK])
    assert answer.calls == ()
    assert answer.content == ""
    assert "the call of 'look' was left out" in answer.note
    assert next(part.name for part in parts if isinstance(part, CallPart)) == "look"


@each_format
@settings(max_examples=num_examples(60), deadline=None)
@given(data=st.data())
def test_how_an_answer_is_split_changes_nothing(format: AnswerFormat, data: st.DataObject) -> None:
    written = write_answer(format, "", "", [CALL], [LOOK])
    markers = sorted({m for m in format.markers() if m.strip()} | {written})
    junk = st.sampled_from(
        [*markers, "look", "{", "}", '"', "[", "]", "(", ")", ":", ",", " ", "\n"]
    )
    text = "".join(data.draw(st.lists(junk | st.text(max_size=3), max_size=8)))
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    whole, parts = parsed(format, [text], [LOOK])
    by_characters, character_parts = parsed(format, text, [LOOK])
    assert whole == by_characters
    assert assembled(parts) == assembled(character_parts)
    if "left out" not in whole.note:
        assert in_order(parts) == in_order(character_parts) == in_order(parts_of(whole))
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)


@each_format
def test_the_work_grows_with_the_length_of_the_answer(format: AnswerFormat) -> None:
    """Count function calls, as time says little on a busy machine."""

    def num_steps(text: str) -> int:
        count = 0

        def count_call(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(count_call)
        try:
            parsed(format, text, [LOOK])
        finally:
            sys.setprofile(None)
        return count

    short, long = (
        write_answer(format, "", "", [ToolCall("look", json.dumps({"at": "a< " * length}))], [LOOK])
        for length in (200, 800)
    )
    assert num_steps(long) < 5 * num_steps(short)


def test_markers_inside_json_strings_are_no_markers() -> None:
    for format in CALLING:
        body = format.calls.body if format.calls else None
        if isinstance(body, JsonBody) or format.channels is HARMONY:
            markers = "".join(format.markers())
            call = ToolCall("look", json.dumps({"at": markers}, ensure_ascii=False))
            answer, _ = parsed(format, write_calls(format, [call], [LOOK]), [LOOK])
            assert json.loads(answer.calls[0].arguments) == {"at": markers}


def test_a_format_that_cannot_carry_a_value_refuses_to_write_it() -> None:
    for format in CALLING:
        body = format.calls.body if format.calls else None
        if isinstance(body, TaggedBody | NestedBody):
            end = body.prefix if isinstance(body, NestedBody) else body.value_end.strip()
            quoted = body.quotes[1] if isinstance(body, TaggedBody) else ""
            call = ToolCall("look", json.dumps({"at": quoted + end}))
            with pytest.raises(RequestError, match="cannot write a string with"):
                write_calls(format, [call], [LOOK])
    plain = replace(CALLING[0], calls=None, channels=None)
    with pytest.raises(RequestError, match="has no tool calls"):
        write_calls(plain, [CALL])
    with pytest.raises(RequestError, match="has no reasoning"):
        write_answer(replace(plain, reasoning=None), reasoning="Hm.")
    tagged = next(known for known in CALLING if known.name == "qwen3_coder")
    with pytest.raises(RequestError, match="must be the text of a JSON object"):
        write_calls(tagged, [ToolCall("look", "[]")])
