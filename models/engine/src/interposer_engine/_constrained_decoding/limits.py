"""Limits on constraints that come from untrusted clients."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from interposer.errors import ConfigError, RequestError
from interposer_engine._sampling_params import Constraint

# The head of a rule: "name:" in Lark's syntax, "name ::=" in GBNF.
_RULE = re.compile(r"^[ \t]*[^\s:|/\"']+[ \t]*(?:::=|:)", re.MULTILINE)
_TEXTS_PER_RULE = 32


@dataclass(frozen=True)
class ConstraintLimits:
    """Limits on the size of constraints, and on the time and memory that compiling them takes.

    When limits are set, a child process compiles each constraint before the server does. A
    constraint that exhausts the stack or the memory then ends only the child process, and only
    the request that sent the constraint is refused.

    Attributes:
        text_bytes: Size of the text of one constraint, in bytes of UTF-8.
        rules: Rules of a grammar, or ``$ref`` of a JSON schema. A choice may have 32 times as
            many texts.
        depth: Nesting levels of a JSON schema, or of brackets in a regex or grammar.
        compile_seconds: Processor time to compile one constraint, in seconds.
        compiled_bytes: Memory of one compiled constraint, in bytes.
        total_bytes: Memory of all compiled constraints that are in use or cached, in bytes.
        mask_seconds: Processor time to compute one bit mask of allowed tokens, in seconds. A
            request that takes longer ends with the finish reason ``"constraint"``.
    Raises: ConfigError: a limit is not positive.
    """

    text_bytes: int = 512 * 2**10
    rules: int = 2000
    depth: int = 128
    compile_seconds: float = 5.0
    compiled_bytes: int = 64 * 2**20
    total_bytes: int = 256 * 2**20
    mask_seconds: float = 0.1

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} of ConstraintLimits is {value!r}, must be positive")

    def check(self, constraint: Constraint) -> None:
        """Refuse a constraint whose text exceeds a limit, before the constraint is compiled.

        The check takes time linear in the length of the text.

        Raises: RequestError: the text exceeds a limit; the message names the limit.
        """
        text, kind = constraint.text, constraint.kind
        _check(kind, "bytes", len(text.encode()), self.text_bytes)
        if kind == "JSON schema":
            depth, num_refs = _schema_size(json.loads(text))
            _check(kind, "levels", depth, self.depth)
            _check(kind, "$ref", num_refs, self.rules)
        elif kind == "choice":
            _check(kind, "texts", len(json.loads(text)), _TEXTS_PER_RULE * self.rules)
        else:
            _check(kind, "levels of brackets", _bracket_depth(text), self.depth)
            if kind == "grammar":
                _check(kind, "rules", len(_RULE.findall(text)), self.rules)


def _check(kind: str, unit: str, count: int, allowed: int) -> None:
    if count > allowed:
        raise RequestError(f"The {kind} has {count} {unit}; allowed are {allowed}")


def _schema_size(schema: Any) -> tuple[int, int]:
    """Return the nesting depth of a JSON schema and the number of its ``$ref`` references."""
    depth, num_refs, level = 0, 0, [schema]
    while level:
        depth += 1
        num_refs += sum("$ref" in value for value in level if isinstance(value, dict))
        children = chain.from_iterable(v.values() if isinstance(v, dict) else v for v in level)
        level = [value for value in children if isinstance(value, dict | list)]
    return depth, num_refs


def _bracket_depth(text: str) -> int:
    """Return the deepest nesting of brackets in a text, ignoring brackets after a backslash.

    Brackets in quotes or character classes count too.
    """
    depth = deepest = 0
    for bracket in re.findall(r"\\.|[()\[\]{}]", text):
        if bracket in ("(", "[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif len(bracket) == 1:
            depth = max(0, depth - 1)
    return deepest
