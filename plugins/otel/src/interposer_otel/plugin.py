"""Hooks that report to OpenTelemetry, which is imported at the first event, not at discovery."""

from __future__ import annotations

from collections.abc import Mapping

from interposer import Choice
from interposer.errors import NoCandidateError
from interposer.hookspecs import Activity, hookimpl

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_finished(
    activity: Activity,
    subject: str,
    start_ns: int,
    end_ns: int,
    facts: Mapping[str, str | int | float | bool],
) -> None:
    """Record a span ``interposer.<activity>`` from ``start_ns`` to ``end_ns``."""
    from interposer_otel import _tracing as tracing

    # Names of attributes are shared by all spans, so each fact carries its activity.
    fact_attributes = {f"interposer.{activity}.{name}": value for name, value in facts.items()}
    attributes = {"interposer.subject": subject, **fact_attributes}
    tracing.span(f"interposer.{activity}", start_ns, end_ns, attributes)


@hookimpl
def interposer_selected(choice: Choice) -> None:
    """Add an event ``interposer.selected`` that describes the choice."""
    from interposer_otel import _tracing as tracing

    attributes: dict[str, str | int] = {
        "interposer.request": str(choice.request),
        "interposer.kind": choice.request.kind,
        "interposer.chosen": choice.chosen.name,
        "interposer.provider": choice.chosen.provider,
        "interposer.version": choice.chosen.version,
        "interposer.why": choice.why,
        "interposer.refusals": len(choice.refusals),
    }
    if choice.request.prefix:
        attributes["interposer.place"] = choice.request.prefix
    tracing.event("interposer.selected", attributes)


@hookimpl
def interposer_refused(error: NoCandidateError) -> None:
    """Add an event ``interposer.refused`` with the reasons of all refusals, as an error."""
    from interposer_otel import _tracing as tracing

    # An attribute is a number, a text or a list of them, so refusals become texts.
    attributes: dict[str, str | int | tuple[str, ...]] = {
        "interposer.request": error.what,
        "interposer.refusals": len(error.refusals),
        "interposer.reasons": tuple(str(refusal) for refusal in error.refusals),
    }
    tracing.event("interposer.refused", attributes, error=f"No {error.what}")


@hookimpl
def interposer_failed(plugin: str, distribution: str, reason: str) -> None:
    """Add an event ``interposer.failed`` that names the plugin and the reason, as an error."""
    from interposer_otel import _tracing as tracing

    attributes = {
        "interposer.plugin": plugin,
        "interposer.distribution": distribution,
        "interposer.reason": reason,
    }
    tracing.event("interposer.failed", attributes, error=reason)
