"""Each request is one line of the log, without its contents."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
from serve.tests.conftest import Served, serving
from tests.waiting import wait_until

from interposer_engine import LanguageModel

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]
KEY = "a-long-key"


@pytest.fixture(scope="module")
def keyed(lm: LanguageModel) -> Iterator[Served]:
    with serving(lm, keys=[KEY]) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (
            "/v1/completions",
            {},
            "path=/v1/completions status=200 prompt_tokens=3 completion_tokens=4",
        ),
        (
            "/v1/completions",
            {"stream": True, "n": 2},
            "path=/v1/completions status=200 prompt_tokens=3 completion_tokens=8",
        ),
        (
            "/v1/completions",
            {"n": 0},
            "path=/v1/completions status=400 prompt_tokens=0 completion_tokens=0",
        ),
        (
            "/secret%0Apath?query=secret",
            {},
            "path=/secret%0Apath status=404 prompt_tokens=0 completion_tokens=0",
        ),
    ],
)
def test_a_request_is_one_line(
    keyed: Served,
    caplog: pytest.LogCaptureFixture,
    path: str,
    fields: dict[str, object],
    expected: str,
) -> None:
    caplog.set_level(logging.INFO, "interposer.access")
    body = {"model": "stdlib-lm", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
    keyed.ask(path, {**body, **fields}, authorization=f"Bearer {KEY}")
    wait_until(lambda: bool(caplog.records), "the line of the request")
    (record,) = caplog.records
    line, num_changes = re.subn(r"^id=req_[0-9a-f]{32} | ms=\d+\.\d", "", record.getMessage())
    assert (line, num_changes) == (f"client=127.0.0.1 method=POST {expected}", 2)


@pytest.mark.parametrize(("sent", "is_taken"), [("trace-1", True), ("two words", False)])
def test_a_request_has_an_id(
    keyed: Served, caplog: pytest.LogCaptureFixture, sent: str, is_taken: bool
) -> None:
    caplog.set_level(logging.INFO, "interposer.access")
    headers = keyed.ask("/v1/models", x_request_id=sent, authorization=f"Bearer {KEY}").headers
    wait_until(lambda: bool(caplog.records), "the line of the request")
    assert (headers["x-request-id"] == sent) == is_taken
    assert headers["request-id"] == headers["x-request-id"]
    assert f"id={headers['x-request-id']} " in caplog.text


def test_polls_of_monitors_are_logged_only_at_the_debug_level(
    keyed: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "interposer.access")
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert keyed.ask(path, authorization=f"Bearer {KEY}").status == 200
    wait_until(lambda: len(caplog.records) == 4, "the lines of the requests")
    assert [record.levelname for record in caplog.records] == ["DEBUG"] * 3 + ["INFO"]


def test_a_refused_key_is_not_logged(keyed: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "interposer.access")
    assert keyed.ask("/v1/models", authorization="Bearer another-key").status == 401
    wait_until(lambda: bool(caplog.records), "the line of the request")
    assert "method=GET path=/v1/models status=401" in caplog.text
    assert "key" not in caplog.text
