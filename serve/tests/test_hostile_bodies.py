"""Bodies that cost more than they should are refused by name, and the server goes on."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from typing import Any

import pytest
from serve.tests.attacks import BODIES, FORMS, body_of
from serve.tests.conftest import Served, read, serving
from tests.waiting import WAIT_SECONDS

from interposer_models import LanguageModel
from interposer_serve import Limits

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]


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


@pytest.mark.parametrize("name", [*FORMS])
def test_a_form_that_would_end_the_process_costs_its_client_alone(
    served: Served, name: str
) -> None:
    form, reason = FORMS[name]
    answer = served.complete(**form)
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    assert reason in answer.error["message"]
    fine = {"structured_outputs": {"choice": ["yes"]}}
    assert served.complete(max_tokens=2, **fine).status == 200


@pytest.mark.parametrize("name", [*BODIES])
def test_a_body_is_refused_before_work_grows_with_it(served: Served, name: str) -> None:
    path, content, reason = BODIES[name]
    answer = send(served, path, body_of(content))
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
