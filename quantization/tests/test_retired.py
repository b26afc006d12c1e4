"""Retired methods are refused with the method to take instead."""

from __future__ import annotations

import pytest

from interposer import Config, Resolver, SchemeEntry, current_registry, place
from interposer.errors import UnknownNameError
from interposer.tooling import check_records
from interposer_quantization._retired import INSTEAD_OF
from interposer_quantization.plugin import interposer_records

RETIRED = [(name, method) for method, names in INSTEAD_OF.items() for name in sorted(names)]


@pytest.mark.parametrize(("name", "method"), RETIRED)
def test_retired_name_is_refused_with_the_supported_method(name: str, method: str) -> None:
    resolver = Resolver(current_registry(), place().device, Config())
    with pytest.raises(UnknownNameError) as caught:
        resolver.choose_scheme({"quant_method": name})
    assert caught.value.name == name
    hint = f"It is not supported. Try: a checkpoint of the same model in '{method}'"
    assert caught.value.hint.startswith(hint)
    assert hint in str(caught.value)


def test_other_unknown_names_get_no_replacement() -> None:
    resolver = Resolver(current_registry(), place().device, Config())
    with pytest.raises(UnknownNameError, match="Is the plugin for it installed"):
        resolver.choose_scheme({"quant_method": "hqqq"})


def test_table_and_records_agree() -> None:
    """Every retired name is declared, by one method that is read, and is read by none."""
    entries = [record for record in interposer_records() if isinstance(record, SchemeEntry)]
    declared = [(name, entry.method) for entry in entries for name in sorted(entry.instead_of)]
    assert sorted(declared) == sorted(RETIRED)
    names = [name for name, _ in declared]
    assert len(names) == len(set(names)) >= 20
    assert not {entry.method for entry in entries} & set(names)


def test_names_are_a_frozenset() -> None:
    record = SchemeEntry("a", "a", "math:x", instead_of=["b"])  # type: ignore[arg-type]
    assert check_records([record]) == [
        "SchemeEntry 'a' has instead_of that are no frozenset of texts"
    ]
