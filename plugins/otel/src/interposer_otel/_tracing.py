"""Spans and events of one OpenTelemetry tracer, cheap without a tracer provider."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode
from opentelemetry.util.types import AttributeValue

# This proxy uses the application's tracer provider, even if the provider is set after import.
_TRACER = trace.get_tracer("interposer_otel", version("interposer-otel"))


def span(
    name: str,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, AttributeValue],
    error: str = "",
) -> None:
    """Record a finished span as a child of the current span.

    Args:
        start_ns: nanoseconds since the epoch.
        end_ns: nanoseconds since the epoch.
        error: if not empty, the span gets the status ERROR with this text.
    """
    otel_span = _TRACER.start_span(name, attributes=attributes, start_time=start_ns)
    if error:
        otel_span.set_status(Status(StatusCode.ERROR, error))
    otel_span.end(end_ns)


def event(name: str, attributes: Mapping[str, AttributeValue], error: str = "") -> None:
    """Add an event to the current span, or record a span of zero length if none is current.

    ``error`` becomes the status of a span recorded here. The status of the current span does not
    change: this span belongs to the caller, and the caller may recover from the error.
    """
    current = trace.get_current_span()
    if current.is_recording():
        current.add_event(name, attributes)
    else:
        now = time.time_ns()
        span(name, now, now, attributes, error)
