"""The form in which a model calls tools, as its response template describes it.

A template says how a call is read; where what it says is plain enough, it also says how one has to
be written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from interposer.errors import RequestError
from interposer_models._constraint import Constraint

_NAME = re.compile(r"\(\?P<name>(?:[^()\\]|\\.)*\)")
_SPACE = re.compile(r"\\s[*+?]|\\n[*?]")
_WHITE_SPACE = r"(?: |\n[ \t]{0,24})"


def call_constraint(
    template: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
    specials: Mapping[str, int],
) -> Constraint:
    """Return the constraint to one call of one of some tools.

    Args:
        template: the response template of the checkpoint; None where it has none.
        tools: as templates of chats read them, with JSON schemas.
        specials: ids of control tokens by their texts, since those are no texts to a grammar.
    Raises: RequestError: the template does not say how calls are written, or says it in a way that
        is not known here.
    """
    if template is None:
        raise _unknown("it has no response template")
    field = template.get("fields", {}).get("tool_calls")
    if not isinstance(field, Mapping):
        raise _unknown("its response template reads no calls")
    if field.get("content", "text") != "json" or field.get("content_args"):
        raise _unknown("its calls are not plain JSON")
    calls = [_call(field, tool, specials) for tool in tools]
    return Constraint.grammar("start: " + "\n     | ".join(calls) + "\n")


def _call(field: Mapping[str, Any], tool: Mapping[str, Any], specials: Mapping[str, int]) -> str:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"The tool {tool!r:.200} has no name. Try: {{'name': 'look', ...}}")
    schema = {**(function.get("parameters") or {}), "x-guidance": _guidance()}
    schema.setdefault("type", "object")
    try:
        arguments = f"%json {json.dumps(schema, allow_nan=False)}"
    except (TypeError, ValueError) as error:
        raise RequestError(f"The parameters of {name!r} are no JSON schema: {error}") from None
    opened = _literal(field, "open", name)
    shape = field.get("transform", "{content}")
    if isinstance(shape, Mapping) and shape.get("type") == "function":
        shape = shape.get("function")
    if shape == {"name": "{name}", "arguments": "{content}"}:
        parts = [*_text(opened, specials), arguments]
    elif shape == "{content}":
        front = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        parts = [*_text(opened, specials), r'"\n"?', *_text(front, {}), arguments, '"}"', r'"\n"?']
    else:
        raise _unknown(f"its calls become {field.get('transform')!r:.200}")
    return " ".join([*parts, *_text(_literal(field, "close", name), specials)])


def _guidance() -> dict[str, str]:
    return {"whitespace_pattern": _WHITE_SPACE}


def _literal(field: Mapping[str, Any], side: str, name: str) -> str:
    """Return a text that opens or closes a call of a name."""
    given = field.get(side)
    if given is not None:
        return str(given if isinstance(given, str) else given[0])
    pattern = str(field.get(f"{side}_pattern", ""))
    # A guess, which the pattern itself judges.
    guess = re.sub(r"\\(.)", r"\1", _NAME.sub(lambda _: name, _SPACE.sub("", pattern)))
    for text in (guess, ""):
        try:
            found = re.fullmatch(pattern, text, re.DOTALL)
        except re.error:
            break
        if found is not None and found.groupdict() in ({}, {"name": name}):
            return text
    raise _unknown(f"calls {side} with the pattern {pattern!r:.200}")


def _text(text: str, specials: Mapping[str, int]) -> Iterator[str]:
    """Yield what a grammar writes for a text, control tokens by their ids."""
    if not text:
        return
    known = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
    for part in re.split(f"({known})", text) if known else [text]:
        if part in specials:
            yield f"<[{specials[part]}]>"
        elif part:
            yield json.dumps(part)


def _unknown(reason: str) -> RequestError:
    return RequestError(
        "A call cannot be required of this model, since how it writes calls is not known: "
        f"{reason}. Try: tool_choice 'auto'"
    )
