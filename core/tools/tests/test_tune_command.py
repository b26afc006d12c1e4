"""The subcommand that imports and exports tables; docs/measure.md runs the measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from interposer import Config
from interposer.errors import ConfigError, StorageError
from interposer.tooling import Store
from interposer.tuning import Entry
from interposer_tools import Table
from interposer_tools._commands.tune import tune


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("INTERPOSER_CACHE_DIR", str(tmp_path / "cache"))
    Config.refresh()
    return Store(tmp_path / "cache")


@pytest.fixture
def entry() -> Entry:
    facts = {
        "key": {
            "host": "a lab",
            "device": "bench",
            "platform": "bench",
            "kind": "kernel",
            "name": "linear",
            "dtype": "float32",
            "dims": {"width": 16},
        },
        "value": {
            "driver": "",
            "torch": "2.11",
            "interposer": "0.1",
            "measured": "2026-01-01T00:00:00Z",
            "candidates": {
                "acme/a": {
                    "version": "1",
                    "seconds": 1e-3,
                    "low": 1e-3,
                    "high": 1e-3,
                    "per_tokens": {"1": 1e-3},
                }
            },
        },
    }
    return Entry.model_validate_json(json.dumps(facts))


def test_a_table_is_imported_and_exported(
    store: Store, entry: Entry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, copied = tmp_path / "given.json", tmp_path / "copied.json"
    Table(entries=(entry,)).write(source)
    tune(import_file=source)
    assert capsys.readouterr().out.startswith("1 measurement imported, 0 of them")
    (stored_entry,) = Table.stored(store).entries
    assert stored_entry.value == entry.value
    assert stored_entry.key.host != "a lab"
    tune(export_file=copied, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"exported": 1}
    assert Table.read(copied).entries == (stored_entry,)


def test_nothing_to_do_is_an_error() -> None:
    with pytest.raises(ConfigError, match="interposer tune MODEL"):
        tune()


def test_a_broken_file_changes_nothing(store: Store, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(StorageError, match="is not a table"):
        tune(import_file=tmp_path / "broken.json")
    assert Table.stored(store).entries == ()


def test_tokens_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1;2"):
        tune(tmp_path, tokens="1;2")


@pytest.mark.parametrize(
    ("tokens", "reason"), [("0", "0 is too small"), ("1,16,1", "1 occurs twice")]
)
def test_invalid_numbers_of_tokens_are_refused(tokens: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--tokens '{tokens}': {reason}"):
        tune(tmp_path, tokens=tokens)


def test_a_missing_export_folder_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--export .*its folder does not exist"):
        tune(tmp_path / "no-model", export_file=tmp_path / "none" / "figures.json")
    assert not (tmp_path / "none").exists()
