"""One Python module as source: what it binds at its top, and the names that each binding needs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from interposer.errors import ConfigError

Binding = ast.stmt
"""The statement at the top of a module that binds a name."""


@dataclass(frozen=True, slots=True)
class ImportedName:
    """A name that a module takes from another one.

    Attributes:
        module: the other one, empty for ``import x``.
        name: what it is called there.
        alias: what it is called here.
    """

    module: str
    name: str
    alias: str

    @property
    def statement(self) -> str:
        """The statement that binds it, for a module that is not part of the repository."""
        renamed = "" if self.alias in (self.name, self.name.partition(".")[0]) else self.alias
        suffix = f" as {renamed}" if renamed else ""
        return (
            f"from {self.module} import {self.name}{suffix}"
            if self.module
            else f"import {self.name}{suffix}"
        )


@dataclass(frozen=True)
class SourceModule:
    """The source of a module.

    Attributes:
        name: as it is imported.
        bindings: statements by the names that they bind; imports are not among them.
        imported: names that it takes from elsewhere.
        lazy: names that it takes from elsewhere when they are first used.
    """

    name: str
    path: Path
    lines: list[str]
    tree: ast.Module
    bindings: dict[str, Binding] = field(default_factory=dict)
    imported: dict[str, ImportedName] = field(default_factory=dict)
    lazy: dict[str, ImportedName] = field(default_factory=dict)

    @property
    def is_package(self) -> bool:
        """Say whether it is the ``__init__`` of a package."""
        return self.path.name == "__init__.py"

    def text_of(self, statement: Binding) -> str:
        """Return the text of a statement, with the comments right above it."""
        first = statement.lineno
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min((first, *(each.lineno for each in statement.decorator_list)))
        start = first - 1
        while start and self.lines[start - 1].startswith("#"):
            start -= 1
        return "\n".join(self.lines[start : statement.end_lineno])


@cache
def source_module(name: str) -> SourceModule:
    """Return the source of the module ``name``, which is not imported.

    Raises: ConfigError: there is none.
    """
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise ConfigError(f"there is no Python source of the module {name!r}")
    path = Path(spec.origin)
    text = path.read_text(encoding="utf-8")
    module = SourceModule(name, path, text.splitlines(), ast.parse(text))
    for statement in module.tree.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            for inner in statement.body:
                module.lazy.update((each.alias, each) for each in _imports(inner))
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            module.imported.update((each.alias, each) for each in _imports(statement))
        else:
            module.bindings.update(dict.fromkeys(_bound(statement), statement))
    return module


def needed_names(statement: Binding, *, decorated: bool) -> tuple[set[str], set[str]]:
    """Return the names that a statement needs when it runs, and those of its annotations only.

    Args:
        decorated: whether its decorators stay.
    """
    visitor = _Names(decorated=decorated)
    visitor.visit(statement)
    return visitor.names, visitor.annotations - visitor.names


class _Names(ast.NodeVisitor):
    """Names that are read; those of annotations of functions are apart, as they are not run."""

    def __init__(self, *, decorated: bool) -> None:
        self.names: set[str] = set()
        self.annotations: set[str] = set()
        self._decorated = decorated

    def visit_Name(self, node: ast.Name) -> None:
        self.names.add(node.id)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        parts = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        parts += [part for part in (node.args.vararg, node.args.kwarg) if part]
        noted = [part.annotation for part in parts if part.annotation]
        for annotation in [*noted, *([node.returns] if node.returns else [])]:
            found = _Names(decorated=True)
            found.visit(annotation)
            self.annotations |= found.names
        defaults = [each for each in (*node.args.defaults, *node.args.kw_defaults) if each]
        decorators = node.decorator_list if self._decorated else []
        outer, self._decorated = self._decorated, True
        for child in (*decorators, *defaults, *node.body):
            self.visit(child)
        self._decorated = outer


def _imports(statement: ast.stmt) -> Iterator[ImportedName]:
    if isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            yield ImportedName(statement.module or "", alias.name, alias.asname or alias.name)
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            yield ImportedName("", alias.name, alias.asname or alias.name.partition(".")[0])


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = [statement.target]
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                yield node.id
