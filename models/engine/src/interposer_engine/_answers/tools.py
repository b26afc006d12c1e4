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
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return _schema_types(schema, root, _MAX_REFERENCES)


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


def _schema_types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    schema = referenced(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return _ALL_TYPES
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(item for item in declared if isinstance(item, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(name for value in values for name in _TYPES.get(type(value), ()))
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            return frozenset[str]().union(
                *(_schema_types(option, root, depth - 1) for option in options)
            )
    return _ALL_TYPES


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
