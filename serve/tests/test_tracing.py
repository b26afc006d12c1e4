"""Each stage of a request is a span, below the one that the client names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from serve.tests.conftest import NAME, serving
from tests.stalled_steps import stalled_steps
from tests.waiting import wait_until

import interposer_serve._telemetry as telemetry
from interposer_engine import LanguageModel
from interposer_serve import Limits

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Return where spans arrive; a process has one provider, which other tests set."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_TRACER", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def told(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    return {span.name.removeprefix("interposer.serve."): span for span in spans}


def test_stages_follow_each_other(lm: LanguageModel, exporter: InMemorySpanExporter) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with serving(lm) as served:
        body = {"model": NAME, "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
        answer = served.ask("/v1/completions", body, traceparent=parent)
    assert answer.status == 200
    spans = told(exporter)
    assert spans.keys() == {"interposer.serve", "queue", "prefill", "decode"}
    request_span = spans["interposer.serve"]
    assert request_span.parent is not None
    assert trace.format_span_id(request_span.parent.span_id) == "b7ad6b7169203331"
    edges: list[Any] = [request_span.start_time]
    for name in ("queue", "prefill", "decode"):
        span = spans[name]
        assert span.parent is not None
        assert span.parent.span_id == request_span.context.span_id
        assert span.start_time == edges[-1]
        edges.append(span.end_time)
    assert edges == sorted(edges)
    assert edges[-1] == request_span.end_time
    told_of = request_span.attributes or {}
    attributes = {name.rpartition(".")[2]: value for name, value in told_of.items()}
    assert attributes.pop("request_id") == answer.headers["x-request-id"]
    assert attributes == {
        "endpoint": "/v1/completions",
        "model": NAME,
        "answers": 1,
        "prompt_tokens": 3,
        "generated_tokens": 5,
        "client_left": False,
    }


def test_failures_and_disconnects_are_distinguished(
    lm: LanguageModel, exporter: InMemorySpanExporter
) -> None:
    long = {"model": NAME, "prompt": "import os", "max_tokens": 1000, "ignore_eos": True}
    with stalled_steps(lm), serving(lm) as served:
        served.connect("/v1/completions", {**long, "stream": True}).close()
        wait_until(lambda: "interposer.serve" in told(exporter))
        disconnected_span = told(exporter)["interposer.serve"]
        assert disconnected_span.attributes is not None
        assert disconnected_span.attributes["interposer.serve.client_left"]
        assert disconnected_span.status.status_code == StatusCode.UNSET
    exporter.clear()
    with stalled_steps(lm), serving(lm, limits=Limits(deadline_seconds=1)) as served:
        assert served.complete(max_tokens=900, ignore_eos=True).status == 504
        late = told(exporter)["interposer.serve"]
        assert late.status.description == "The answer took longer than 1 s"
