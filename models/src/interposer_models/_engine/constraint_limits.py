"""Bounds on the constraints of clients that nobody vouches for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from interposer.errors import ConfigError, RequestError
from interposer_models._constraint import Constraint

_RULE = re.compile(r"^[ \t]*[^\s:|/\"']+[ \t]*(?:::=|:)", re.MULTILINE)


@dataclass(frozen=True)
class ConstraintLimits:
    """Bounds on what compiling and following a constraint may cost.

    With them, a process of its own compiles each constraint first, so that one that ends the
    process by its depth or its size costs its client alone.

    Attributes:
        text_bytes: of one constraint as UTF-8.
        parts: rules of a grammar, texts of a choice divided by 32, ``$ref`` of a schema.
        depth: levels of a schema, or of brackets in a pattern.
        seconds: of processor time that compiling one takes.
        each_bytes: of memory that one takes once it is compiled.
        all_bytes: of memory for all that are in use or kept for later requests.
        mask_seconds: of processor time in which the tokens that may come next are found; a
            request for which it takes longer ends with the reason ``"constraint"``.
    Raises: ConfigError: one of them is not positive.
    """

    text_bytes: int = 512 * 2**10
    parts: int = 2000
    depth: int = 128
    seconds: float = 5.0
    each_bytes: int = 64 * 2**20
    all_bytes: int = 256 * 2**20
    mask_seconds: float = 0.1

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} of ConstraintLimits is {value!r}, must be positive")

    def check(self, constraint: Constraint) -> None:
        """Refuse a text that is too large to be compiled, in time that grows with it only.

        Raises: RequestError: the text names what there is too much of.
        """
        text, kind = constraint.text, constraint.kind
        _check(kind, "bytes", len(text.encode()), self.text_bytes)
        if kind == "JSON schema":
            depth, refs = _schema_size(json.loads(text))
            _check(kind, "levels", depth, self.depth)
            _check(kind, "$ref", refs, self.parts)
        elif kind == "choice":
            _check(kind, "texts", len(json.loads(text)), 32 * self.parts)
        else:
            _check(kind, "levels of brackets", _bracket_depth(text), self.depth)
            if kind == "grammar":
                _check(kind, "rules", len(_RULE.findall(text)), self.parts)


def _check(kind: str, what: str, count: int, allowed: int) -> None:
    if count > allowed:
        raise RequestError(f"The {kind} has {count} {what}; allowed are {allowed}")


def _schema_size(schema: Any) -> tuple[int, int]:
    """Return the number of levels of objects and lists of a schema, and that of its references."""
    depth, refs, level = 0, 0, [schema]
    while level:
        depth += 1
        refs += sum("$ref" in value for value in level if isinstance(value, dict))
        below = chain.from_iterable(v.values() if isinstance(v, dict) else v for v in level)
        level = [value for value in below if isinstance(value, dict | list)]
    return depth, refs


def _bracket_depth(text: str) -> int:
    """Return the deepest nesting of brackets; those that stand for themselves count too."""
    depth = deepest = 0
    for bracket in re.findall(r"\\.|[()\[\]{}]", text):
        if bracket in ("(", "[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif len(bracket) == 1:
            depth = max(0, depth - 1)
    return deepest
