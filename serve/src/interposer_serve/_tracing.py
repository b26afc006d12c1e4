"""Spans of a request's stages. Without a tracer provider of the application they cost little."""

from __future__ import annotations

from importlib.metadata import version
from itertools import pairwise

from opentelemetry import propagate, trace
from opentelemetry.trace import Status, StatusCode
from starlette.requests import Request

from interposer_models import Generation
from interposer_serve._errors import Gone

# It follows the provider that the application sets, before this line or after it.
_TRACER = trace.get_tracer("interposer_serve", version("interposer-serve"))


def record(request: Request, model: str, num_prompt_tokens: int, generation: Generation) -> None:
    """Record the span ``interposer.serve`` of a generation that has ended, and its stages below.

    It stands below the span that the client names in ``traceparent``.
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
    inside = trace.set_span_in_context(span)
    # A stage ends where the next one began, or where everything did.
    begun = [
        ("queue", stages.received),
        ("prefill", stages.started),
        ("decode", stages.first_token),
        ("", stages.ended),
    ]
    reached = [(name, at) for name, at in begun if at]
    for (name, start), (_, end) in pairwise(reached):
        stage = _TRACER.start_span(f"interposer.serve.{name}", inside, start_time=start)
        stage.end(end)
    span.end(stages.ended)
