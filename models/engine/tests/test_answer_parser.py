"""Answers as models really write them: loose forms are read, and malformed calls become text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from interposer.errors import RequestError
from interposer_engine._answers.formats import FORMATS, MINIMAX_NAMESPACE, AnswerFormat
from interposer_engine._answers.parser import AnswerParser
from interposer_engine._answers.parts import (
    CallPart,
    ParsedAnswer,
    ReasoningPart,
    TextPart,
    ToolCall,
)

BY_NAME = {known.name: known for known in FORMATS}
SCHEMA = {
    "$defs": {"count": {"type": "integer"}},
    "type": "object",
    "properties": {
        "at": {"type": "string"},
        "n": {"type": "integer"},
        "on": {"type": "boolean"},
        "count": {"$ref": "#/$defs/count"},
        "more": {"type": "object"},
        "kind": {"enum": ["a", "b"]},
        "maybe": {"type": ["string", "null"]},
        "deep": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "list": {"type": "array", "items": {"type": "string"}},
                        "point": {"properties": {"x": {"type": "string"}}},
                    },
                },
                {"type": "null"},
            ]
        },
    },
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
TOOLS: list[dict[str, Any]] = [LOOK, {"name": "wait", "parameters": None}]


def parse(format: str | AnswerFormat, text: str, **options: Any) -> ParsedAnswer:
    """Return an answer that comes character by character."""
    known = BY_NAME[format] if isinstance(format, str) else format
    parser = AnswerParser(known, TOOLS, **options)
    for character in text:
        parser.push_text(character)
    parser.end()
    return parser.answer


def call(name: str = "look", call_id: str = "", **arguments: Any) -> tuple[str, str, Any]:
    return name, call_id, arguments


def calls_of(answer: ParsedAnswer) -> list[tuple[str, str, Any]]:
    return [(each.name, each.id, json.loads(each.arguments)) for each in answer.calls]


def test_text_without_calls_is_unchanged() -> None:
    text = "  One < two, [three]\n\n```json\n{}\n```\n  "
    for format in FORMATS:
        answer = parse(format, text)
        assert (answer.content, answer.reasoning, answer.calls) == (text, "", ())
        assert answer.note == ""


@pytest.mark.parametrize(
    ("format", "text", "reasoning", "content"),
    [
        ("hermes", "<think>\nWell.\n</think>\n\nYes.\n", "Well.", "Yes.\n"),
        ("hermes", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("hermes", "\n<think>Well. </think> Yes.", "Well.", "Yes."),
        ("hermes", "<think>Well.\n\nNo.", "Well.\n\nNo.", ""),
        ("hermes", "<think>A</think>1<think>B</think>2", "A\nB", "1\n2"),
        ("mistral", "[THINK]Well.[/THINK]Yes.", "Well.", "Yes."),
        ("gemma4", "<|channel>thought\nWell.\n<channel|>Yes.", "Well.", "Yes."),
        (
            "command",
            "<|START_THINKING|>Well.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
            "Well.",
            "Yes.",
        ),
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            "Well.",
            "So.\nYes.",
        ),
        (
            "kimi_k3",
            "<|open|>think<|sep|>Well.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>"
            "response<|sep|><|close|>message<|sep|><|end_of_msg|>",
            "Well.",
            "Yes.",
        ),
        (
            "muse",
            " to=self<|message|>Well.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>",
            "Well.",
            "Yes.",
        ),
        ("hy3", "<think:opensource></think:opensource>Yes.", "", "Yes."),
        ("hunyuan", "<think>\nWell.\n</think>\n<answer>\nYes.\n</answer>", "Well.", "Yes."),
        ("minimax_m3", "</mm:think>Yes.", "", "</mm:think>Yes."),
        ("functionary3_2", ">>>all\nYes.\n>>> 1", "", "Yes.\n>>> 1"),
        ("gpt_oss", "<|channel|>final<|message|>Yes.", "", "Yes."),
        ("gpt_oss", "<|channel|>final<|message|>Yes.<|end|><|start|>assistant<|chan", "", "Yes."),
    ],
)
def test_reasoning_and_text_are_told_apart(
    format: str, text: str, reasoning: str, content: str
) -> None:
    answer = parse(format, text)
    assert (answer.reasoning, answer.content, answer.note) == (reasoning, content, "")


def test_a_prompt_may_open_the_reasoning() -> None:
    for text in ("\nWell.\n</think>\n\nYes.", "<think>\nWell.</think>Yes."):
        answer = parse("hermes", text, starts_in_reasoning=True)
        assert (answer.reasoning, answer.content) == ("Well.", "Yes.")


def test_a_call_can_end_the_reasoning_if_its_markers_are_tokens() -> None:
    text = (
        "<think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    answer = parse("kimi_k2", text)
    assert (answer.reasoning, answer.content) == ("I look.", "")
    assert calls_of(answer) == [call(call_id="functions.look:0")]


def test_special_tokens_are_markers_although_they_have_no_text() -> None:
    parser = AnswerParser(
        BY_NAME["mistral"], TOOLS, {1: "[TOOL_CALLS]", 2: "[ARGS]", 3: "[CALL_ID]"}
    )
    tokens = [(9, "Well"), (9, ". "), (1, ""), (9, "lo"), (9, "ok"), (3, ""), (9, "x1")]
    tokens += [(2, ""), (9, '{"at": '), (9, '"a"}'), (8, "")]
    parts = [part for token, text in tokens for part in parser.push(token, text)]
    assert parts == [
        TextPart("Well"),
        TextPart("."),
        CallPart(0, "look", "x1", '{"at"'),
        CallPart(0, arguments=': "a"}'),
    ]
    assert parser.end() == []
    assert parser.end() == []
    look = ToolCall("look", '{"at": "a"}', "x1")
    assert parser.answer == ParsedAnswer("Well.", "", (look,), "", (TextPart("Well."), look))


def test_only_the_beginning_of_a_marker_is_held_back() -> None:
    parser = AnswerParser(BY_NAME["hermes"], TOOLS)
    assert parser.push_text("a <to") == [TextPart("a")]
    assert parser.push_text("ol_box> ") == [TextPart(" <tool_box>")]
    assert parser.push_text("<think>b <") == [ReasoningPart("b")]
    assert parser.push_text("b") == [ReasoningPart(" <b")]


LOOSE: list[tuple[str, str, list[Any]]] = [
    ("hermes", '<tool_call>{"arguments": {"n": 1}, "name": "look"}', [call(n=1)]),
    ("hermes", '<tool_call>{"name": "look"}</tool_call>', [call()]),
    ("hermes", '<tool_call>{"name": "look", "parameters": {}}</tool_call>', [call()]),
    ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"n\\": 1}"}', [call(n=1)]),
    ("hermes", '<tool_call>{"arguments": "{}", "name": "look"}', [call()]),
    ("hermes", '<tool_call>{"type": "f", "name": "look", "arguments": {}}', [call()]),
    ("hermes", '<tool_call>[{"name": "look", "arguments": {}}]</tool_call>', [call()]),
    (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"at": "a\nb\\d\\u00e9"}}</tool_call>',
        [call(at="a\nb\\dé")],
    ),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"on": True}}', [call(on=True)]),
    ("llama3", '<|python_tag|>{"name": "look", "parameters": {}}', [call()]),
    (
        "minimax_m3",
        "NS<tool_call>\nNS<invoke name=\"look\">\nNS<at>12NS</at>NS<n>3NS</n>NS<more>NS<a>NS<item>1"
        "NS</item>NS<item>xNS</item>NS</a>NS<item>2NS</item>NS<e>NS</e>NS</more>NS</invoke>\n"
        'NS<invoke name="wait">NS</invoke>NS</tool_call>'.replace("NS", MINIMAX_NAMESPACE),
        [call(at="12", n=3, more={"a": [1, "x"], "item": 2, "e": ""}), call("wait")],
    ),
    (
        "minimax_m3",
        'NS<tool_call>NS<invoke name="look">NS<more>NS</more>NS<maybe>nullNS</maybe>NS<other>'
        "NS<item>trueNS</item>NS</other>NS<deep>NS<list>\nNS</list>NS<point>NS<x>1NS</x>NS</point>NS</deep>"
        "NS</invoke>NS</tool_call>".replace("NS", MINIMAX_NAMESPACE),
        [call(more={}, maybe=None, other=[True], deep={"list": [], "point": {"x": "1"}})],
    ),
    ("minimax_m3", f'{MINIMAX_NAMESPACE}<tool_call>{MINIMAX_NAMESPACE}<invoke name="look">'
     f'{MINIMAX_NAMESPACE}<more>{{"a": [1]}}{MINIMAX_NAMESPACE}</more>'
     f"{MINIMAX_NAMESPACE}</invoke>", [call(more={"a": [1]})]),
    (
        "minicpm5",
        '<function name="look"><param name="at"><![CDATA[a</param>\n]]>b]]></param>'
        '<param name="n">3</param><param name="more">{\'a\': True}</param></function>',
        [call(at="a</param>\n]]>b", n=3, more={"a": True})],
    ),
    ("minicpm5", '<function name="look"><param name="n"><![CDATA[3]]></param></function>',
     [call(n=3)]),
    ("minicpm5", '<function name="look"><param name="maybe"><![CDATA[3]]></param></function>',
     [call(maybe="3")]),
    (
        "muse",
        ' to=look<|message|><atem:function_calls>\n<atem:invoke name="look">\n<atem:parameter '
        'name="n">3</atem:parameter>\n</atem:invoke>\n<atem:invoke name="wait">\n</atem:invoke>\n'
        "</atem:function_calls><|eom|><|start|>assistant to=wait<|message|><atem:function_calls>"
        '<atem:invoke name="wait"></atem:invoke></atem:function_calls><|eot|>',
        [call(n=3), call("wait"), call("wait")],
    ),
    (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="at"'
        ' type="string"<|sep|>12<|close|>argument<|sep|><|open|>argument key="n" type="integer"'
        '<|sep|>3<|close|>argument<|sep|><|open|>argument key="maybe" type="null"<|sep|>null'
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        [call(at="12", n=3, maybe=None)],
    ),
    (
        "command_r",
        'Action:\n```json\n[\n    {\n        "tool_name": "look",\n        "parameters": {"n": 1}'
        "\n    }\n]```\n",
        [call(n=1)],
    ),
    ("gigachat3", '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "look", "arguments": {}}'
     "<|message_sep|>\n\n", [call()]),
    ("functionary3_2", '>>>look\n{"n": 1}>>>wait\n{}', [call(n=1), call("wait")]),
    ("minicpm3", '<|thought_start|>\n<|thought_end|>\n<|tool_call_start|>\n```python\n'
     'look(at="\\u00e9",on=true,maybe=null)\nwait()\n```\n<|tool_call_end|>\n',
     [call(at="é", on=True, maybe=None), call("wait")]),
    ("xlam", '[{"name": "look", "arguments": {"n": 1}}, {"name": "wait", "arguments": {}}]',
     [call(n=1), call("wait")]),
    ("granite_20b", '<function_call> {"name": "look", "arguments": {}} <function_call> {"name": '
     '"wait", "arguments": {}}', [call(), call("wait")]),
    (
        "llama3",
        ' {"name": "look", "parameters": {}}; {"name": "wait", "arguments": {}}',
        [call(), call("wait")],
    ),
    ("granite3", '<|tool_call|> [ {"name": "look", "arguments": {}} ]', [call()]),
    ("granite3", '<|tool_call|>[{"name": "look", "arguments": {}}', [call()]),
    ("command", '<|START_ACTION|>[{"tool_call_id": 7, "tool_name": "look", "parameters": {}}]',
     [call(call_id="7")]),
    ("qwen3_coder", "<function=look>\n<parameter=on>True</parameter></function>\n</tool_call>",
     [call(on=True)]),
    ("qwen3_coder", "<tool_call><function=look><parameter=more>{'a': None}</parameter></function>",
     [call(more={"a": None})]),
    ("qwen3_coder", "<tool_call><function=look><parameter=n>many</parameter></function>",
     [call(n="many")]),
    ("qwen3_coder", "<tool_call><function=look><parameter=at>12</parameter></function>",
     [call(at="12")]),
    ("qwen3_coder", "<tool_call><function=look><parameter=kind>a</parameter></function>",
     [call(kind="a")]),
    ("qwen3_coder", "<tool_call><function=look><parameter=count>3</parameter></function>",
     [call(count=3)]),
    ("qwen3_coder", "<tool_call><function=look><parameter=maybe>null</parameter></function>",
     [call(maybe=None)]),
    ("qwen3_coder", "<tool_call><function=look><parameter=maybe>12</parameter></function>",
     [call(maybe="12")]),
    ("qwen3_coder", "<tool_call><function=look><parameter=other>[1]</parameter></function>",
     [call(other=[1])]),
    ("qwen3_coder", "<tool_call><function=look>and<parameter=at>\n\na\n\n</parameter></function>",
     [call(at="\na\n")]),
    ("glm4", "<tool_call>look<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>",
     [call(n=1)]),
    ("glm4", "<tool_call>look</tool_call><tool_call>wait\n</tool_call>", [call(), call("wait")]),
    ("pythonic", """[look(at="a'\\x41\\n\\d\\\nb", more={'a': [None,],}, n=-1,), wait()]""",
     [call(at="a'A\n\\db", more={"a": [None]}, n=-1), call("wait")]),
    ("pythonic", "<|python_start|>[look(on=false)]<|python_end|>", [call(on=False)]),
    ("gemma3", "```tool_code\n[look()]\n```", [call()]),
    ("gemma3", "```tool_code\nlook()\nwait()\n```", [call(), call("wait")]),
    ("function_gemma",
     "<start_function_call>call:look{at:<escape>a{\"<escape>,more:{a:[1,true]}}<end_function_call>",
     [call(at='a{"', more={"a": [1, True]})]),
    ("gpt_oss",
     ' to=functions.look<|channel|>commentary json<|message|>{"n": 1}<|call|>', [call(n=1)]),
    ("gpt_oss",
     '<|channel|>commentary to=look <|constrain|>json<|message|>{"n": 1}', [call(n=1)]),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "expected"), LOOSE)
def test_loose_forms_of_calls_are_read(format: str, text: str, expected: list[Any]) -> None:
    answer = parse(format, text)
    assert calls_of(answer) == expected
    assert (answer.content, answer.note) == ("", "")


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("mistral", '[TOOL_CALLS]look{"n": 1}[TOOL_CALLS]wait[ARGS]{}'),
        ("mistral", '[TOOL_CALLS]look[ARGS]{"n": 1}[TOOL_CALLS]wait[CALL_ID][ARGS]{}'),
        (
            "mistral_list",
            '[TOOL_CALLS][{"name": "look", "arguments": {"n": 1}, "id": "abcdefghi"},'
            ' {"name": "wait", "arguments": {}}]',
        ),
    ],
)
def test_calls_without_an_id_before_the_arguments_get_one_that_the_template_accepts(
    format: str, text: str
) -> None:
    parser = AnswerParser(BY_NAME[format], TOOLS)
    parts = [part for character in text for part in parser.push_text(character)]
    parts += parser.end()
    answer = parser.answer
    assert (answer.content, answer.note) == ("", "")
    assert [(each.name, each.arguments) for each in answer.calls] == [
        ("look", '{"n": 1}'),
        ("wait", "{}"),
    ]
    ids = [each.id for each in answer.calls]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in ids)
    assert len({*ids, "abcdefghi"}) == 3
    calls = [part for part in parts if isinstance(part, CallPart)]
    assert [part.id for part in calls if part.name] == ids
    assert not any(part.id for part in calls if not part.name)


def test_an_id_that_comes_after_the_arguments_is_left_out() -> None:
    text = '<|START_ACTION|>[{"tool_name": "look", "parameters": {}, "tool_call_id": "7"}]'
    assert calls_of(parse("command", text)) == [call()]


def test_the_parts_of_an_answer_keep_the_order_of_the_model() -> None:
    text = (
        '<think>Hm.</think>One.<tool_call>{"name": "look"}</tool_call>Two.<think>Well.</think>'
        '<tool_call>{"name": "wait"}</tool_call>\n\nThree.'
    )
    answer = parse("hermes", text)
    look, wait = answer.calls
    assert answer.parts == (
        ReasoningPart("Hm."),
        TextPart("One."),
        look,
        TextPart("\nTwo."),
        ReasoningPart("\nWell."),
        wait,
        TextPart("\n\nThree."),
    )
    assert (answer.content, answer.reasoning) == ("One.\nTwo.\n\nThree.", "Hm.\nWell.")


def test_an_answer_without_an_order_has_reasoning_text_and_calls() -> None:
    look = ToolCall("look", "{}")
    whole = ParsedAnswer("Text.", "Hm.", (look,))
    assert whole.parts == (ReasoningPart("Hm."), TextPart("Text."), look)
    assert ParsedAnswer("").parts == ()


NOT_BEGUN = [
    ("hermes", '<tool_call>\n{"name": 5}\n</tool_call>', "a call has no name"),
    ("hermes", "<tool_call>no JSON</tool_call>", "does not begin with '{'"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "a call has no name"),
    ("hermes", '<tool_call>{"name": "look" "arguments": {}}', "',' or '}' is missing"),
    ("hermes", '<tool_call>{"name", "look"}', "':' is missing after a key"),
    ("hermes", "<tool_call>{}</tool_call>", "a call has no name"),
    ("hermes", '<tool_call>{"name": "look", "arguments": [1]}', "are no object"),
    ("hermes", '<tool_call>{"name": "look", "arguments": "[1]"}', "are no object"),
    ("hermes", '<tool_call>{"name": "look", "arguments": "{} {}"}', "comes after the value"),
    ("hermes", '<tool_call>{"na', "ends inside a string"),
    ("hermes", "<tool_call>", "does not begin with '{'"),
    ("mistral", "[TOOL_CALLS]lo", "ends before the name of a call is complete"),
    ("mistral", f"[TOOL_CALLS]{'look' * 100}[ARGS]{{}}", "a name is too long"),
    ("mistral", "[TOOL_CALLS][ARGS]{}", "a call has no name"),
    ("qwen3_coder", "<tool_call>look</tool_call>", "does not begin with '<function='"),
    ("kimi_k2", "<|tool_calls_section_begin|>\n", "none came"),
    ("kimi_k2", "<|tool_calls_section_begin|> so <|tool_calls_section_end|>", ""),
    ("lfm2", "<|tool_call_start|>[1, 2]", "no '(' after its name"),
    ("gpt_oss", "<|channel|>commentary to=functions.look<|message|>[]<|call|>", "are no object"),
    ("muse", " to=look<|message|>So.<|eot|>", "does not begin with '<atem:invoke name="),
]


@pytest.mark.parametrize(("format", "text", "note"), NOT_BEGUN)
def test_malformed_calls_are_text(format: str, text: str, note: str) -> None:
    answer = parse(format, text)
    assert answer.calls == ()
    assert answer.content.strip() == text.strip()
    assert note in answer.note


@pytest.mark.parametrize(
    ("format", "text", "note"),
    [
        ("hermes", '<tool_call>{"name": "look", "arguments": {"n": x}}</tool_call>', "'x' is not"),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"n": 1,}}</tool_call>', "a key"),
        ("hermes", '<tool_call>{"name": "look", "arguments": {n: 1}}</tool_call>', "a key"),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"n" 1}}</tool_call>', "':'"),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"n": 01}}</tool_call>', "'01'"),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"n": 1]}</tool_call>', "',' or"),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"a": "\\u12"}}</tool_call>', "u12"),
        ("hermes", '<tool_call>{"name": "look", "arguments": {}, x}</tool_call>', "has no name"),
        (
            "hermes",
            f'<tool_call>{{"name": "look", "arguments": {{"n": {"[" * 128}}}}}</tool_call>',
            "nested deeper than 128",
        ),
        (
            "hermes",
            f'<tool_call>{{"name": "look", "arguments": {{"n": {"1" * 2000}}}}}</tool_call>',
            "a word is longer than 1024",
        ),
        ("lfm2", "<|tool_call_start|>[look(1)]<|tool_call_end|>", "has no keyword"),
        ("lfm2", "<|tool_call_start|>[look(n=1 m=2)]<|tool_call_end|>", "',' or ')'"),
        (
            "glm4",
            "<tool_call>look\n<arg_key>n</arg_key>1</tool_call>",
            "the parameter 'n' has no value",
        ),
        (
            "minimax_m3",
            'NS<tool_call>NS<invoke name="look">NS<n>1NS</m>NS</invoke>NS</tool_call>'.replace(
                "NS", MINIMAX_NAMESPACE
            ),
            "the tag 'm' closes 'n'",
        ),
        (
            "minimax_m3",
            f'NS<tool_call>NS<invoke name="look">NS<n>{"NS<a>" * 128}NS</tool_call>'.replace(
                "NS", MINIMAX_NAMESPACE
            ),
            "nested deeper than 128",
        ),
        (
            "gpt_oss",
            '<|channel|>commentary to=functions.look<|message|>{"n": x}<|end|>',
            "'x' is not a value",
        ),
    ],
)
def test_a_call_that_turns_out_malformed_is_dropped(format: str, text: str, note: str) -> None:
    after = "" if format == "gpt_oss" else "\nSo."
    answer = parse(format, text + after)
    assert answer.calls == ()
    assert answer.content.strip() == after.strip()
    assert "the call of 'look' was left out: " in answer.note
    assert note in answer.note


def test_calls_after_a_malformed_one_are_read() -> None:
    good = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    for bad in ("<tool_call>", "<tool_call>{", '<tool_call>{"name": "look", "arguments": {"n": }'):
        answer = parse("hermes", bad + good)
        assert calls_of(answer) == [call()]
        assert answer.note
    text = (
        '<minimax:tool_call><invoke name="other"></invoke><invoke name="look"></invoke>'
        "</minimax:tool_call>"
    )
    answer = parse("minimax_m2", text)
    assert calls_of(answer) == [call()]
    assert "other" in answer.content


def test_ordinary_json_is_no_call_of_a_format_without_markers() -> None:
    for text in (
        '{"name": "Bob", "parameters": {}}',
        '[{"name": "Bob"}]',
        '[{"name": "look"}]',
        '{"name": "look"}',
        '{"a": 1}',
        "{",
        "[1]",
    ):
        for format in ("llama3", "pythonic", "xlam"):
            answer = parse(format, text)
            assert (answer.content, answer.calls, answer.note) == (text, (), "")


def test_llama_4_encloses_the_text_before_its_calls() -> None:
    text = '<|python_start|>I look.<|python_end|>{"name": "look", "parameters": {}}'
    answer = parse("llama4", text)
    assert (answer.content, answer.note) == ("I look.", "")
    assert calls_of(answer) == [call()]


def test_end_tokens_that_are_markers_as_well_are_no_text() -> None:
    assert parse("solar", "<|content|>Yes.<|end|>").content == "Yes."
    assert parse("gigachat", "Yes.<|message_sep|>").content == "Yes."


def test_deep_arguments_are_read_up_to_the_limit() -> None:
    deep = "[" * 127 + "]" * 127
    answer = parse("hermes", f'<tool_call>{{"name": "look", "arguments": {{"n": {deep}}}}}')
    assert answer.calls[0].arguments == f'{{"n": {deep}}}'


def test_text_without_a_header_is_text_in_channels() -> None:
    assert parse("gpt_oss", "Just text.").content == "Just text."
    long = "word " * 300
    assert parse("gpt_oss", f"{long}<|end|>").content == long


def test_a_tool_must_have_a_name_and_a_schema() -> None:
    nameless: list[dict[str, Any]] = [{}, {"function": {}}, {"function": "look"}, {"name": ""}]
    for tool in nameless:
        with pytest.raises(RequestError, match="has no name"):
            AnswerParser(BY_NAME["hermes"], [tool])
    with pytest.raises(RequestError, match="must be a JSON schema"):
        AnswerParser(BY_NAME["hermes"], [{"name": "look", "parameters": [1]}])
