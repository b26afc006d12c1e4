"""The OpenAPI document describes which bodies the endpoints accept."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from serve.tests.conftest import NAME, Served, serving
from serve.tests.test_options import CHAT, COMPLETION

from interposer_engine import LanguageModel

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]


def validator(document: dict[str, Any], path: str) -> Any:
    """Return a JSON schema validator for the bodies of an endpoint."""
    (content,) = document["paths"][path]["post"]["requestBody"]["content"].values()
    schema = {**content["schema"], "components": document["components"]}
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture(scope="module")
def document(served: Served) -> dict[str, Any]:
    answer = served.ask("/openapi.json")
    assert answer.status == 200
    document: dict[str, Any] = answer.body
    return document


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_each_field_is_described(document: dict[str, Any], kind: str) -> None:
    base: dict[str, Any] = {"model": NAME, "prompt": "a"}
    effects = COMPLETION
    if kind == "chat/completions":
        base = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
        effects = CHAT
    check = validator(document, f"/v1/{kind}")
    check.validate(base)
    for field, (both, value) in effects.items():
        token_ids = {"the second token": [3]}
        others = {name: token_ids.get(str(other), other) for name, other in both.items()}
        check.validate({**base, **others, field: token_ids.get(str(value), value)})
        assert not check.is_valid({**base, field: {"of": "no type"}}) or isinstance(value, dict)


def test_the_document_accepts_the_same_values_as_the_server(
    served: Served, document: dict[str, Any]
) -> None:
    check = validator(document, "/v1/completions")
    for fields, is_valid in (
        ({"best_of": 1, "user": "me", "store": None, "n": None}, True),
        ({"metadata": {"job": "nightly"}, "store": True, "service_tier": "flex"}, True),
        ({"metadata": {"job": 1}}, False),
        ({"store": 1}, False),
        ({"best_of": 2}, False),
        ({"unknown": 1}, False),
        ({"temperature": -1}, False),
        ({"stop": ["a"] * 17}, False),
        ({"stop": "a text of more than 16 characters"}, True),
        ({"prompt": []}, False),
    ):
        body = {"model": NAME, "prompt": "a", "max_tokens": 1, **fields}
        assert check.is_valid(body) is is_valid, fields
        assert served.ask("/v1/completions", body).status == (200 if is_valid else 400)


def test_errors_match_their_description(served: Served, document: dict[str, Any]) -> None:
    error = jsonschema.Draft202012Validator(document["components"]["schemas"]["Error"])
    answers = [served.complete(n=0), served.complete(model="other"), served.ask("/nothing")]
    for answer in answers:
        error.validate(answer.body)
        statuses = document["paths"]["/v1/completions"]["post"]["responses"]
        assert str(answer.status) in statuses


def test_the_document_states_that_a_key_is_required(lm: LanguageModel) -> None:
    with serving(lm, keys=["secret"]) as served:
        assert served.ask("/openapi.json").status == 401
        document = served.ask("/openapi.json", authorization="Bearer secret").body
    assert document["components"]["securitySchemes"] == {
        "key": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    assert document["security"] == [{"key": []}, {"header": []}]


def test_the_document_names_the_method_of_each_route(lm: LanguageModel) -> None:
    with serving(lm, management_keys=["manager"]) as served:
        paths = served.ask("/openapi.json").body["paths"]
        assert paths["/v1/responses/{id}"].keys() == {"get", "delete"}
        assert paths["/sleep"].keys() == {"post"}
        answer = served.ask("/wake_up", b"", authorization="Bearer manager")
        assert answer.status != 405


def test_messages_and_tools_are_described(document: dict[str, Any]) -> None:
    message = {"role": "user", "content": "a"}
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [message], "tools": [tool]},
        "/v1/messages": {"messages": [message], "max_tokens": 1},
        "/v1/responses": {"input": [message]},
    }
    for path, body in bodies.items():
        check = validator(document, path)
        check.validate({"model": NAME, **body})
        name = "input" if "input" in body else "messages"
        wrong = {**body, name: [{"role": "wizard", "content": "a"}]}
        assert not check.is_valid({"model": NAME, **wrong}), path
