"""A required call is written as the response template reads it, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from interposer.errors import RequestError
from interposer_engine._chat import call_constraint

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
WHOLE = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def template(**field: Any) -> dict[str, Any]:
    return {"fields": {"tool_calls": {"content": "json", "transform": WHOLE, **field}}}


def test_control_tokens_are_written_by_their_ids() -> None:
    asked = template(open=["<call>", "<c>"], close="end<|e|>")
    actual = call_constraint(asked, [LOOK], {"<call>": 7, "<|e|>": 9})
    assert actual.text.startswith(
        'start: <[7]> "\\n"? "{\\"name\\": \\"look\\", \\"arguments\\": "'
    )
    assert actual.text.endswith('"end" <[9]>\n')


def test_a_pattern_is_written_as_a_text_that_it_matches() -> None:
    asked = template(
        open_pattern=r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        close_pattern=r"</function>\s*</tool_call>",
        transform=NAMED,
    )
    text = call_constraint(asked, [LOOK], {}).text
    assert text.startswith('start: "<tool_call><function=look>" %json {')
    assert text.endswith('"</function></tool_call>"\n')
    nothing = call_constraint(template(open="[", close_pattern="$"), [LOOK], {})
    assert nothing.text.endswith('"}" "\\n"?\n')


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "it has no response template"),
        ({"fields": {"content": {}}}, "reads no calls"),
        (template(content="xml-inline"), "not plain JSON"),
        (template(content_args={"unquoted_keys": True}), "not plain JSON"),
        (template(open="[", close="]", transform={"x": "{content}"}), "its calls become"),
        (template(open_pattern="(a|b)", close="]"), r"calls open with the pattern '\(a\|b\)'"),
        (template(open="[", close_pattern="("), r"calls close with the pattern '\('"),
        (template(open_pattern=r"(?P<other>x)", close="]"), "calls open with the pattern"),
    ],
)
def test_unsupported_forms_of_calls_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=f"the format of its calls is unknown: .*{reason}"):
        call_constraint(given, [LOOK], {})


@pytest.mark.parametrize("tool", [{}, {"function": {}}, {"function": "look"}])
def test_a_tool_without_a_name_is_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="has no name"):
        call_constraint(template(open="[", close="]"), [tool], {})
