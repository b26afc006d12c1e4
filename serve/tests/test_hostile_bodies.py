"""Bodies that cost more than they should are refused by name, and the server goes on."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from typing import Any

import pytest
from serve.tests.conftest import NAME, Served, read, serving
from tests.waiting import WAIT_SECONDS

from interposer_models import LanguageModel
from interposer_serve import Limits

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

NUM_ITEMS = 200_000


def send(served: Served, path: str, content: bytes) -> Any:
    """Return the answer to a body as it is."""
    connection = HTTPConnection("127.0.0.1", served.port, timeout=WAIT_SECONDS)
    try:
        connection.request("POST", path, content, {"content-type": "application/json"})
        response = connection.getresponse()
        response.headers  # noqa: B018 - as urllib's answers have them
        return read(response)
    finally:
        connection.close()


def chained(count: int) -> dict[str, Any]:
    """Return a schema that leads from one definition to the next."""
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "string"}}}


def of_schema(schema: Any) -> dict[str, Any]:
    described = {"name": "a", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def of_form(kind: str, value: Any) -> dict[str, Any]:
    return {"structured_outputs": {kind: value}}


RULES = "\n".join(f"r{i}: r{i + 1}" for i in range(5000))
NUM_BRACES = 300
FORMS: list[tuple[dict[str, Any], str]] = [
    (of_form("grammar", f'start: r0\n{RULES}\nr5000: "a"\n'), "rules; allowed are 2000"),
    (of_schema(chained(3000)), "3001 $ref; allowed are 2000"),
    (of_form("choice", [f"v{i}" for i in range(70_000)]), "bytes; allowed are 524288"),
    (of_form("regex", "(" * NUM_BRACES + "a" + ")" * NUM_BRACES), "levels of brackets"),
    (of_form("regex", "(a{1000}){1000}"), "more memory than is allowed"),
]


@pytest.mark.parametrize(("form", "reason"), FORMS)
def test_a_form_that_would_end_the_process_costs_its_client_alone(
    served: Served, form: dict[str, Any], reason: str
) -> None:
    answer = served.complete(**form)
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    assert reason in answer.error["message"]
    assert served.complete(max_tokens=2, **of_form("choice", ["yes"])).status == 200


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def listed(item: str) -> str:
    return f"[{','.join([item] * NUM_ITEMS)}]"


LONG = "x " * NUM_ITEMS
BODIES: list[tuple[str, str, str]] = [
    ("/v1/completions", f'{{"prompt": {listed("-1")}}}', "tokens; allowed are"),
    ("/v1/completions", f'{{"prompt": {listed("null")}}}', "in one request"),
    ("/v1/completions", f'{{"prompt": {listed("[1]")}}}', "objects and lists"),
    ("/v1/completions", f'{{"prompt": "x", "stop": {listed("1")}}}', "stop is"),
    ("/v1/completions", f'{{"prompt": "x", "{LONG}": 1}}', "Unknown field"),
    ("/v1/completions", f'{{"prompt": "{LONG}"}}', "characters, and"),
    ("/v1/completions", f'{{"prompt": {nested(500)}}}', "levels deep"),
    ("/v1/completions", f'{{"prompt": {nested(5000)}}}', "no JSON"),
    ("/v1/completions", '{"prompt": "x", "\\ud800": 1}', "surrogate"),
    ("/v1/completions", '{"prompt": "\\udc00"}', "surrogate"),
    ("/v1/chat/completions", '{"messages": [{"content": "\\ud800"}]}', "surrogate"),
    ("/v1/chat/completions", f'{{"messages": {listed("1")}}}', "messages is"),
    ("/detokenize", f'{{"tokens": {listed("1")}}}', "tokens; allowed are"),
    ("/tokenize", f'{{"prompt": "{LONG}"}}', "characters, and"),
]


@pytest.mark.parametrize(("path", "content", "reason"), BODIES)
def test_a_body_is_refused_before_work_grows_with_it(
    served: Served, path: str, content: str, reason: str
) -> None:
    body = content.replace("{", f'{{"model": "{NAME}", ', 1)
    answer = send(served, path, body.encode())
    assert answer.status == 400
    assert reason in answer.error["message"]
    assert len(json.dumps(answer.body)) < 2000


def test_many_token_ids_of_one_place_in_a_dict_are_none(served: Served) -> None:
    bias = {str((2**61 - 1) * count): 1 for count in range(1, 50)}
    answer = served.complete(logit_bias=bias)
    assert (answer.status, answer.error["param"]) == (400, "logit_bias")


def test_bytes_that_are_no_text_are_refused(served: Served) -> None:
    answer = send(served, "/v1/completions", b'{"model": "\xed\xa0\x80"}')
    assert answer.status == 400
    assert "no JSON" in answer.error["message"]


def test_a_long_name_of_a_model_is_not_told_back(served: Served) -> None:
    answer = served.complete(model="a" * 100_000)
    assert answer.status == 404
    assert len(answer.error["message"]) < 300


def test_a_client_reads_why_its_body_is_too_large(lm: LanguageModel) -> None:
    """Python's http.client sends all of the body before it reads."""
    with serving(lm, limits=Limits(body_bytes=1000)) as served:
        content = b'{"prompt": "' + b"a" * (8 << 20) + b'"}'
        answer = send(served, "/v1/completions", content)
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")


def test_bodies_together_have_a_size(lm: LanguageModel) -> None:
    with serving(lm, limits=Limits(all_bodies_bytes=1000)) as served:
        answer = served.complete(prompt="a" * 2000)
        assert (answer.status, answer.error["code"]) == (503, "bodies_full")
        assert served.complete(max_tokens=1).status == 200
