"""Signatures of functions, as read from source code, and the calls that they accept."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["CallShape", "Parameter", "ParameterKind", "Signature"]


class ParameterKind(IntEnum):
    """Kinds of parameters in their order in a signature, as in ``inspect``."""

    POSITIONAL_ONLY = 0
    POSITIONAL = 1
    VAR_POSITIONAL = 2
    KEYWORD_ONLY = 3
    VAR_KEYWORD = 4


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a function.

    Attributes:
        default: source text of the default, None if the parameter is required.
    """

    name: str
    kind: ParameterKind = ParameterKind.POSITIONAL
    default: str | None = None

    def __str__(self) -> str:
        stars = {ParameterKind.VAR_POSITIONAL: "*", ParameterKind.VAR_KEYWORD: "**"}
        default = "" if self.default is None else f"={self.default}"
        return f"{stars.get(self.kind, '')}{self.name}{default}"


@dataclass(frozen=True, slots=True)
class CallShape:
    """The arguments of a call without their values.

    Attributes:
        num_positional: number of positional arguments.
        keywords: names of keyword arguments.
        has_star: the call passes ``*arguments``.
        has_double_star: the call passes ``**arguments``.
    """

    num_positional: int
    keywords: frozenset[str] = frozenset()
    has_star: bool = False
    has_double_star: bool = False

    @classmethod
    def of(cls, call: ast.Call) -> CallShape:
        """Return the shape of a call expression."""
        stars = [argument for argument in call.args if isinstance(argument, ast.Starred)]
        return cls(
            len(call.args) - len(stars),
            frozenset(keyword.arg for keyword in call.keywords if keyword.arg is not None),
            bool(stars),
            any(keyword.arg is None for keyword in call.keywords),
        )


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a function, without annotations."""

    parameters: tuple[Parameter, ...]

    @classmethod
    def of(cls, arguments: ast.arguments) -> Signature:
        """Return the signature of a function definition."""
        positional = [*arguments.posonlyargs, *arguments.args]
        missing = len(positional) - len(arguments.defaults)
        defaults = [None] * missing + [ast.unparse(default) for default in arguments.defaults]
        parameters = [
            Parameter(
                argument.arg,
                ParameterKind.POSITIONAL_ONLY
                if number < len(arguments.posonlyargs)
                else ParameterKind.POSITIONAL,
                default,
            )
            for number, (argument, default) in enumerate(zip(positional, defaults, strict=True))
        ]
        if arguments.vararg is not None:
            parameters.append(Parameter(arguments.vararg.arg, ParameterKind.VAR_POSITIONAL))
        for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            default = None if value is None else ast.unparse(value)
            parameters.append(Parameter(argument.arg, ParameterKind.KEYWORD_ONLY, default))
        if arguments.kwarg is not None:
            parameters.append(Parameter(arguments.kwarg.arg, ParameterKind.VAR_KEYWORD))
        return cls(tuple(parameters))

    @classmethod
    def parse(cls, text: str) -> Signature | None:
        """Return the signature of a text such as ``(self, x=None)``, or None if it is not one.

        Defaults may be representations that are no expressions, such as ``<Kind.A: 1>``.
        """
        if not (text.startswith("(") and text.endswith(")")):
            return None
        for candidate in (text, _without_representations(text)):
            try:
                module = ast.parse(f"def function{candidate}: pass")
            except SyntaxError:
                continue
            function = module.body[0]
            if len(module.body) == 1 and isinstance(function, ast.FunctionDef):
                return cls.of(function.args)
        return None

    def __str__(self) -> str:
        """Return the parameters as Python writes them, with defaults."""
        texts = []
        kinds = [parameter.kind for parameter in self.parameters]
        for number, parameter in enumerate(self.parameters):
            kind = parameter.kind
            before = kinds[number - 1] if number else None
            if before == ParameterKind.POSITIONAL_ONLY and kind != before:
                texts.append("/")
            if kind == ParameterKind.KEYWORD_ONLY and (
                before is None or before < ParameterKind.VAR_POSITIONAL
            ):
                texts.append("*")
            texts.append(str(parameter))
        return f"({', '.join(texts)})"

    @property
    def is_variadic(self) -> bool:
        """The signature has ``*args`` or ``**kwargs``."""
        kinds = {parameter.kind for parameter in self.parameters}
        return bool(kinds & {ParameterKind.VAR_POSITIONAL, ParameterKind.VAR_KEYWORD})

    def bound(self) -> Signature:
        """Return the signature without ``self`` or ``cls``."""
        first = self.parameters[:1]
        if first and first[0].kind <= ParameterKind.POSITIONAL:
            return Signature(self.parameters[1:])
        return self

    def refusal(self, call: CallShape) -> str:
        """Return why the signature does not accept ``call``, or "" if it does."""
        positional = [p for p in self.parameters if p.kind <= ParameterKind.POSITIONAL]
        by_keyword = {
            p.name
            for p in self.parameters
            if p.kind in (ParameterKind.POSITIONAL, ParameterKind.KEYWORD_ONLY)
        }
        kinds = {p.kind for p in self.parameters}
        if call.num_positional > len(positional) and ParameterKind.VAR_POSITIONAL not in kinds:
            return f"takes {len(positional)} positional arguments, not {call.num_positional}"
        if ParameterKind.VAR_KEYWORD not in kinds:
            for keyword in sorted(call.keywords - by_keyword):
                return f"takes no argument {keyword!r}"
        filled = {p.name for p in positional[: call.num_positional]}
        for name in sorted(call.keywords & filled & by_keyword):
            return f"gets {name!r} by position and by keyword"
        if call.has_double_star:
            return ""
        for parameter in self.parameters:
            is_given = parameter.name in filled | call.keywords
            is_variadic = parameter.kind in (
                ParameterKind.VAR_POSITIONAL,
                ParameterKind.VAR_KEYWORD,
            )
            by_star = call.has_star and parameter.kind <= ParameterKind.POSITIONAL
            if parameter.default is None and not (is_given or is_variadic or by_star):
                return f"needs an argument {parameter.name!r}"
        return ""

    def required_call(self) -> CallShape:
        """Return the call with only the required arguments, by position where possible."""
        required = [p for p in self.parameters if p.default is None]
        return CallShape(
            sum(p.kind <= ParameterKind.POSITIONAL for p in required),
            frozenset(p.name for p in required if p.kind == ParameterKind.KEYWORD_ONLY),
        )

    def difference(self, expected: Signature) -> str:
        """Return the first difference from ``expected``, or "".

        Names, kinds and the presence of defaults must be equal. The values of defaults are compared
        if both are literals, because other values have no common text in source and at run time.
        """
        if [_key(p) for p in self.parameters] != [_key(p) for p in expected.parameters]:
            names = {parameter.name for parameter in self.parameters}
            expected_names = {parameter.name for parameter in expected.parameters}
            added = [str(p) for p in self.parameters if p.name not in expected_names]
            lost = [str(p) for p in expected.parameters if p.name not in names]
            if added or lost:
                parts = [("has the new ", added), ("lacks ", lost)]
                return " and ".join(word + ", ".join(texts) for word, texts in parts if texts)
            return f"takes {self}, not {expected}"
        for parameter, other in zip(self.parameters, expected.parameters, strict=True):
            values = _literals((parameter.default, other.default))
            if values is not None and values[0] != values[1]:
                return f"takes {self}, not {expected}"
        return ""


def _key(parameter: Parameter) -> tuple[str, ParameterKind, bool]:
    return parameter.name, parameter.kind, parameter.default is None


def _literals(texts: Iterable[str | None]) -> tuple[object, ...] | None:
    try:
        return tuple(ast.literal_eval(text) if text is not None else None for text in texts)
    except (ValueError, SyntaxError):
        return None


def _without_representations(text: str) -> str:
    """Replace texts in angle brackets, which Python prints for objects, by an ellipsis."""
    parts, depth = [], 0
    for character in text:
        if character == "<":
            depth += 1
            parts.append("..." if depth == 1 else "")
        elif character == ">" and depth:
            depth -= 1
        elif not depth:
            parts.append(character)
    return "".join(parts)
