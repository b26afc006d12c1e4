"""The sources that some functions need, cut to what they use, as a package of their own.

Functions, classes and constants are copied as they stand, with the comments above them. Imports
are written anew, relative to the package, so that it works wherever it lies and under any name.
Decorators that only declare a function, and what nothing uses, are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path, PurePosixPath
from types import FunctionType
from typing import Any

from interposer import CustomOp
from interposer.errors import ConfigError
from interposer_tools._hub.source_module import (
    Binding,
    ImportedName,
    SourceModule,
    needed_names,
    source_module,
)

Definition = tuple[str, str]
"""A module, and a name that it defines."""

_NOTE = "# Copied from {module} by `interposer hub-kernels`: edit it there, and write this anew.\n"


class SourceTree:
    """Definitions of some packages, with all that they need of them."""

    def __init__(self, packages: Iterable[str]) -> None:
        """Start with nothing.

        Args:
            packages: those whose modules are copied; others are imported.
        """
        self._packages = frozenset(packages)
        self._needed: dict[str, set[str]] = {}

    def add(self, module: str, name: str) -> Definition:
        """Take a definition along, and return where it stands.

        Raises: ConfigError: it cannot be followed.
        """
        definition = self._resolved(module, name)
        self._include(*definition)
        return definition

    def place(self, module: str) -> PurePosixPath:
        """Return where a module lies in the package."""
        path = PurePosixPath(*module.split("."))
        return path / "__init__.py" if source_module(module).is_package else path.with_suffix(".py")

    def files(self) -> dict[PurePosixPath, str]:
        """Return the texts of the package by their places, with the data that lie beside them."""
        found = {self.place(module): self._text(module) for module in sorted(self._needed)}
        folders = {parent for path in found for parent in path.parents} - {PurePosixPath()}
        for folder in sorted(folders):
            found.setdefault(folder / "__init__.py", "")
        for module in sorted(self._needed):
            found.update(_data_beside(source_module(module), self.place(module)))
        return found

    def _include(self, module: str, name: str) -> None:
        names = self._needed.setdefault(module, set())
        if name in names:
            return
        names.add(name)
        source = source_module(module)
        for needed in sorted(self._used(source, source.bindings[name])):
            if needed in source.bindings:
                self._include(module, needed)
            elif imported := self._inside(source, needed):
                self._include(*self._resolved(imported.module, imported.name))

    def _used(self, source: SourceModule, statement: Binding) -> set[str]:
        """Return the names of the module that a statement uses.

        What only annotations of functions name is there for readers: it is taken from this module
        and from others that are imported, but no further module is copied for it.
        """
        names, noted = needed_names(statement, decorated=not _only_declares(source, statement))
        noted = {name for name in noted if self._inside(source, name) is None}
        return {n for n in names | noted if n in source.bindings or n in source.imported}

    def _inside(self, source: SourceModule, name: str) -> ImportedName | None:
        imported = source.imported.get(name)
        if imported and imported.module.partition(".")[0] in self._packages:
            return imported
        return None

    def _resolved(self, module: str, name: str) -> Definition:
        source = source_module(module)
        if name in source.bindings:
            return module, name
        imported = source.imported.get(name) or source.lazy.get(name)
        if imported is None or imported.module.partition(".")[0] not in self._packages:
            raise ConfigError(f"{name!r} of {module} is not defined in its source")
        return self._resolved(imported.module, imported.name)

    def _text(self, module: str) -> str:
        source = source_module(module)
        kept = [s for s in source.tree.body if self._needed[module] & _names_of(source, s)]
        used = set[str]().union(*(self._used(source, statement) for statement in kept))
        imports = [self._import(source, used, name) for name in sorted(used)]
        document = ast.get_docstring(source.tree, clean=False)
        parts = [
            _NOTE.format(module=module).rstrip(),
            *([f'"""{document}"""'] if document else []),
            "from __future__ import annotations",
            "\n".join(sorted(filter(None, imports))),
            *(_without_declarations(source, statement) for statement in kept),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _import(self, source: SourceModule, used: set[str], name: str) -> str:
        imported = source.imported.get(name)
        if imported is None or name in source.bindings:
            return ""
        if self._inside(source, name) is None:
            return imported.statement
        module, defined = self._resolved(imported.module, imported.name)
        # From the folder of the module, up to the package, and down again.
        ups = "." * len(self.place(source.name).parts)
        renamed = "" if defined == name else f" as {name}"
        return f"from {ups}{module} import {defined}{renamed}"


def _names_of(source: SourceModule, statement: ast.stmt) -> set[str]:
    return {name for name, bound in source.bindings.items() if bound is statement}


def _only_declares(source: SourceModule, statement: Binding) -> bool:
    """Return whether the decorators of a function leave it as it is, or make an op of it."""
    if not isinstance(statement, ast.FunctionDef) or not statement.decorator_list:
        return False
    made: Any = getattr(import_module(source.name), statement.name)
    if isinstance(made, CustomOp):
        return True
    plain = isinstance(made, FunctionType) and not hasattr(made, "__wrapped__")
    return plain and made.__module__ == source.name and made.__code__.co_name == statement.name


def _without_declarations(source: SourceModule, statement: Binding) -> str:
    text = source.text_of(statement)
    if not isinstance(statement, ast.FunctionDef) or not _only_declares(source, statement):
        return text
    dropped = set[int]()
    for each in statement.decorator_list:
        dropped.update(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    last = statement.end_lineno or statement.lineno
    first = last - len(text.splitlines()) + 1
    numbered = enumerate(text.splitlines(), first)
    return "\n".join(line for number, line in numbered if number not in dropped)


def _data_beside(source: SourceModule, place: PurePosixPath) -> dict[PurePosixPath, str]:
    """Return the texts that are no modules, in folders without modules beside this one."""
    found: dict[PurePosixPath, str] = {}
    for path in sorted(source.path.parent.glob("*/*.json")):
        if not any(path.parent.glob("*.py")):
            relative = Path(path).relative_to(source.path.parent).as_posix()
            found[place.parent / relative] = path.read_text(encoding="utf-8")
    return found
