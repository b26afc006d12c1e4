"""An extension of griffe that reads the sources of this project as they are written.

Sections of one line, such as ``Returns: ``[T, H]``, dtype of ``x``.``, become paragraphs of their
own: griffe knows only sections whose text begins on the next line. Constants that are assigned as
a tuple, ``A, B = 1, 2``, become members one by one.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from griffe import Attribute, Extension, Module, Object

__all__ = ["AsWritten"]

_SECTION = re.compile(r"^(Dims|Raises|Returns|Sources?|Yields): +(?=\S)", re.MULTILINE)


class AsWritten(Extension):
    """Completes what griffe reads."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Give each section of one line a paragraph with its name in bold."""
        if obj.docstring:
            obj.docstring.value = _SECTION.sub(r"\n**\1:** ", obj.docstring.value)

    def on_module_members(self, *, node: Any, mod: Module, **_: Any) -> None:
        """Add the constants of tuple assignments."""
        for statement in node.body if isinstance(node, ast.Module) else ():
            if not isinstance(statement, ast.Assign):
                continue
            names, values = statement.targets[0], statement.value
            if isinstance(names, ast.Tuple) and isinstance(values, ast.Tuple):
                for name, value in zip(names.elts, values.elts, strict=True):
                    if isinstance(name, ast.Name):
                        constant = Attribute(name.id, lineno=name.lineno, value=ast.unparse(value))
                        mod.set_member(name.id, constant)
