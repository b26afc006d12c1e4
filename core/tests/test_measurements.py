"""What is known for a request: this host's figures, shipped ones, or why neither can be used."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from interposer import AttentionSpec, Candidate, Capability, Config, Device, Registry, Request
from interposer._config.storage import Store, checksum
from interposer._contract.choice import Measured
from interposer._contract.verdict import Verdict
from interposer._plugins.plugins import Plugins
from interposer._selection.measurements import Measurements
from interposer.hookspecs import hookimpl
from interposer.records import Kernel, PlatformEntry, TuningEntry
from interposer.tuning import KIND, Entry, Figures, Measurement

DEVICE = Device("bench", "cpu", "Bench 9000 PCIe", Capability("any"))
REQUEST = Request("kernel", "linear", "bench", dtype="float32", dims={"width": 16})
SECONDS = {"acme/fast": 1e-6, "acme/slow": 1e-3}


def candidates(*names: str, version: str = "1.0") -> list[Candidate]:
    return [
        Candidate(
            name, "acme", version, 1.0, Kernel("linear", name, "m:f"), lambda _: Verdict.accept()
        )
        for name in names
    ]


BOTH = candidates("fast", "slow")


def write_entry(store: Store, entry: Entry) -> None:
    facts = entry.model_dump(mode="json")
    store.write(KIND, facts["key"], facts["value"])


def made(measurements: Measurements, request: Request = REQUEST, **changes: Any) -> Entry:
    figures = {
        name: Figures(version="1.0", seconds=s, low=s, high=s, per_tokens={"1": s})
        for name, s in SECONDS.items()
    }
    facts = {
        "driver": measurements.driver(),
        "torch": torch.__version__,
        "interposer": "0.1",
        "measured": "2026-01-01T00:00:00Z",
        "candidates": {name: f.model_dump() for name, f in figures.items()},
        **changes,
    }
    value = Measurement.model_validate(facts, strict=False)
    return Entry(key=measurements.key(request), value=value)


MakeMeasurements = Callable[..., Measurements]


@pytest.fixture
def make(tmp_path: Path) -> MakeMeasurements:
    def measurements(*records: Any, device: Device = DEVICE, **config: Any) -> Measurements:
        plugin = ModuleType("acme")
        plugin.interposer_records = hookimpl(lambda: records)  # type: ignore[attr-defined]
        registry = Registry(Plugins.of(plugin))
        assert registry.plugins.failed == []
        return Measurements(registry, device, Config(cache_dir=str(tmp_path / "cache"), **config))

    return measurements


def reason(found: object) -> str:
    assert isinstance(found, str)
    return found


def test_nothing_is_known_at_first(make: MakeMeasurements, tmp_path: Path) -> None:
    assert make().lookup(REQUEST, lambda: BOTH) is None
    assert not (tmp_path / "cache").exists()


def test_measurements_are_found(make: MakeMeasurements) -> None:
    write_entry(make().store, made(make()))
    result = make().lookup(REQUEST, lambda: BOTH)
    assert isinstance(result, Measured)
    assert (result.seconds, result.source) == (SECONDS, "the measurements of this host")
    assert result.upper.keys() == SECONDS.keys()


def test_a_policy_without_tables_finds_no_measurements(make: MakeMeasurements) -> None:
    write_entry(make().store, made(make()))
    assert make(tables=False).lookup(REQUEST, lambda: BOTH) is None


@pytest.mark.parametrize(
    "other",
    [
        Request("kernel", "linear", "bench", dtype="bfloat16", dims={"width": 16}),
        Request("kernel", "linear", "bench", dtype="float32", dims={"width": 17}),
        Request("kernel", "norm", "bench", dtype="float32", dims={"width": 16}),
        Request("attention", "linear", "bench", dtype="float32", dims={"width": 16}),
        Request("layer", "linear", "bench", dtype="float32"),
    ],
    ids=str,
)
def test_another_request_has_other_measurements(make: MakeMeasurements, other: Request) -> None:
    write_entry(make().store, made(make()))
    assert make().lookup(other, lambda: BOTH) is None


def test_another_device_has_other_measurements(make: MakeMeasurements) -> None:
    write_entry(make().store, made(make()))
    device = Device("bench", "cpu", "Bench 3", Capability("any"))
    assert make(device=device).lookup(REQUEST, lambda: BOTH) is None


def test_every_detail_of_attention_is_part_of_the_key(make: MakeMeasurements) -> None:
    def request(**detail: Any) -> Request:
        sizes = {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "page_size": 4, "scale": 0.5}
        dtypes = {"dtype": torch.float32, "cache_dtype": torch.float32}
        spec = AttentionSpec(**{**sizes, **dtypes, **detail})
        return Request("attention", "decoder", "bench", dtype="float32", detail=spec)

    write_entry(make().store, made(make(), request()))
    assert isinstance(make().lookup(request(), lambda: BOTH), Measured)
    for change in ({"scale": 0.25}, {"window_tokens": 8}, {"cache_dtype": torch.bfloat16}):
        assert make().lookup(request(**change), lambda: BOTH) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"torch": "1.0"}, "since then torch changed from 1.0 to"),
        ({"driver": "old"}, "since then the driver changed from old to"),
    ],
)
def test_measurements_of_another_installation_are_stale(
    make: MakeMeasurements, change: dict[str, Any], told: str
) -> None:
    write_entry(make().store, made(make(), **change))
    result = reason(make().lookup(REQUEST, lambda: BOTH))
    assert told in result


def test_measurements_of_another_driver_are_stale(make: MakeMeasurements, tmp_path: Path) -> None:
    driver = tmp_path / "driver"
    platform = PlatformEntry("bench", "m:Bench", driver_files=(str(driver),))
    driver.write_text("570.1")
    write_entry(make().store, made(make(platform)))
    assert isinstance(make(platform).lookup(REQUEST, lambda: BOTH), Measured)
    driver.write_text("580.2")
    assert "the driver changed from" in reason(make(platform).lookup(REQUEST, lambda: BOTH))


@pytest.mark.parametrize(
    ("accepted", "told"),
    [
        (candidates("fast", "slow", "new"), "acme/new was added"),
        (candidates("fast"), "acme/slow stopped accepting"),
        (candidates("fast", "slow", version="1.1"), "acme/fast changed from 1.0 to 1.1"),
    ],
)
def test_measurements_of_other_candidates_are_stale(
    make: MakeMeasurements, accepted: list[Candidate], told: str
) -> None:
    write_entry(make().store, made(make()))
    assert told in reason(make().lookup(REQUEST, lambda: accepted))


def test_a_failed_candidate_counts_as_measured(make: MakeMeasurements) -> None:
    write_entry(make().store, made(make(), failed={"acme/new": ("1.0", "raised")}))
    assert isinstance(make().lookup(REQUEST, lambda: candidates("fast", "slow", "new")), Measured)


def test_a_damaged_entry_is_reported(make: MakeMeasurements) -> None:
    measurements = make()
    write_entry(measurements.store, made(measurements))
    (entry,) = measurements.store.entries(KIND)
    entry.path.write_text(entry.path.read_text().replace("acme/fast", "acme/last"))
    assert "corrupt" in reason(make().lookup(REQUEST, lambda: BOTH))


def test_an_entry_of_another_form_is_reported(make: MakeMeasurements) -> None:
    measurements = make()
    key = measurements.key(REQUEST).model_dump(mode="json")
    measurements.store.write(KIND, key, {"seconds": 1})
    assert "cannot be used" in reason(make().lookup(REQUEST, lambda: BOTH))


@pytest.fixture
def ship(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: MakeMeasurements
) -> Callable[..., TuningEntry]:
    """Return a maker of records whose table stands inside a package."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_tables", raising=False)
    package = tmp_path / "acme_tables"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('tables are read, not imported')\n")

    def shipped(name: str, glob: str, factor: float = 1.0, **changes: Any) -> TuningEntry:
        entry = made(make(), **changes)
        value = entry.value.model_copy(
            update={
                "candidates": {
                    name: figures.model_copy(update={"seconds": figures.seconds * factor})
                    for name, figures in entry.value.candidates.items()
                }
            }
        )
        key = entry.key.model_copy(update={"host": "a lab", "device": "Bench 9000 SXM"})
        entries = [Entry(key=key, value=value).model_dump(mode="json")]
        facts = {"version": 1, "entries": entries, "checksum": checksum(entries)}
        (package / f"{name}.json").write_text(json.dumps(facts))
        return TuningEntry(name, glob, f"acme_tables:{name}.json")

    return shipped


def test_a_shipped_table_applies_to_matching_devices(
    make: MakeMeasurements, ship: Callable[..., TuningEntry]
) -> None:
    # Another driver and torch: they are those of whoever measured it.
    table = ship("series", "Bench 9*", torch="1.0", driver="theirs")
    result = make(table).lookup(REQUEST, lambda: BOTH)
    assert isinstance(result, Measured)
    assert result.seconds == SECONDS
    assert result.source == "the table 'series' of acme in code"
    device = Device("bench", "cpu", "Bench 8000", Capability("any"))
    assert make(table, device=device).lookup(REQUEST, lambda: BOTH) is None


def test_measurements_of_the_host_precede_shipped_tables(
    make: MakeMeasurements, ship: Callable[..., TuningEntry]
) -> None:
    table = ship("own-first", "*", factor=7.0)
    write_entry(make().store, made(make()))
    result = make(table).lookup(REQUEST, lambda: BOTH)
    assert isinstance(result, Measured)
    assert result.seconds == SECONDS


def test_a_shipped_table_replaces_stale_measurements(
    make: MakeMeasurements, ship: Callable[..., TuningEntry]
) -> None:
    table = ship("stand-in", "*")
    write_entry(make().store, made(make(), torch="1.0"))
    assert isinstance(make(table).lookup(REQUEST, lambda: BOTH), Measured)


def test_the_table_with_the_longest_glob_goes_first(
    make: MakeMeasurements, ship: Callable[..., TuningEntry]
) -> None:
    tables = [ship("any", "*", 5.0), ship("close", "Bench 9000 *", 3.0), ship("wide", "Bench*")]
    for ordered in (tables, tables[::-1]):
        result = make(*ordered).lookup(REQUEST, lambda: BOTH)
        assert isinstance(result, Measured)
        assert result.seconds["acme/fast"] == pytest.approx(3e-6)


def test_a_shipped_table_of_other_versions_is_stale(
    make: MakeMeasurements, ship: Callable[..., TuningEntry]
) -> None:
    result = make(ship("old", "*")).lookup(
        REQUEST, lambda: candidates("fast", "slow", version="2.0")
    )
    assert reason(result).startswith("the table 'old' of acme in code cannot be used, because")


def test_a_broken_shipped_table_is_reported(
    make: MakeMeasurements, ship: Callable[..., TuningEntry], tmp_path: Path
) -> None:
    table = ship("broken", "*")
    (tmp_path / "acme_tables" / "broken.json").write_text("{}")
    assert "'broken' of acme in code cannot be used" in reason(
        make(table).lookup(REQUEST, lambda: BOTH)
    )
