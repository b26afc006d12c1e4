"""Calls of a function in the text of a module, found without a syntax tree of the whole module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from interposer_tools._seams.signature import CallShape

__all__ = ["calls_in"]

# A bracket, or a string or comment, in which brackets do not count.
_TOKEN = re.compile(
    r"""[()\[\]{}]|\#[^\n]*|\"{3}.*?\"{3}|'{3}.*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""",
    re.DOTALL,
)
_DEFINITIONS = ("def ", "class ")
# `super().name(...)` and `Class.name(...)` call one known class, and no object of another one.
_CLASS_RECEIVER = re.compile(r"(?:\b[A-Z]\w*|\bsuper\(\))\.$")
_MAX_CHARACTERS = 10_000


def calls_in(text: str, name: str) -> Iterator[tuple[CallShape, int]]:
    """Yield the arguments and the line of each call of ``name`` or ``x.name`` in ``text``.

    Calls of ``super().name`` and ``Class.name`` are left out.
    """
    # A search for plain text is fifty times as fast as one for a pattern.
    sought = f"{name}("
    position = text.find(sought)
    while position >= 0:
        start = position + len(name)
        before = text[max(position - 6, 0) : position]
        position = text.find(sought, start)
        if before[-1:].isidentifier() or before[-1:].isdigit() or before.endswith(_DEFINITIONS):
            continue
        if _CLASS_RECEIVER.search(text, max(start - len(name) - 80, 0), start - len(name)):
            continue
        end = _closing_bracket(text, start)
        if end is None:
            continue
        try:
            expression = ast.parse(f"call{text[start : end + 1]}", mode="eval").body
        except SyntaxError:
            continue  # the name stands in a string or comment
        if isinstance(expression, ast.Call):
            yield CallShape.of(expression), text.count("\n", 0, start) + 1


def _closing_bracket(text: str, start: int) -> int | None:
    depth = 0
    for token in _TOKEN.finditer(text, start, start + _MAX_CHARACTERS):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
            if not depth:
                return token.start()
    return None
