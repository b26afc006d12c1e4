"""The names that a module, class or function binds, found in its syntax tree."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

__all__ = ["Binding", "ClassMembers", "ModuleScope", "bindings_of", "bound_names", "exports"]

Truth = Callable[[ast.expr], bool | None]
"""Evaluates a condition: None if reading cannot decide it."""


@dataclass(frozen=True, slots=True)
class Binding:
    """One statement that binds a name.

    Attributes:
        node: the definition, import alias, or the value of an assignment; None if the name is bound
            without a value that could be read.
        statement: the statement around ``node``.
        annotation: annotation of an assignment.
        is_typing_only: bound under ``if TYPE_CHECKING``, so missing at run time.
    """

    node: ast.AST | None
    statement: ast.stmt
    annotation: ast.expr | None = None
    is_typing_only: bool = False


@dataclass(eq=False)
class ModuleScope:
    """One module with its syntax tree and its top-level names.

    Attributes:
        name: dotted name.
        is_package: the module is the ``__init__`` of a package.
        is_host: the module belongs to the host, not to the plugin.
        file: path inside the distribution.
    """

    name: str
    text: str
    tree: ast.Module
    is_package: bool
    is_host: bool
    file: str
    truth: Truth
    bindings: dict[str, list[Binding]] = field(init=False)
    stars: list[ast.ImportFrom] = field(init=False)

    def __post_init__(self) -> None:
        self.stars = []
        self.bindings = bindings_of(self.tree.body, self.truth, self.stars)

    @cached_property
    def is_replaced(self) -> bool:
        """The module puts another object into ``sys.modules`` in place of itself."""
        return "sys.modules[__name__]" in self.text

    @property
    def is_dynamic(self) -> bool:
        """The module computes attributes when they are read."""
        return "__getattr__" in self.bindings or self.is_replaced

    def parent(self, level: int) -> str:
        """Return the package that a relative import of ``level`` dots starts from."""
        parts = self.name.split(".")
        drop = level - 1 if self.is_package else level
        return ".".join(parts[: len(parts) - drop])


@dataclass(slots=True)
class ClassMembers:
    """The members of one class body, and the attributes that its methods assign to ``self``.

    Attributes:
        bindings: names bound in the class body.
        attributes: by name, the assignments to ``self.name`` with the method around them.
    """

    bindings: dict[str, list[Binding]]
    attributes: dict[str, list[tuple[Binding, ast.FunctionDef | ast.AsyncFunctionDef]]]

    @classmethod
    def of(cls, node: ast.ClassDef, truth: Truth) -> ClassMembers:
        """Return the members of a class definition."""
        members = cls(bindings_of(node.body, truth, []), defaultdict(list))
        for bindings in list(members.bindings.values()):
            for binding in bindings:
                if isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef):
                    members._add_attributes(binding.node)
        for slot in _slots(members.bindings):
            members.attributes.setdefault(slot, [])
        return members

    def _add_attributes(self, method: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = [*method.args.posonlyargs, *method.args.args]
        if not arguments:
            return
        first = arguments[0].arg
        for statement in ast.walk(method):
            for target, value, annotation in _assignments(statement):
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == first
                ):
                    assert isinstance(statement, ast.stmt | ast.NamedExpr | ast.comprehension)
                    binding = Binding(value, _statement(statement, method), annotation)
                    self.attributes[target.attr].append((binding, method))
            if name := _set_attribute(statement, first):
                self.attributes[name].append((Binding(None, method), method))


def bindings_of(
    body: Sequence[ast.stmt], truth: Truth, stars: list[ast.ImportFrom]
) -> dict[str, list[Binding]]:
    """Return the bindings of a module or class body by name, in the order of the source.

    Branches that ``truth`` excludes are left out. Star imports are added to ``stars``.
    """
    found: dict[str, list[Binding]] = defaultdict(list)
    _collect(body, truth, stars, found, typing_only=False)
    return dict(found)


def _collect(
    body: Sequence[ast.stmt],
    truth: Truth,
    stars: list[ast.ImportFrom],
    found: dict[str, list[Binding]],
    *,
    typing_only: bool,
) -> None:
    def add(name: str, node: ast.AST | None, annotation: ast.expr | None = None) -> None:
        found[name].append(Binding(node, statement, annotation, typing_only))

    def descend(inner: Sequence[ast.stmt], is_typing: bool = False) -> None:
        _collect(inner, truth, stars, found, typing_only=typing_only or is_typing)

    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                add(statement.name, statement)
            case ast.Import():
                for alias in statement.names:
                    add(alias.asname or alias.name.partition(".")[0], alias)
            case ast.ImportFrom():
                for alias in statement.names:
                    if alias.name == "*":
                        if typing_only:
                            add("*", alias)
                        else:
                            stars.append(statement)
                    else:
                        add(alias.asname or alias.name, alias)
            case ast.If():
                if is_type_checking(statement.test):
                    descend(statement.body, is_typing=True)
                    descend(statement.orelse)
                    continue
                decided = truth(statement.test)
                if decided is not False:
                    descend(statement.body)
                if decided is not True:
                    descend(statement.orelse)
            case ast.Try() | ast.TryStar():
                descend(statement.body)
                for handler in statement.handlers:
                    descend(handler.body)
                descend(statement.orelse)
                descend(statement.finalbody)
            case ast.With() | ast.AsyncWith():
                descend(statement.body)
            case ast.For() | ast.AsyncFor() | ast.While():
                if not isinstance(statement, ast.While):
                    for name in _target_names(statement.target):
                        add(name, None)
                descend(statement.body)
                descend(statement.orelse)
            case _:
                for target, value, annotation in _assignments(statement):
                    if isinstance(target, ast.Name):
                        add(target.id, value, annotation)


def is_type_checking(test: ast.expr) -> bool:
    """Return whether a condition is ``TYPE_CHECKING``."""
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def bound_names(function: ast.AST) -> set[str]:
    """Return the local names of a function, without those of nested functions and classes."""
    names: set[str] = set()
    pending: list[ast.AST] = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
                continue
            case ast.Lambda():
                continue
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.alias():
                names.add(node.asname or node.name.partition(".")[0])
            case ast.ExceptHandler():
                if node.name:
                    names.add(node.name)
        pending.extend(ast.iter_child_nodes(node))
    return names


def exports(scope: ModuleScope) -> list[str] | None:
    """Return the names of ``__all__``, or None if there is none that can be read."""
    for binding in scope.bindings.get("__all__", ()):
        if isinstance(binding.node, ast.List | ast.Tuple):
            return [
                element.value
                for element in binding.node.elts
                if isinstance(element, ast.Constant) and isinstance(element.value, str)
            ]
    return None


def _assignments(
    statement: ast.AST,
) -> Iterator[tuple[ast.expr, ast.expr | None, ast.expr | None]]:
    """Yield target, value and annotation of each assignment in one statement."""
    match statement:
        case ast.Assign():
            for target in statement.targets:
                yield from _unpacked(target, statement.value)
        case ast.AnnAssign():
            yield statement.target, statement.value, statement.annotation
        case ast.AugAssign():
            yield statement.target, None, None
        case ast.For() | ast.AsyncFor():
            yield from _unpacked(statement.target, None)
        case ast.With() | ast.AsyncWith():
            for item in statement.items:
                if item.optional_vars is not None:
                    yield from _unpacked(item.optional_vars, None)


def _unpacked(
    target: ast.expr, value: ast.expr | None
) -> Iterator[tuple[ast.expr, ast.expr | None, ast.expr | None]]:
    if isinstance(target, ast.Tuple | ast.List):
        values: Sequence[ast.expr | None] = [None] * len(target.elts)
        if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
            values = value.elts
        for element, part in zip(target.elts, values, strict=True):
            yield from _unpacked(element, part)
    elif isinstance(target, ast.Starred):
        yield from _unpacked(target.value, None)
    else:
        yield target, value, None


def _target_names(target: ast.expr) -> Iterator[str]:
    for element, _, _ in _unpacked(target, None):
        if isinstance(element, ast.Name):
            yield element.id


def _statement(node: ast.AST, method: ast.stmt) -> ast.stmt:
    return node if isinstance(node, ast.stmt) else method


def _set_attribute(node: ast.AST, first: str) -> str:
    """Return the name in ``setattr(self, "name", ...)`` or ``self.register_buffer("name")``."""
    if not isinstance(node, ast.Call):
        return ""
    arguments = node.args
    match node.func:
        case ast.Name(id="setattr") | ast.Attribute(attr="__setattr__"):
            if arguments and isinstance(arguments[0], ast.Name) and arguments[0].id == first:
                arguments = arguments[1:]
            else:
                return ""
        case ast.Attribute(
            value=ast.Name(id=owner), attr="register_buffer" | "register_parameter" | "add_module"
        ) if owner == first:
            pass
        case _:
            return ""
    if arguments and isinstance(arguments[0], ast.Constant):
        return arguments[0].value if isinstance(arguments[0].value, str) else ""
    return ""


def _slots(bindings: dict[str, list[Binding]]) -> Iterator[str]:
    for binding in bindings.get("__slots__", ()):
        if isinstance(binding.node, ast.List | ast.Tuple):
            for element in binding.node.elts:
                if isinstance(element, ast.Constant) and isinstance(element.value, str):
                    yield element.value
