"""A package with copies of some functions and all necessary definitions.

Functions, classes and constants are copied unchanged, with the comments above. Imports become
relative, so that the package works in any folder and under any name. Unused definitions and
decorators that only declare an op are omitted.
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
"""Name of a module, and a name that the module defines."""

_NOTE = "# Copied from {module} by `interposer hub-kernels`: edit the original and run it again.\n"


class SourceTree:
    """A new package, filled with copies of definitions and of all definitions that these use."""

    def __init__(self, packages: Iterable[str]) -> None:
        """Create a package without definitions.

        Args:
            packages: packages whose definitions are copied; all other packages are imported.
        """
        self._packages = frozenset(packages)
        self._needed: dict[str, set[str]] = {}

    def add(self, module: str, name: str) -> Definition:
        """Add a definition with all dependencies.

        Returns: the defining module and the name there; ``module`` may only import ``name``.
        Raises: ConfigError: the definition is not in the source.
        """
        definition = self._resolved(module, name)
        self._include(*definition)
        return definition

    def place(self, module: str) -> PurePosixPath:
        """Return the path of a module in the new package."""
        path = PurePosixPath(*module.split("."))
        return path / "__init__.py" if source_module(module).is_package else path.with_suffix(".py")

    def files(self) -> dict[PurePosixPath, str]:
        """Return the files of the package by path, including JSON data files."""
        texts = {self.place(module): self._text(module) for module in sorted(self._needed)}
        # Relative imports need an ``__init__.py`` in every folder.
        folders = {parent for path in texts for parent in path.parents} - {PurePosixPath()}
        for folder in sorted(folders):
            texts.setdefault(folder / "__init__.py", "")
        for module in sorted(self._needed):
            texts.update(_data_files(source_module(module), self.place(module)))
        return texts

    def _include(self, module: str, name: str) -> None:
        names = self._needed.setdefault(module, set())
        if name in names:  # also ends the recursion of definitions that need each other
            return
        names.add(name)
        source = source_module(module)
        for needed in sorted(self._used(source, source.bindings[name])):
            if needed in source.bindings:
                self._include(module, needed)
            elif imported := self._inside(source, needed):
                self._include(*self._resolved(imported.module, imported.name))

    def _used(self, source: SourceModule, statement: Binding) -> set[str]:
        """Return the module-level names that a statement uses.

        Annotations of functions never run, so no further module is copied for names that occur only
        there. Such names from this module and from foreign packages are included for readers.
        """
        names, annotations = needed_names(
            statement, decorated=not _only_declares(source, statement)
        )
        annotations = {name for name in annotations if self._inside(source, name) is None}
        return {n for n in names | annotations if n in source.bindings or n in source.imported}

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
        statements = [s for s in source.tree.body if self._needed[module] & _names_of(source, s)]
        names = set[str]().union(*(self._used(source, statement) for statement in statements))
        imports = [self._import(source, name) for name in sorted(names)]
        # ``clean=False`` keeps the indentation, so the copy is identical.
        document = ast.get_docstring(source.tree, clean=False)
        parts = [
            _NOTE.format(module=module).rstrip(),
            *([f'"""{document}"""'] if document else []),
            "from __future__ import annotations",
            "\n".join(sorted(filter(None, imports))),
            *(_without_declarations(source, statement) for statement in statements),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _import(self, source: SourceModule, name: str) -> str:
        imported = source.imported.get(name)
        if imported is None or name in source.bindings:
            return ""
        if self._inside(source, name) is None:
            return imported.statement
        module, defined = self._resolved(imported.module, imported.name)
        # One dot per folder leads from the importing module up to the root of the package.
        dots = "." * len(self.place(source.name).parts)
        alias = "" if defined == name else f" as {name}"
        return f"from {dots}{module} import {defined}{alias}"


def _names_of(source: SourceModule, statement: ast.stmt) -> set[str]:
    return {name for name, binding in source.bindings.items() if binding is statement}


def _only_declares(source: SourceModule, statement: Binding) -> bool:
    """Return whether the decorators only declare a function, without changing the code."""
    if not isinstance(statement, ast.FunctionDef) or not statement.decorator_list:
        return False
    value: Any = getattr(import_module(source.name), statement.name)
    if isinstance(value, CustomOp):
        return True
    is_plain = isinstance(value, FunctionType) and not hasattr(value, "__wrapped__")
    # A decorator that wraps or replaces the function must be copied.
    return is_plain and value.__module__ == source.name and value.__code__.co_name == statement.name


def _without_declarations(source: SourceModule, statement: Binding) -> str:
    text = source.text_of(statement)
    if not isinstance(statement, ast.FunctionDef) or not _only_declares(source, statement):
        return text
    omitted = set[int]()
    for decorator in statement.decorator_list:
        omitted.update(range(decorator.lineno, (decorator.end_lineno or decorator.lineno) + 1))
    last = statement.end_lineno or statement.lineno
    first = last - len(text.splitlines()) + 1
    numbered = enumerate(text.splitlines(), first)
    return "\n".join(line for number, line in numbered if number not in omitted)


def _data_files(source: SourceModule, place: PurePosixPath) -> dict[PurePosixPath, str]:
    """Return the JSON files in data folders (folders without modules) next to the module."""
    texts: dict[PurePosixPath, str] = {}
    for path in sorted(source.path.parent.glob("*/*.json")):
        if not any(path.parent.glob("*.py")):
            relative = Path(path).relative_to(source.path.parent).as_posix()
            texts[place.parent / relative] = path.read_text(encoding="utf-8")
    return texts
