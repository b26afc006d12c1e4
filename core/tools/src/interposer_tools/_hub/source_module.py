"""The syntax tree of one Python module, with the dependencies between top-level names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from interposer.errors import ConfigError

Binding = ast.stmt
"""A top-level statement that binds a name."""


@dataclass(frozen=True, slots=True)
class ImportedName:
    """A name that a module imports.

    Attributes:
        module: the module after ``from``, empty for ``import x``.
        name: the imported name.
        alias: the name in the importing module.
    """

    module: str
    name: str
    alias: str

    @property
    def statement(self) -> str:
        """An import statement for this name, for modules that are not copied to the repository."""
        is_renamed = self.alias not in (self.name, self.name.partition(".")[0])
        suffix = f" as {self.alias}" if is_renamed else ""
        return (
            f"from {self.module} import {self.name}{suffix}"
            if self.module
            else f"import {self.name}{suffix}"
        )


@dataclass(frozen=True)
class SourceModule:
    """A parsed Python module: its text, imports and top-level definitions.

    Attributes:
        name: dotted name of the module.
        bindings: top-level statements by bound name, without imports.
        imported: imported names by alias.
        lazy: names that are imported under ``if TYPE_CHECKING``, by alias.
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
        """True for the ``__init__`` of a package."""
        return self.path.name == "__init__.py"

    def text_of(self, statement: Binding) -> str:
        """Return the text of a statement with the comment lines directly above it."""
        # The line of a decorated function is that of ``def``, below the decorators.
        first = statement.lineno
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min((first, *(decorator.lineno for decorator in statement.decorator_list)))
        start = first - 1
        while start and self.lines[start - 1].startswith("#"):
            start -= 1
        return "\n".join(self.lines[start : statement.end_lineno])


@cache
def source_module(name: str) -> SourceModule:
    """Parse the source of the module ``name`` without an import.

    Raises: ConfigError: the module has no Python source.
    """
    # To find a submodule, Python imports its parent package, which may be missing.
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
            # At run time, ``lazy_attributes`` imports these names on first use.
            for inner in statement.body:
                module.lazy.update((i.alias, i) for i in _imports(inner))
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            module.imported.update((i.alias, i) for i in _imports(statement))
        else:
            module.bindings.update(dict.fromkeys(_bound_names(statement), statement))
    return module


def needed_names(statement: Binding, *, decorated: bool) -> tuple[set[str], set[str]]:
    """Return the names that a statement uses at run time, and the names only in annotations.

    Args:
        decorated: include the names in the statement's own decorators.
    """
    visitor = _Names(decorated=decorated)
    visitor.visit(statement)
    return visitor.names, visitor.annotations - visitor.names


class _Names(ast.NodeVisitor):
    """Collects the names in code, separately for function annotations, which never run."""

    def __init__(self, *, decorated: bool) -> None:
        self.names: set[str] = set()
        self.annotations: set[str] = set()
        self._decorated = decorated

    def visit_Name(self, node: ast.Name) -> None:
        self.names.add(node.id)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        parts = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        parts += [part for part in (node.args.vararg, node.args.kwarg) if part]
        annotations = [part.annotation for part in parts if part.annotation]
        for annotation in [*annotations, *([node.returns] if node.returns else [])]:
            visitor = _Names(decorated=True)
            visitor.visit(annotation)
            self.annotations |= visitor.names
        # Defaults and decorators run when the module is imported, so they need their names.
        defaults = [value for value in (*node.args.defaults, *node.args.kw_defaults) if value]
        decorators = node.decorator_list if self._decorated else []
        # ``decorated`` decides about this statement only; inner functions keep their decorators.
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


def _bound_names(statement: ast.stmt) -> Iterator[str]:
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
