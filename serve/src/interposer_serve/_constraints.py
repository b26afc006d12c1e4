"""Constraints on answers, from the fields ``response_format`` and ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from interposer.errors import RequestError
from interposer_engine import Constraint
from interposer_serve._errors import ApiError, shown

_FORMATS = (
    "{'type': 'text'}, {'type': 'json_object'} or "
    "{'type': 'json_schema', 'json_schema': {'name': ..., 'schema': {...}}}"
)
_KINDS: Mapping[str, Callable[[Any], Constraint]] = {
    "json": Constraint.json_schema,
    "regex": Constraint.regex,
    "choice": Constraint.choice,
    "grammar": Constraint.grammar,
}


def of_response_format(value: dict[str, Any]) -> Constraint | None:
    """Create the constraint of OpenAI's field ``response_format``; None for any text.

    Raises: ApiError: the type is unknown, or the schema is invalid.
    """
    kind, json_schema = value.get("type"), value.get("json_schema")
    if kind == "text" and len(value) == 1:
        return None
    if kind == "json_object" and len(value) == 1:
        return Constraint.json_object()
    if kind == "json_schema" and len(value) == 2 and isinstance(json_schema, dict):
        unknown = json_schema.keys() - {"name", "description", "schema", "strict"}
        if not unknown and isinstance(json_schema.get("schema"), dict):
            return _create(Constraint.json_schema, json_schema["schema"], "response_format")
    message = f"response_format is {shown(value)}; allowed is {_FORMATS}"
    raise ApiError(400, message, param="response_format", code="invalid_value")


def of_structured_outputs(value: dict[str, Any]) -> Constraint:
    """Create the constraint of vLLM's field ``structured_outputs``.

    Raises: ApiError: the field does not have exactly one known key, or the value is malformed.
    """
    if len(value) != 1 or not value.keys() <= _KINDS.keys():
        allowed = ", ".join(f"{name!r}" for name in _KINDS)
        raise ApiError(
            400,
            f"structured_outputs is {shown(value)}; allowed is an object with one of {allowed}",
            param="structured_outputs",
            code="invalid_value",
        )
    ((name, content),) = value.items()
    return _create(_KINDS[name], content, "structured_outputs")


def _create(constructor: Callable[[Any], Constraint], content: Any, param: str) -> Constraint:
    try:
        return constructor(content)
    except RequestError as error:
        message = f"{param} is malformed: {error}"
        raise ApiError(400, message, param=param, code="invalid_value") from None
