"""Names of the tools of a request, and types of tool parameters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from interposer.errors import RequestError
from interposer_engine._answers.formats import JsonType
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
            self._types[name, key] = schema_types(properties[key], root)
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


def schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
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


def member_schema(schema: Any, root: Mapping[str, Any], key: str | None) -> Any:
    """Return the schema of a member of an object; {} if ``schema`` does not declare the member.

    Args:
        schema: Schema of the object or list, whose options may refer to each other in circles.
        root: Schema that resolves references.
        key: Key of the member; None for the items of a list.
    """
    waiting, visited_ids = [schema], set[int]()
    while waiting:
        option = referenced(waiting.pop(0), root)
        if not isinstance(option, Mapping) or id(option) in visited_ids:
            continue
        visited_ids.add(id(option))
        members = {None: option.get("items")} if key is None else option.get("properties")
        if isinstance(members, Mapping) and isinstance(members.get(key), Mapping):
            return members[key]
        options = option.get("anyOf", option.get("oneOf"))
        waiting += options if isinstance(options, list) else []
    return {}


def has_members(schema: Any, root: Mapping[str, Any]) -> bool:
    """Return whether a schema allows only objects, and declares members of them."""
    target = referenced(schema, root)
    return schema_types(target, root) == {"object"} and bool(target.get("properties"))


def has_items(schema: Any, root: Mapping[str, Any]) -> bool:
    """Return whether a schema allows only lists, and declares their items."""
    target = referenced(schema, root)
    return schema_types(target, root) == {"array"} and isinstance(target.get("items"), Mapping)


@dataclass(frozen=True, slots=True)
class Element:
    """A value in tags that bear the value's key.

    Attributes:
        key: Name of the tags.
        item: Name of the tags around the items of a list.
        texts: Pieces of the text between the tags.
        members: The elements between the tags.
    """

    key: str
    item: str
    texts: list[str] = field(default_factory=list)
    members: list[Element] = field(default_factory=list)


def element_json(element: Element, schema: Any, root: Mapping[str, Any]) -> str:
    """Return the JSON text of an element. The schema decides where the tags leave a choice.

    Args:
        element: The value. If it has members, the text between them is ignored.
        schema: JSON schema of the value.
        root: Schema that resolves references.
    """
    types = schema_types(schema, root)
    containers = types & {"object", "array"}
    if element.members:
        has_items = all(member.key == element.item for member in element.members)
        if has_items and containers != {"object"}:
            items = member_schema(schema, root, None)
            texts = (element_json(member, items, root) for member in element.members)
            return f"[{', '.join(texts)}]"
        values = {
            member.key: element_json(member, member_schema(schema, root, member.key), root)
            for member in element.members
        }
        return f"{{{', '.join(f'{JSON.write(key)}: {text}' for key, text in values.items())}}}"
    text = "".join(element.texts)
    if not text.strip() and "string" not in types and len(containers) == 1:
        return "{}" if "object" in containers else "[]"
    return value_json(text, types)


def json_type(value: Any) -> JsonType:
    """Return the JSON type of a value."""
    names: dict[type, JsonType] = {
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return names[type(value)]


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
