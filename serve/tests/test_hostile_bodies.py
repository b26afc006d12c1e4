"""Costly or invalid bodies are refused with a message, and the server keeps running."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from typing import Any

import pytest
from serve.tests.attacks import BODIES, CONSTRAINTS, body_of
from serve.tests.conftest import Served, read, serving
from tests.waiting import WAIT_SECONDS

from interposer_engine import LanguageModel
from interposer_serve import Limits

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]


def send(served: Served, path: str, content: bytes) -> Any:
    """Send a body without changes, and return the response."""
    connection = HTTPConnection("127.0.0.1", served.port, timeout=WAIT_SECONDS)
    try:
        connection.request("POST", path, content, {"content-type": "application/json"})
        response = connection.getresponse()
        response.headers  # noqa: B018 - read() needs the headers
        return read(response)
    finally:
        connection.close()


@pytest.mark.landing(1)
@pytest.mark.parametrize("name", [*CONSTRAINTS])
def test_a_constraint_that_would_crash_the_server_is_refused(served: Served, name: str) -> None:
    fields, reason = CONSTRAINTS[name]
    answer = served.complete(**fields)
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    assert reason in answer.error["message"]
    valid = {"structured_outputs": {"choice": ["yes"]}}
    assert served.complete(max_tokens=2, **valid).status == 200


@pytest.mark.parametrize("name", [*BODIES])
def test_a_costly_body_is_refused(served: Served, name: str) -> None:
    path, content, reason = BODIES[name]
    answer = send(served, path, body_of(content))
    assert answer.status == 400
    assert reason in answer.error["message"]
    assert len(json.dumps(answer.body)) < 2000


def test_token_ids_with_equal_hashes_are_refused(served: Served) -> None:
    bias = {str((2**61 - 1) * count): 1 for count in range(1, 50)}
    answer = served.complete(logit_bias=bias)
    assert (answer.status, answer.error["param"]) == (400, "logit_bias")


def test_a_body_that_is_not_utf8_is_refused(served: Served) -> None:
    answer = send(served, "/v1/completions", b'{"model": "\xed\xa0\x80"}')
    assert answer.status == 400
    assert "not valid JSON" in answer.error["message"]


def test_a_long_model_name_is_shortened_in_the_error(served: Served) -> None:
    answer = served.complete(model="a" * 100_000)
    assert answer.status == 404
    assert len(answer.error["message"]) < 300


def test_a_client_can_read_that_its_body_is_too_large(lm: LanguageModel) -> None:
    """Python's http.client sends the whole body before it reads the response."""
    with serving(lm, limits=Limits(body_bytes=1000)) as served:
        content = b'{"prompt": "' + b"a" * (8 << 20) + b'"}'
        answer = send(served, "/v1/completions", content)
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")


def test_all_bodies_share_a_size_limit(lm: LanguageModel) -> None:
    with serving(lm, limits=Limits(total_body_bytes=1000)) as served:
        answer = served.complete(prompt="a" * 2000)
        assert (answer.status, answer.error["code"]) == (503, "bodies_full")
        assert served.complete(max_tokens=1).status == 200
