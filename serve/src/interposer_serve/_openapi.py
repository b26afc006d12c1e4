"""The description of the endpoints as OpenAPI, made of the bodies that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from interposer_serve._requests import Body, accepted_values

_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    "400": "A field is unknown, malformed, out of range or not honoured; the text names it.",
    "401": "The API key is missing or unknown.",
    "403": "The name of the host is not one by which clients may call the server.",
    "404": "There is no such model or endpoint.",
    "405": "The endpoint takes another method.",
    "408": "The header or the body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "As many answers as are allowed run or wait.",
    "500": "The server failed at this request.",
    "503": "The server starts, ends, or has no memory or connection for the request now.",
    "504": "The answer took longer than the deadline.",
}


def description(
    routes: Sequence[Route], bodies: Mapping[str, type[Body]], *, has_keys: bool
) -> dict[str, Any]:
    """Return the document of OpenAPI 3.1 for routes.

    Args:
        bodies: by the paths of endpoints that read one.
        has_keys: whether requests have to bear a key.
    """
    kinds = sorted(set(bodies.values()), key=lambda kind: kind.__name__)
    named, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=_REFERENCE
    )
    definitions = {"Error": _ERROR, **schemas.get("$defs", {})}
    for kind in kinds:
        name = named[kind, "validation"]["$ref"].rpartition("/")[2]
        definitions[name] = _as_read(definitions[name])
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "interposer serve", "version": version("interposer-serve")},
        "paths": {route.path.replace(":path", ""): _path(route, bodies) for route in routes},
        "components": {"schemas": definitions},
    }
    if has_keys:
        scheme = {"type": "http", "scheme": "bearer"}
        document["components"]["securitySchemes"] = {"key": scheme}
        document["security"] = [{"key": []}]
    return document


def _as_read(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a body with the fields that are taken where they ask for nothing."""
    fields: dict[str, Any] = schema["properties"]
    required = schema.get("required", [])
    for name, field in fields.items():
        if name not in required and not _takes_null(field):
            fields[name] = {"anyOf": [field, {"type": "null"}]}
    for name, values in accepted_values().items():
        if name not in fields:
            fields[name] = {"type": ["string", "null"]} if values is None else {"enum": values}
    return schema


def _takes_null(field: dict[str, Any]) -> bool:
    return {"type": "null"} in field.get("anyOf", [])


def _path(route: Route, bodies: Mapping[str, type[Body]]) -> dict[str, Any]:
    body = bodies.get(route.path)
    operation: dict[str, Any] = {
        "summary": _text(route.endpoint),
        "responses": {
            "200": {"description": "What was asked for."},
            **{status: _refusal(text) for status, text in _STATUSES.items()},
        },
    }
    if "{name" in route.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    if body is None:
        return {"get": operation}
    reference = {"$ref": _REFERENCE.format(model=body.__name__)}
    operation["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": reference}},
    }
    return {"post": operation}


def _refusal(text: str) -> dict[str, Any]:
    reference = {"$ref": _REFERENCE.format(model="Error")}
    return {"description": text, "content": {"application/json": {"schema": reference}}}


def _text(described: Any) -> str:
    return (described.__doc__ or "").partition("\n")[0].strip("`")
