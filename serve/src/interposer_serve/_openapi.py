"""OpenAPI description of the endpoints, from the pydantic models of the request bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from interposer_serve._errors import error_format
from interposer_serve._requests import Body, accepted_schemas

_REFERENCE = "#/components/schemas/{model}"
_STATUSES = {
    "400": "A field is unknown, malformed, out of range or not supported; the message names it.",
    "401": "The API key is missing or unknown.",
    "403": "The host name or the web page's origin is not one of those allowed for this server.",
    "404": "The model or endpoint does not exist.",
    "405": "The endpoint does not support the method.",
    "408": "The header or the body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is of another type than the endpoint reads.",
    "429": "The queue is full.",
    "500": "The server failed to process the request.",
    "503": "The server is starting or stopping, or has no memory or connection to spare now.",
    "504": "The answer took longer than the deadline.",
}


def openapi_document(
    routes: Sequence[Route], bodies: Mapping[str, type[Body]], *, has_keys: bool
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document that describes some routes.

    Args:
        routes: Routes of all endpoints.
        bodies: Pydantic models of the request bodies, by path.
        has_keys: Whether requests need an API key.
    """
    body_types = sorted(set(bodies.values()), key=lambda body_type: body_type.__name__)
    references, schemas = models_json_schema(
        [(body_type, "validation") for body_type in body_types], ref_template=_REFERENCE
    )
    formats = [error_format(route.path) for route in routes]
    errors = {form.name: form.schema for form in formats}
    definitions = {**errors, **schemas.get("$defs", {})}
    for body_type in body_types:
        name = references[body_type, "validation"]["$ref"].rpartition("/")[2]
        # pydantic describes only known fields; the server accepts more.
        definitions[name] = _with_ignored_fields(definitions[name])
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        # OpenAPI does not know Starlette's converters, such as ":path".
        paths.setdefault(route.path.replace(":path", ""), {}).update(_path(route, bodies))
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "interposer serve", "version": version("interposer-serve")},
        "paths": paths,
        "components": {"schemas": definitions},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"key": []}, {"header": []}]  # one of them
    return document


def _with_ignored_fields(schema: dict[str, Any]) -> dict[str, Any]:
    """Add the values that the server accepts but ignores to the schema of a request body.

    Every optional field accepts null. Fields of OpenAI's API that have no effect here accept the
    values that change no answer.
    """
    fields: dict[str, Any] = schema["properties"]
    required = schema.get("required", [])
    for name, field in fields.items():
        if name not in required and not _accepts_null(field):
            fields[name] = {"anyOf": [field, {"type": "null"}]}
    for name, accepted in accepted_schemas().items():
        if name not in fields:
            fields[name] = accepted
    return schema


def _accepts_null(field: dict[str, Any]) -> bool:
    return {"type": "null"} in field.get("anyOf", [])


def _path(route: Route, bodies: Mapping[str, type[Body]]) -> dict[str, Any]:
    body = bodies.get(route.path)
    operation: dict[str, Any] = {
        "summary": _summary(route.endpoint),
        "responses": {
            "200": {"description": "The result."},
            **{
                status: _error_response(text, error_format(route.path).name)
                for status, text in _STATUSES.items()
            },
        },
    }
    if names := route.param_convertors:
        place = {"in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [{"name": name, **place} for name in names]
    # Starlette adds HEAD to GET.
    (method,) = (route.methods or {"GET"}) - {"HEAD"}
    if body is None:
        return {method.lower(): operation}
    reference = {"$ref": _REFERENCE.format(model=body.__name__)}
    operation["requestBody"] = {
        "required": True,
        "content": {body.media_type: {"schema": reference}},
    }
    return {method.lower(): operation}


def _error_response(text: str, schema: str) -> dict[str, Any]:
    reference = {"$ref": _REFERENCE.format(model=schema)}
    return {"description": text, "content": {"application/json": {"schema": reference}}}


def _summary(endpoint: Any) -> str:
    """Return the first line of an endpoint's docstring, which is the summary in OpenAPI."""
    return (endpoint.__doc__ or "").partition("\n")[0].replace("``", "")
