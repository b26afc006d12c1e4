"""A wrong body has few errors: pydantic needs seconds to report hundreds of thousands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from interposer_serve import _management, _messages, _responses, _vector_requests
from interposer_serve._errors import shown
from interposer_serve._requests import Body

COUNT = 10_000


def body_types(base: type[Body] = Body) -> Iterator[type[Body]]:
    """Yield the types of all request bodies, without their private bases."""
    for body_type in base.__subclasses__():
        if not body_type.__name__.startswith("_"):
            yield body_type
        yield from body_types(body_type)


assert all((_management, _messages, _responses, _vector_requests)), "they define bodies"
BODIES = {body_type.__name__: body_type for body_type in body_types()}


def hostile_values() -> Iterator[Any]:
    """Yield values with many wrong parts."""
    unknown = {f"k{index}": 1 for index in range(COUNT)}
    items: list[Any] = [1, "a", [], {}, None, -1]
    for item in items:
        yield [item] * COUNT
    yield unknown
    yield [unknown]
    for kind in ("function", "custom", "auto", "json_schema"):
        yield {"type": kind, **unknown}
        yield [{"type": kind, "name": "a", "input_schema": {}, **unknown}]
    yield [{"type": "namespace", "name": "a", "tools": [1] * COUNT}]
    yield {"format": {"type": "json_schema", "schema": {}, **unknown}}
    yield {"type": "function", "function": {"name": "a", **unknown}}


def num_errors(body_type: type[Body], fields: dict[str, Any]) -> int:
    try:
        body_type(**fields)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("body_type", BODIES.values(), ids=BODIES)
def test_a_field_with_many_wrong_parts_has_few_errors(body_type: type[Body]) -> None:
    for name in body_type.model_fields:
        for value in hostile_values():
            assert num_errors(body_type, {name: value}) < 40, (name, shown(value))
