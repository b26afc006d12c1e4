"""Tables: what a file must hold, which of two measurements stays, what is kept on a host."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from interposer.errors import StorageError
from interposer.tooling import Store, checksum
from interposer.tuning import KIND, Entry, Figures, Key, Measurement, this_host
from interposer_tools import Table
from interposer_tools._tuner.table import NotMeasured, write_entry

START = datetime(2026, 1, 1, tzinfo=UTC)


def entry(
    name: str = "linear", hours: int = 0, seconds: float = 1e-3, host: str = "here", **key: Any
) -> Entry:
    facts = {"device": "cpu", "platform": "cpu", "kind": "kernel", "dtype": "float32", "dims": {}}
    figures = Figures(
        version="1.0", seconds=seconds, low=seconds, high=seconds, per_tokens={"1": seconds}
    )
    value = Measurement(
        driver="",
        torch="2.11",
        interposer="0.1",
        measured=START + timedelta(hours=hours),
        candidates={"acme/a": figures},
        failed={"acme/b": ("1.0", "raised")},
    )
    return Entry(key=Key(**{**facts, "name": name, "host": host, **key}), value=value)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    # No two are of one hour, so that the newest is one alone.
    hours = st.integers(0, 10**6)
    rows = draw(st.lists(st.tuples(st.sampled_from("abc"), hours), unique_by=lambda pair: pair[1]))
    dims = draw(st.dictionaries(st.text(max_size=5), st.integers() | st.booleans() | st.text()))
    return Table(entries=tuple(entry(name, hour, dims=dims) for name, hour in rows))


def test_a_written_table_is_read_back(tmp_path: Path) -> None:
    detail = {"scale": 0.125, "window_tokens": None, "causal": True, "dtype": "torch.float32"}
    table = Table(
        entries=(
            entry("b", dims={"width": 16, "windowed": False, "eps": 1e-6, "mode": "tanh"}),
            entry("a", kind="attention", detail=detail),
        )
    )
    path = tmp_path / "made" / "table.json"
    table.write(path)
    copy = Table.read(path)
    assert copy.entries == table.entries[::-1], "sorted by kind and name"
    copy.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_unmeasured_requests_are_not_written_to_files(tmp_path: Path) -> None:
    missing = (NotMeasured(request="layer 'x'", reason="no"),)
    Table(entries=(entry(),), not_measured=missing).write(tmp_path / "t.json")
    assert Table.read(tmp_path / "t.json") == Table(entries=(entry(),))


@given(data=st.data())
def test_a_damaged_file_is_refused_with_its_path(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    Table(entries=(entry(), entry("norm", dims={"width": 3}))).write(path)
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != content[place]))
    path.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
    try:
        same = json.loads(path.read_bytes()) == json.loads(content)
    except ValueError:
        same = False
    if same:  # a space became another space
        assert Table.read(path)
    else:
        with pytest.raises(StorageError) as caught:
            Table.read(path)
        assert caught.value.path == str(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a table"),
        ("[]", "is not a table"),
        ('{"version": 2, "entries": [], "checksum": ""}', "version"),
        ('{"version": 1, "entries": [], "checksum": ""}', "checksum differ"),
        ('{"version": 1, "entries": [], "checksum": "", "more": 1}', "more"),
    ],
)
def test_a_file_that_is_no_table_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(StorageError, match=reason):
        Table.read(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("value", "candidates", "acme/a", "seconds"), -1.0),
        (("value", "candidates", "acme/a", "seconds"), float("inf")),
        (("value", "candidates", "acme/a", "seconds"), "1"),
        (("value", "candidates", "acme/a", "per_tokens"), {"none": 1.0}),
        (("value", "measured"), "2026-01-01T00:00:00"),
        (("value", "unheard"), 1),
        (("key", "kind"), "layer"),
        (("key", "dims"), {"a": [1]}),
        (("key", "name"), ""),
    ],
)
def test_invalid_entries_are_refused_even_with_a_checksum(
    place: tuple[str, ...], value: object, tmp_path: Path
) -> None:
    facts: Any = entry().model_dump(mode="json")
    inner = facts
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    signed = checksum([facts]) if value != float("inf") else ""
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"version": 1, "entries": [facts], "checksum": signed}))
    with pytest.raises(StorageError, match=place[-1]):
        Table.read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere\.json"):
        Table.read(tmp_path / "nowhere.json")


@given(first=tables(), second=tables())
def test_merging_keeps_the_newer_measurement(first: Table, second: Table) -> None:
    merged, replaced = first.merge(second)
    given_entries = [*first.entries, *second.entries]
    newest = {}
    for each in sorted(given_entries, key=lambda e: e.value.measured):
        newest[str(each.key.model_dump())] = each
    assert {str(e.key.model_dump()): e.value.measured for e in merged.entries} == {
        key: e.value.measured for key, e in newest.items()
    }
    assert all(e in given_entries and e not in merged.entries for e in replaced)


@given(table=tables())
def test_merging_with_itself_changes_nothing(table: Table) -> None:
    once, _ = table.merge(Table())
    twice, replaced = once.merge(once)
    assert twice == once
    assert replaced == ()


def test_imported_measurements_apply_to_this_host(tmp_path: Path) -> None:
    store = Store(tmp_path)
    given_table = Table(entries=(entry(hours=1, host="there"), entry(hours=2, host="yonder")))
    assert given_table.install(store) == ()
    (stored_entry,) = Table.stored(store).entries
    assert stored_entry.key.host == this_host()
    assert stored_entry.value.measured == START + timedelta(hours=2)


def test_an_older_measurement_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    Table(entries=(entry(hours=2, seconds=2.0),)).install(store)
    assert Table(entries=(entry(hours=1, seconds=1.0),)).install(store) == ()
    assert Table.stored(store).entries[0].value.candidates["acme/a"].seconds == 2.0
    (replaced,) = Table(entries=(entry(hours=3, seconds=3.0),)).install(store)
    assert replaced.value.candidates["acme/a"].seconds == 2.0
    assert Table.stored(store).entries[0].value.candidates["acme/a"].seconds == 3.0


def test_corrupt_stored_entries_are_ignored(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in ("a", "b"):
        write_entry(store, entry(name))
    store.write(KIND, {"another": "form"}, 1)
    victim = next(iter(store.entries(KIND))).path
    victim.write_text(victim.read_text()[:-9])
    assert len(Table.stored(store).entries) <= 2
    assert len(Table.stored(store).entries) >= 1


def test_the_fastest_is_named_and_shown() -> None:
    value = entry().value
    slow = value.candidates["acme/a"]
    fast = slow.model_copy(update={"seconds": 5e-5, "low": 4e-5, "high": 0.25})
    both = value.model_copy(update={"candidates": {"acme/a": slow, "acme/c": fast}})
    assert Entry(key=entry().key, value=both).fastest == "acme/c"
    assert str(fast) == "50 us (40 us to 250 ms), scattered"
    none = value.model_copy(update={"candidates": {}})
    assert Entry(key=entry().key, value=none).fastest == ""


def test_measurements_need_a_positive_duration() -> None:
    with pytest.raises(ValidationError):
        Figures(version="1", seconds=0.0, low=1.0, high=1.0, per_tokens={})
