"""Constraints on tool calls, derived from a model's response template.

A response template defines how a call is parsed. A simple template also defines how a call must be
written.
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
    """Return the constraint that allows exactly one call of one of ``tools``.

    Args:
        template: Response template of the checkpoint; None without one.
        tools: Tools as chat templates read them, with JSON schemas.
        specials: Ids of control tokens by text, because a grammar must name such tokens by id.
    Raises: RequestError: the template does not define how calls are written, or uses unsupported
        features.
    """
    if template is None:
        raise _unsupported("it has no response template")
    field = template.get("fields", {}).get("tool_calls")
    if not isinstance(field, Mapping):
        raise _unsupported("its response template reads no calls")
    if field.get("content", "text") != "json" or field.get("content_args"):
        raise _unsupported("its calls are not plain JSON")
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
    opening = _literal(field, "open", name)
    shape = field.get("transform", "{content}")
    if isinstance(shape, Mapping) and shape.get("type") == "function":
        shape = shape.get("function")
    if shape == {"name": "{name}", "arguments": "{content}"}:
        parts = [*_terms(opening, specials), arguments]
    elif shape == "{content}":
        prefix = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        parts = [
            *_terms(opening, specials),
            r'"\n"?',
            *_terms(prefix, {}),
            arguments,
            '"}"',
            r'"\n"?',
        ]
    else:
        raise _unsupported(f"its calls become {field.get('transform')!r:.200}")
    return " ".join([*parts, *_terms(_literal(field, "close", name), specials)])


def _guidance() -> dict[str, str]:
    return {"whitespace_pattern": _WHITE_SPACE}


def _literal(field: Mapping[str, Any], side: str, name: str) -> str:
    """Return the text that opens or closes a call of the function ``name``."""
    literal = field.get(side)
    if literal is not None:
        return str(literal if isinstance(literal, str) else literal[0])
    pattern = str(field.get(f"{side}_pattern", ""))
    # Derive a candidate text from the pattern, and let the pattern confirm it below.
    candidate = re.sub(r"\\(.)", r"\1", _NAME.sub(lambda _: name, _SPACE.sub("", pattern)))
    for text in (candidate, ""):
        try:
            match = re.fullmatch(pattern, text, re.DOTALL)
        except re.error:
            break
        if match is not None and match.groupdict() in ({}, {"name": name}):
            return text
    raise _unsupported(f"calls {side} with the pattern {pattern!r:.200}")


def _terms(text: str, specials: Mapping[str, int]) -> Iterator[str]:
    """Yield grammar terms for a text: literals, and control tokens by id."""
    if not text:
        return
    pattern = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
    for part in re.split(f"({pattern})", text) if pattern else [text]:
        if part in specials:
            yield f"<[{specials[part]}]>"
        elif part:
            yield json.dumps(part)


def _unsupported(reason: str) -> RequestError:
    return RequestError(
        "A call cannot be required of this model, since how it writes calls is not known: "
        f"{reason}. Try: tool_choice 'auto'"
    )
