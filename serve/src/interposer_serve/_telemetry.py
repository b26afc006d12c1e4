"""Telemetry of requests: Prometheus metrics, OpenTelemetry spans, and the access log.

Spans are nearly free without a tracer provider.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from itertools import pairwise
from typing import Any
from urllib.parse import quote

from opentelemetry import propagate, trace
from opentelemetry.trace import Status, StatusCode
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from interposer.tooling import steady_time_ns
from interposer_engine import Generation
from interposer_serve._errors import Gone
from interposer_serve._metric_names import RenamedMetrics

# OpenTelemetry resolves the provider at first use, so applications can set one later.
_TRACER = trace.get_tracer("interposer_serve", version("interposer-serve"))

# Monitors poll these paths every few seconds.
_POLLED_PATHS = frozenset({"/health", "/ready", "/metrics"})
_access_log = logging.getLogger("interposer.access")

# Buckets in seconds, from one token of a small model to the default deadline of a request.
_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
    600,
)


class Metrics:
    """The Prometheus metrics of one server, in a registry of its own.

    Attributes:
        responses: Counter of responses, with the labels ``endpoint`` and ``status``.
        generations: Counter of generations, with the labels ``model`` and ``end``.
        prompt_tokens: Counter with the label ``model``, as the next one.
        new_tokens: Counter.
        queued: Histogram of seconds with the label ``model``, as the next three.
        first: Histogram.
        whole: Histogram.
        per_token: Histogram.
    """

    def __init__(self) -> None:
        # The default registry is global, so two servers in a process would claim equal names.
        registry = self._registry = CollectorRegistry()
        self.responses = Counter(
            "interposer_http_responses",
            "Responses by endpoint and status; 499 means that the client disconnected.",
            ("endpoint", "status"),
            registry=registry,
        )
        self.generations = Counter(
            "interposer_generations",
            "Generations by outcome.",
            ("model", "end"),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "interposer_prompt_tokens",
            "Prompt tokens of queued requests.",
            ("model",),
            registry=registry,
        )
        self.new_tokens = Counter(
            "interposer_generated_tokens", "Generated tokens.", ("model",), registry=registry
        )
        self.queued = self._histogram("queue", "from a request to its first step")
        self.first = self._histogram("time_to_first_token", "from a request to its first token")
        self.whole = self._histogram("generation", "from a request to its last token")
        self.per_token = self._histogram(
            "time_per_output_token", "per token after the first one, of one answer"
        )
        self._gauges: dict[str, Gauge] = {}
        self._renamed = CollectorRegistry()
        self._renamed.register(RenamedMetrics(registry))

    def _histogram(self, name: str, interval: str) -> Histogram:
        return Histogram(
            f"interposer_{name}_seconds",
            f"Seconds {interval}.",
            ("model",),
            buckets=_SECONDS,
            registry=self._registry,
        )

    def gauge(self, model: str, name: str, description: str, get_value: Any) -> None:
        """Add a gauge of a model that calls a function for its value."""
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = Gauge(
                f"interposer_{name}", description, ("model",), registry=self._registry
            )
        gauge.labels(model).set_function(get_value)

    def remove_gauges(self, model: str) -> None:
        """Remove the gauges of a model that was unloaded; its counters stay."""
        for gauge in self._gauges.values():
            gauge.remove(model)

    def response(self) -> Response:
        """Return the metrics in Prometheus' text format."""
        content = generate_latest(self._registry) + generate_latest(self._renamed)
        return Response(content, headers={"content-type": CONTENT_TYPE_LATEST})


class ModelMetrics:
    """The metrics of one model of a server."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self._new_tokens = metrics.new_tokens.labels(model)
        self._queued = metrics.queued.labels(model)
        self._first = metrics.first.labels(model)
        self._whole = metrics.whole.labels(model)
        self._per_token = metrics.per_token.labels(model)

    def _gauge(self, name: str, description: str, get_value: Any) -> None:
        self._metrics.gauge(self._model, name, description, get_value)

    def forget(self) -> None:
        """Remove the gauges, because the engine ends."""
        self._metrics.remove_gauges(self._model)

    def watch(self, engine: Any) -> None:
        """Add gauges that read the state of an engine."""
        scheduler, pool = engine.scheduler, engine.pool
        self._gauge("sequences_running", "Running sequences.", lambda: len(scheduler.running))
        self._gauge("sequences_waiting", "Waiting sequences.", lambda: len(scheduler.waiting))
        if (prefixes := engine.prefixes) is not None:
            self._gauge(
                "shared_prompt_tokens",
                "Prompt tokens found in the prefix cache.",
                lambda: prefixes.shared_tokens,
            )
            self._gauge(
                "looked_up_prompt_tokens",
                "Prompt tokens looked up in the prefix cache.",
                lambda: prefixes.tokens,
            )
            self._gauge(
                "evicted_prompt_pages",
                "Pages evicted from the prefix cache.",
                lambda: prefixes.evicted_pages,
            )
            self._gauge(
                "restored_prompt_pages",
                "Evicted pages restored from host memory or storage.",
                lambda: prefixes.restored_pages,
            )
        self._gauge("cache_pages", "Pages of the KV cache.", lambda: pool.num_pages)
        self._gauge(
            "cache_pages_held",
            "Used pages of the KV cache.",
            lambda: pool.num_pages - pool.num_free,
        )
        self._gauge(
            "cache_usage",
            "Fraction of the KV cache's pages that are used.",
            lambda: 1 - pool.num_free / pool.num_pages,
        )
        if engine.speculation is not None:
            counts = engine.speculation.figures
            self._gauge("drafted_tokens", "Draft tokens.", lambda: counts.drafted_tokens)
            self._gauge("accepted_tokens", "Accepted draft tokens.", lambda: counts.accepted_tokens)

    def opened(self, num_prompt_tokens: int) -> None:
        """Count a generation that has entered the queue."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def ended(self, generation: Generation) -> None:
        """Count a generation that has ended, and record its durations."""
        stages, error = generation.stages, generation.error
        failure = "left" if isinstance(error, Gone) else "failed"
        end = "finished" if error is None else failure
        self._metrics.generations.labels(self._model, end).inc()
        self._new_tokens.inc(generation.num_tokens)
        if stages.started:
            self._queued.observe(max(0, stages.started - stages.received) / 1e9)
        if stages.first_token:
            self._first.observe((stages.first_token - stages.received) / 1e9)
        # A failed or cancelled generation would distort the distribution.
        if error is None:
            self._whole.observe((stages.ended - stages.received) / 1e9)
            num_later = generation.num_tokens / generation.num_answers - 1
            if num_later > 0:
                self._per_token.observe((stages.ended - stages.first_token) / 1e9 / num_later)


def record_spans(
    request: Request, model: str, num_prompt_tokens: int, generation: Generation
) -> None:
    """Record an ended generation as span ``interposer.serve``, with a child span per stage.

    The parent is the span in the client's header ``traceparent``.
    """
    stages = generation.stages
    span = _TRACER.start_span(
        "interposer.serve",
        context=propagate.extract(dict(request.headers)),
        kind=trace.SpanKind.SERVER,
        start_time=stages.received,
        attributes={
            "interposer.serve.endpoint": request.url.path,
            "interposer.serve.request_id": request.state.id,
            "interposer.serve.model": model,
            "interposer.serve.answers": generation.num_answers,
            "interposer.serve.prompt_tokens": num_prompt_tokens,
            "interposer.serve.generated_tokens": generation.num_tokens,
            "interposer.serve.client_left": isinstance(generation.error, Gone),
        },
    )
    if generation.error is not None and not isinstance(generation.error, Gone):
        span.set_status(Status(StatusCode.ERROR, str(generation.error)))
    context = trace.set_span_in_context(span)
    # A stage ends at the start of the next one, the last stage at the end of the generation.
    starts = [
        ("queue", stages.received),
        ("prefill", stages.started),
        ("decode", stages.first_token),
        ("", stages.ended),
    ]
    # A generation that failed has no start time for later stages.
    reached = [(name, start) for name, start in starts if start]
    for (name, start), (_, end) in pairwise(reached):
        stage = _TRACER.start_span(f"interposer.serve.{name}", context, start_time=start)
        stage.end(end)
    span.end(stages.ended)


def log_request(scope: Scope, status: int) -> None:
    """Log an ended request on one line, without query, headers and bodies.

    The level is INFO, or DEBUG for a successful request of a monitor.
    """
    client, state = scope.get("client"), scope["state"]
    is_poll = scope["path"] in _POLLED_PATHS and status == 200
    _access_log.log(
        logging.DEBUG if is_poll else logging.INFO,
        "id=%s client=%s method=%s path=%.200s status=%d ms=%.1f prompt_tokens=%d "
        "completion_tokens=%d",
        state["id"],
        client[0] if client else "-",
        scope["method"],
        quote(scope["path"]),  # a path can hold line breaks
        status,
        (steady_time_ns() - state["received"]) / 1e6,
        state["num_prompt_tokens"],
        state["num_new_tokens"],
    )
