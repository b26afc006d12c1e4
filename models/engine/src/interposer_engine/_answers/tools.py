"""Names of the tools of a request, and types of tool parameters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from interposer.errors import RequestError
from interposer_engine._answers.literals import JSON, PYTHON, converted
from interposer_engine._answers.source import Malformed

_TYPES: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number", "integer"),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
_ALL_TYPES = frozenset(name for names in _TYPES.values() for name in names)
_MAX_REFERENCES = 16


class ToolSchemas:
    """JSON schemas of the arguments of each tool.

    Args:
        tools: Tools as chat templates read them.
    Raises: RequestError: a tool has no name, or its parameters are no object.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        self._types: dict[tuple[str, str], frozenset[str]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str) or not name:
                raise RequestError(
                    f"The tool {tool!r:.200} has no name. Try: {{'name': 'look', ...}}"
                )
            schema = function.get("parameters") or {}
            if not isinstance(schema, Mapping):
                raise RequestError(
                    f"The parameters of {name!r} are {schema!r:.200}, must be a JSON schema"
                )
            self._schemas[name] = schema

    def __bool__(self) -> bool:
        return bool(self._schemas)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tools."""
        return tuple(self._schemas)

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the JSON schema of the arguments of a tool; an empty one if it is unknown."""
        return self._schemas.get(name, {})

    def types(self, name: str, key: str) -> frozenset[str]:
        """Return the JSON types that a parameter may have."""
        root = self.schema(name)
        properties = root.get("properties")
        if not isinstance(properties, Mapping) or key not in properties:
            return _ALL_TYPES
        if (name, key) not in self._types:
            self._types[name, key] = _schema_types(properties[key], root)
        return self._types[name, key]


def referenced(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the target of a schema's reference into ``root``; None for a missing target."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        target: Any = root
        for step in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        schema = target
    return None


def _schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types of a schema, whose options may refer to each other in circles."""
    types, waiting, visited_ids = set[str](), [schema], set[int]()
    while waiting:
        option = referenced(waiting.pop(), root)
        if not isinstance(option, Mapping):
            return _ALL_TYPES
        if id(option) in visited_ids:
            continue
        visited_ids.add(id(option))
        declared = option.get("type")
        values = option.get("enum", [option["const"]] if "const" in option else None)
        options = option.get("anyOf", option.get("oneOf"))
        if isinstance(declared, str):
            types.add(declared)
        elif isinstance(declared, list):
            types.update(name for name in declared if isinstance(name, str))
        elif isinstance(values, list):
            types.update(name for value in values for name in _TYPES.get(type(value), ()))
        elif isinstance(options, list):
            waiting.extend(options)
        else:
            return _ALL_TYPES
    return frozenset(types) or _ALL_TYPES


def is_text(types: frozenset[str]) -> bool:
    """Return whether strings are the only values of a parameter."""
    return types == {"string"}


def value_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of a parameter's value that a model wrote without a type.

    The value is JSON, or a literal of Python, if the parameter may have its type; else a string.
    """
    for notation in (JSON, PYTHON):
        try:
            value = converted(text, notation)
            parsed = json.loads(value)
        except (Malformed, ValueError):
            continue
        if not isinstance(parsed, str) and types.intersection(_TYPES[type(parsed)]):
            return value
        # A string in quotes: the writer writes one so only if its text would be read as a value.
        if isinstance(parsed, str) and notation is JSON and "string" in types:
            return value
    return json.dumps(text, ensure_ascii=False)
