"""The form that a request asks its answer to have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from interposer.errors import RequestError
from interposer_models import Constraint
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
    """Return the constraint that OpenAI's ``response_format`` asks for; None for any text.

    Raises: ApiError: it is of no known type, or its schema is none.
    """
    kind, described = value.get("type"), value.get("json_schema")
    if kind == "text" and len(value) == 1:
        return None
    if kind == "json_object" and len(value) == 1:
        return Constraint.json_object()
    if kind == "json_schema" and len(value) == 2 and isinstance(described, dict):
        unknown = described.keys() - {"name", "description", "schema", "strict"}
        if not unknown and isinstance(described.get("schema"), dict):
            return _made(Constraint.json_schema, described["schema"], "response_format")
    message = f"response_format is {shown(value)}; allowed is {_FORMATS}"
    raise ApiError(400, message, param="response_format", code="invalid_value")


def of_structured_outputs(value: dict[str, Any]) -> Constraint:
    """Return the constraint that vLLM's ``structured_outputs`` asks for.

    Raises: ApiError: it has not exactly one of the known keys, or what that holds is malformed.
    """
    if len(value) != 1 or not value.keys() <= _KINDS.keys():
        allowed = ", ".join(f"{name!r}" for name in _KINDS)
        raise ApiError(
            400,
            f"structured_outputs is {shown(value)}; allowed is an object with one of {allowed}",
            param="structured_outputs",
            code="invalid_value",
        )
    ((name, held),) = value.items()
    return _made(_KINDS[name], held, "structured_outputs")


def _made(make: Callable[[Any], Constraint], held: Any, param: str) -> Constraint:
    try:
        return make(held)
    except RequestError as error:
        message = f"{param} is malformed: {error}"
        raise ApiError(400, message, param=param, code="invalid_value") from None
