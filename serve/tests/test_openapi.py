"""The description of the endpoints says what they take."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from serve.tests.conftest import NAME, Served, serving
from serve.tests.test_options import CHAT, COMPLETION

from interposer_models import LanguageModel

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]


def validator(document: dict[str, Any], path: str) -> Any:
    """Return what checks a body of an endpoint."""
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
    asked: dict[str, Any] = {"model": NAME, "prompt": "a"}
    effects = COMPLETION
    if kind == "chat/completions":
        asked = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
        effects = CHAT
    check = validator(document, f"/v1/{kind}")
    check.validate(asked)
    for field, (both, value) in effects.items():
        named = {"the second token": [3]}
        others = {name: named.get(str(each), each) for name, each in both.items()}
        check.validate({**asked, **others, field: named.get(str(value), value)})
        assert not check.is_valid({**asked, field: {"of": "no type"}}) or isinstance(value, dict)


def test_what_asks_for_nothing_is_valid_and_what_is_not_honoured_is_none(
    served: Served, document: dict[str, Any]
) -> None:
    check = validator(document, "/v1/completions")
    for fields, is_valid in (
        ({"best_of": 1, "user": "me", "store": None, "n": None}, True),
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


def test_refusals_are_of_the_form_that_is_described(
    served: Served, document: dict[str, Any]
) -> None:
    error = jsonschema.Draft202012Validator(document["components"]["schemas"]["Error"])
    answers = [served.complete(n=0), served.complete(model="other"), served.ask("/nothing")]
    for answer in answers:
        error.validate(answer.body)
        described = document["paths"]["/v1/completions"]["post"]["responses"]
        assert str(answer.status) in described


def test_a_key_is_described_where_one_is_asked_for(lm: LanguageModel) -> None:
    with serving(lm, keys=["secret"]) as served:
        assert served.ask("/openapi.json").status == 401
        document = served.ask("/openapi.json", authorization="Bearer secret").body
    assert document["components"]["securitySchemes"] == {
        "key": {"type": "http", "scheme": "bearer"}
    }
    assert document["security"] == [{"key": []}]


@pytest.mark.slow
def test_no_request_that_is_made_of_the_description_ends_in_a_failure(
    served: Served, document: dict[str, Any]
) -> None:
    """Schemathesis makes valid and wrong requests of the description."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings

    checks = schemathesis.checks
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=f"http://127.0.0.1:{served.port}")

    modes = schemathesis.GenerationMode
    for operation in schema.get_all_operations():
        # What takes no body cannot be asked for wrongly.
        for mode in (modes.POSITIVE, *([modes.NEGATIVE] if operation.ok().body else [])):

            @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.ok().as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                if isinstance(case.body, dict):
                    case.body.setdefault("max_tokens", 2)
                case.call_and_validate(
                    checks=[checks.not_a_server_error, checks.response_schema_conformance]
                )

            ask()
