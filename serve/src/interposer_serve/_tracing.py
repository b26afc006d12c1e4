"""OpenTelemetry spans for the stages of a request; nearly free without a tracer provider."""

from __future__ import annotations

from importlib.metadata import version
from itertools import pairwise

from opentelemetry import propagate, trace
from opentelemetry.trace import Status, StatusCode
from starlette.requests import Request

from interposer_engine import Generation
from interposer_serve._errors import Gone

# OpenTelemetry resolves the provider at first use, so applications can set one later.
_TRACER = trace.get_tracer("interposer_serve", version("interposer-serve"))


def record(request: Request, model: str, num_prompt_tokens: int, generation: Generation) -> None:
    """Record the span ``interposer.serve`` of an ended generation, with one child span per stage.

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
