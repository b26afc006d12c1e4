"""Static values: the module, class, function or instance that an expression stands for."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from interposer_tools._seams.module_scope import ModuleScope

__all__ = [
    "UNKNOWN",
    "Class",
    "Function",
    "Instance",
    "Items",
    "Missing",
    "Module",
    "SuperOf",
    "Unknown",
    "Value",
]


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value about which reading says nothing; every operation on it is allowed."""


UNKNOWN = Unknown()


@dataclass(frozen=True, slots=True)
class Missing:
    """The result of looking up a name that does not exist.

    Attributes:
        text: the reason, such as ``vllm.config has no 'ModelConfig'``.
        is_definite: False if an unread base class or module could still define the name.
    """

    text: str
    is_definite: bool = True


@dataclass(frozen=True, slots=True)
class Module:
    """A module or a folder of modules."""

    name: str


@dataclass(frozen=True, eq=False)
class Class:
    """A class definition.

    Attributes:
        scope: the module that defines the class.
        name: qualified name inside the module.
    """

    scope: ModuleScope = field(repr=False)
    node: ast.ClassDef = field(repr=False)
    name: str

    @property
    def target(self) -> str:
        """``module:name`` of the class."""
        return f"{self.scope.name}:{self.name}"


@dataclass(frozen=True, eq=False)
class Function:
    """A function or method.

    Attributes:
        scope: the module that defines the function.
        name: qualified name inside the module.
        owner: the class of a method.
        is_bound: ``self`` or ``cls`` is passed already.
    """

    scope: ModuleScope = field(repr=False)
    node: ast.FunctionDef | ast.AsyncFunctionDef = field(repr=False)
    name: str
    owner: Class | None = None
    is_bound: bool = False

    @property
    def target(self) -> str:
        """``module:name`` of the function."""
        return f"{self.scope.name}:{self.name}"


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of a class."""

    cls: Class


@dataclass(frozen=True, slots=True)
class SuperOf:
    """``super()`` in a method of a class."""

    cls: Class


@dataclass(frozen=True, slots=True)
class Items:
    """A list, tuple or mapping, by the value of its elements; the values of a mapping."""

    item: Value
    key: Value = UNKNOWN
    is_mapping: bool = False


Value = Union[Unknown, Missing, Module, Class, Function, Instance, SuperOf, Items]  # noqa: UP007
