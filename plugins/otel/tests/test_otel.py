"""Spans arrive at an exporter, and nothing breaks without one or without OpenTelemetry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from interposer import Config, Resolver, Site, current_registry, hookimpl, place
from interposer.errors import NoCandidateError
from interposer.hookspecs import Activity
from interposer.tooling import Plugins, PluginWarning
from interposer_ops.layers.norm import RMSNorm
from interposer_otel import plugin
from interposer_testing import check_lightness

# One worker loads and tunes the model.
pytestmark = pytest.mark.xdist_group("otel")

MODEL = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
CALLER = "caller"

# Loads and measures a model, and prints the spans.
PROGRAM = """
import json, sys, time
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import interposer
assert not any(name.startswith("interposer_otel") for name in sys.modules)
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
from interposer_engine import load
from interposer_tools import tune

start = time.time_ns()
with trace.get_tracer("test").start_as_current_span("caller"):
    lm = load(sys.argv[1], dtype="float32", max_sequences=1, cache_tokens=64)
    tune(sys.argv[1], tokens=(1,), repeats=3)
end = time.time_ns()
print(json.dumps({
    "start": start,
    "end": end,
    "choices": len(lm.resolver.choices),
    "spans": [
        {
            "name": span.name,
            "start": span.start_time,
            "end": span.end_time,
            "id": span.context.span_id,
            "parent": span.parent and span.parent.span_id,
            "subject": span.attributes.get("interposer.subject"),
            "events": [event.name for event in span.events],
        }
        for span in exporter.get_finished_spans()
    ],
}))
"""

# Builds a layer where OpenTelemetry is not installed, and prints what failed.
WITHOUT = """
import json, sys, warnings
import torch
from interposer import Config, Resolver, Site, current_registry, place
from interposer_ops.layers.norm import RMSNorm

warnings.simplefilter("ignore")
registry = current_registry()
found = [plugin.name for plugin in registry.plugins.loaded]
site = Site(Resolver(registry, place().device, Config()), "norm", torch.float32)
layer = RMSNorm(site, 8, 1e-5)
layer.weight.fill_(1)
assert torch.allclose(layer(torch.full((2, 8), 3.0)), torch.ones(2, 8))
failed = {failure.name: failure.error.reason for failure in registry.plugins.failed}
print(json.dumps({"found": found, "failed": failed}))
"""


@pytest.fixture(scope="module")
def memory() -> Iterator[InMemorySpanExporter]:
    """Return where the spans of this process arrive; a process has one provider for good."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    yield exporter
    exporter.shutdown()


@pytest.fixture
def exporter(memory: InMemorySpanExporter) -> InMemorySpanExporter:
    memory.clear()
    return memory


@pytest.fixture
def plugins() -> Plugins:
    return Plugins.of(plugin)


def facts(found: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name.removeprefix("interposer."): value for name, value in (found or {}).items()}


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def run(program: str, *arguments: str, options: tuple[str, ...] = (), **variables: str) -> Any:
    command = [sys.executable, *options, "-c", program, *arguments]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("activity", ["discovery", "probe", "selection", "load", "tune"])
def test_an_activity_becomes_a_span_with_start_and_end(
    plugins: Plugins, exporter: InMemorySpanExporter, activity: Activity
) -> None:
    plugins.observe(
        "interposer_finished",
        activity=activity,
        subject="acme",
        start_ns=1_000_000_001,
        end_ns=2_000_000_002,
        facts={"accepted": True},
    )
    span = only(exporter)
    assert span.name == f"interposer.{activity}"
    assert (span.start_time, span.end_time) == (1_000_000_001, 2_000_000_002)
    assert facts(span.attributes) == {"subject": "acme", f"{activity}.accepted": True}
    assert span.parent is None
    assert span.instrumentation_scope is not None
    assert span.instrumentation_scope.name == "interposer_otel"
    assert plugins.failed == []


@given(
    st.dictionaries(
        st.text(st.characters(codec="ascii", exclude_categories=["C"]), min_size=1),
        st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    )
)
def test_every_fact_arrives_unchanged(
    memory: InMemorySpanExporter, given_facts: dict[str, str | int | float | bool]
) -> None:
    memory.clear()
    plugin.interposer_finished("tune", "model", 1, 2, given_facts)
    expected = {f"tune.{name}": value for name, value in given_facts.items()}
    attributes = facts(only(memory).attributes)
    assert attributes == {"subject": "model", **expected}
    assert {name: type(value) for name, value in attributes.items() if name != "subject"} == {
        name: type(value) for name, value in expected.items()
    }


def test_a_span_is_a_child_of_the_callers_span(
    plugins: Plugins, exporter: InMemorySpanExporter
) -> None:
    with trace.get_tracer("test").start_as_current_span(CALLER) as caller:
        plugins.observe(
            "interposer_finished", activity="load", subject="m", start_ns=1, end_ns=2, facts={}
        )
    load, outer = exporter.get_finished_spans()
    assert (load.name, outer.name) == ("interposer.load", CALLER)
    assert load.parent is not None
    assert load.parent.span_id == caller.get_span_context().span_id


def test_choices_become_events_of_the_callers_span(
    exporter: InMemorySpanExporter,
) -> None:
    with trace.get_tracer("test").start_as_current_span(CALLER):
        resolver = Resolver(
            current_registry(), place().device, Config(kernels={"rms_norm": "reference"})
        )
        RMSNorm(Site(resolver, "model.norm", torch.float32), 64, 1e-5)
    caller = next(span for span in exporter.get_finished_spans() if span.name == CALLER)
    events = [event for event in caller.events if event.name == "interposer.selected"]
    choices = [choice for choice, _ in resolver.choices.values()]
    assert [facts(event.attributes) for event in events] == [
        {
            "request": str(choice.request),
            "kind": choice.request.kind,
            "chosen": choice.chosen.name,
            "provider": choice.chosen.provider,
            "version": choice.chosen.version,
            "why": choice.why,
            "refusals": len(choice.refusals),
            "place": "model.norm",
        }
        for choice in choices
    ]
    assert "reference" in {facts(event.attributes)["chosen"] for event in events}


def test_without_a_current_span_a_choice_becomes_a_span_of_zero_length(
    exporter: InMemorySpanExporter,
) -> None:
    before = time.time_ns()
    resolver = Resolver(current_registry(), place().device, Config())
    RMSNorm(Site(resolver, "model.norm", torch.float32), 64, 1e-5)
    spans = [s for s in exporter.get_finished_spans() if s.name == "interposer.selected"]
    assert [facts(span.attributes)["request"] for span in spans] == [
        str(choice.request) for choice, _ in resolver.choices.values()
    ]
    for span in spans:
        assert span.start_time is not None
        assert before <= span.start_time <= time.time_ns()
        assert span.end_time == span.start_time
        assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("inside", [True, False], ids=["inside a span", "outside"])
def test_a_refusal_event_has_the_reason_of_every_candidate(
    exporter: InMemorySpanExporter, inside: bool
) -> None:
    config = Config(kernels={"rms_norm": "rms_norm_vector_norm"})
    resolver = Resolver(current_registry(), place().device, config)
    site = Site(resolver, "model.norm", torch.float64)
    span = trace.get_tracer("test").start_as_current_span(CALLER) if inside else nullcontext()
    with span, pytest.raises(NoCandidateError) as raised:
        RMSNorm(site, 64, 1e-5)
    spans = exporter.get_finished_spans()
    if inside:
        caller = next(span for span in spans if span.name == CALLER)
        attributes = next(e for e in caller.events if e.name == "interposer.refused").attributes
    else:
        alone = next(span for span in spans if span.name == "interposer.refused")
        assert alone.status.status_code is StatusCode.ERROR
        attributes = alone.attributes
    assert facts(attributes) == {
        "request": raised.value.what,
        "refusals": len(raised.value.refusals),
        "reasons": tuple(str(refusal) for refusal in raised.value.refusals),
    }
    assert raised.value.refusals


def test_a_failing_plugin_becomes_an_error_event(exporter: InMemorySpanExporter) -> None:
    # Plugins are added in the order of their names.
    broken = ModuleType("other_plugin")
    vars(broken)["interposer_records"] = hookimpl(lambda: ["rms_norm"])
    with pytest.warns(PluginWarning, match="other_plugin"):
        plugins = Plugins.of(plugin, broken)
    span = only(exporter)
    assert span.name == "interposer.failed"
    assert span.status.status_code is StatusCode.ERROR
    assert facts(span.attributes) == {
        "plugin": "other_plugin",
        "distribution": plugins.failed[0].distribution,
        "reason": plugins.failed[0].error.reason,
    }


def test_the_status_of_the_callers_span_does_not_change(
    plugins: Plugins, exporter: InMemorySpanExporter
) -> None:
    with trace.get_tracer("test").start_as_current_span(CALLER):
        plugins.observe("interposer_failed", plugin="acme", distribution="acme", reason="broken")
    span = only(exporter)
    assert [event.name for event in span.events] == ["interposer.failed"]
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.process
def test_importing_the_plugin_does_not_import_opentelemetry() -> None:
    assert check_lightness("interposer_otel.plugin") == []
    program = "import json, sys, interposer_otel.plugin; print(json.dumps(sorted(sys.modules)))"
    assert not any(name.startswith("opentelemetry") for name in run(program))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the spans of a process that loads and tunes a model."""
    cache = tmp_path_factory.mktemp("cache")
    found: dict[str, Any] = run(PROGRAM, str(MODEL), INTERPOSER_CACHE_DIR=str(cache))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("activity", ["discovery", "probe", "selection", "load", "tune"])
def test_a_real_model_leaves_a_span_for_each_activity(
    report: dict[str, Any], activity: str
) -> None:
    spans = [span for span in report["spans"] if span["name"] == f"interposer.{activity}"]
    assert spans
    caller = next(span for span in report["spans"] if span["name"] == CALLER)
    for span in spans:
        assert report["start"] <= span["start"] <= span["end"] <= report["end"]
        assert span["parent"] == caller["id"]
        assert span["subject"]


@pytest.mark.slow
def test_the_load_span_covers_its_parts(report: dict[str, Any]) -> None:
    load = next(span for span in report["spans"] if span["name"] == "interposer.load")
    assert load["subject"] == str(MODEL)
    inside = [
        span
        for span in report["spans"]
        if span["name"] == "interposer.selection" and span["end"] <= load["end"]
    ]
    assert inside
    assert all(load["start"] <= span["start"] for span in inside)


@pytest.mark.slow
def test_a_real_model_reports_its_choices(report: dict[str, Any]) -> None:
    caller = next(span for span in report["spans"] if span["name"] == CALLER)
    assert caller["events"].count("interposer.selected") >= report["choices"] - 2


@pytest.mark.slow
def test_without_opentelemetry_the_plugin_is_quarantined_and_the_rest_works(
    tmp_path: Path,
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("opentelemetry"):
            (packages / entry.name).symlink_to(entry)
    add = f"import site; site.addsitedir({str(packages)!r})\n"
    variables = {"PYTHONPATH": "", "INTERPOSER_CACHE_DIR": str(tmp_path / "cache")}
    output = run(add + WITHOUT, options=("-S",), **variables)
    assert "otel" in output["found"]
    assert "ModuleNotFoundError(\"No module named 'opentelemetry'\")" in output["failed"]["otel"]
