"""Schemathesis generates requests from the OpenAPI document of each kind of server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from serve.tests.agents import NAME as AGENT
from serve.tests.conftest import NAME, Served, serving
from serve.tests.encoders import write_classifier, write_encoder
from tests.media_model import ColourEncoder, write_media_model

from interposer_adapt import load_encoder
from interposer_engine import LanguageModel, load
from interposer_serve._management import PATHS, SLEEP

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.xdist_group("serve")]

# Fields that limit the answer, without which a chat would fill the context.
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


def fuzz(served: Served, name: str, headers: dict[str, str] | None = None) -> None:
    """Send valid and invalid requests to each endpoint, and check the responses.

    Args:
        name: Name of the model; a request with a generated name would only get status 404.
        headers: Headers of all requests except those for the management of adapters.
    """
    schemathesis = pytest.importorskip("schemathesis")
    document = served.ask("/openapi.json", **(headers or {})).body
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=served.url)
    modes = schemathesis.GenerationMode
    for operation in (result.ok() for result in schema.get_all_operations()):
        if operation.path == SLEEP:
            continue  # a server that sleeps answers with 503
        keys = {"authorization": "Bearer manager"} if operation.path in PATHS else headers
        # An operation without a body has no invalid requests.
        for mode in (modes.POSITIVE, *([modes.NEGATIVE] if operation.body else [])):
            fuzz_operation(operation.as_strategy(generation_mode=mode), name, keys)


def fuzz_operation(cases: Any, name: str, headers: dict[str, str] | None) -> None:
    """Send generated requests to one endpoint, and check the responses."""
    checks = pytest.importorskip("schemathesis.checks")

    expectations = [
        checks.not_a_server_error,
        checks.response_schema_conformance,
        checks.status_code_conformance,
    ]

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=cases)
    def send(case: Any) -> None:
        if isinstance(case.body, dict):
            if isinstance(case.body.get("model"), str) and case.path not in PATHS:
                case.body["model"] = name
            if case.path in LIMITS:
                case.body[LIMITS[case.path]] = 2
        case.call_and_validate(headers=headers, checks=expectations)

    send()


def test_no_request_makes_a_text_server_fail(served: Served) -> None:
    fuzz(served, NAME)


def test_no_request_makes_a_server_of_pictures_fail(tmp_path: Path) -> None:
    model = load(write_media_model(tmp_path / "colours"), "float32", cache_tokens=8192)
    model.input_encoder = ColourEncoder(tmp_path / "colours")
    with serving(model, "colours") as served:
        fuzz(served, "colours")


def test_no_request_makes_a_server_with_tools_and_keys_fail(agent: LanguageModel) -> None:
    with serving(agent, AGENT, keys=["client"], management_keys=["manager"]) as served:
        fuzz(served, AGENT, {"authorization": "Bearer client"})


@contextmanager
def encoder(folder: Path) -> Iterator[Served]:
    with serving(load_encoder(folder), "tiny") as served:
        yield served


def test_no_request_makes_an_encoder_fail(tmp_path: Path) -> None:
    write_encoder(tmp_path / "embedding")
    with encoder(tmp_path / "embedding") as served:
        fuzz(served, "tiny")


@pytest.mark.parametrize("num_labels", [1, 3])
def test_no_request_makes_a_classifier_fail(tmp_path: Path, num_labels: int) -> None:
    write_classifier(tmp_path / "classifier", num_labels=num_labels)
    with encoder(tmp_path / "classifier") as served:
        fuzz(served, "tiny")
