"""Spans and events of one tracer. Without a tracer provider of the application they cost little."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode
from opentelemetry.util.types import AttributeValue

# It follows the provider that the application sets, before this line or after it.
_TRACER = trace.get_tracer("interposer_otel", version("interposer-otel"))


def span(
    name: str,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, AttributeValue],
    error: str = "",
) -> None:
    """Record a finished span below the current one; times are nanoseconds since the epoch."""
    finished = _TRACER.start_span(name, attributes=attributes, start_time=start_ns)
    if error:
        finished.set_status(Status(StatusCode.ERROR, error))
    finished.end(end_ns)


def event(name: str, attributes: Mapping[str, AttributeValue], error: str = "") -> None:
    """Add an event to the current span; where there is none, record a span of no length.

    ``error`` becomes the status of that span. The current span is the caller's, who may well
    recover, so its status stays as it is.
    """
    current = trace.get_current_span()
    if current.is_recording():
        current.add_event(name, attributes)
    else:
        now = time.time_ns()
        span(name, now, now, attributes, error)
