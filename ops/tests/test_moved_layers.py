"""Layers that moved still load from their former modules, with a warning."""

from __future__ import annotations

import importlib

import pytest

from interposer_ops.layers._moved import MOVED

LAYERS = "interposer_ops.layers"


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in MOVED.items() for name in names]
)
def test_a_moved_layer_loads_with_a_warning(module: str, name: str) -> None:
    former = importlib.import_module(f"{LAYERS}.{module}")
    home, _, current = f"{LAYERS}.{MOVED[module][name]}".rpartition(".")
    with pytest.warns(
        DeprecationWarning, match=rf"^{LAYERS}\.{module}\.{name} is now {home}\.{current}: "
    ) as warned:
        value = getattr(former, name)
    assert value is getattr(importlib.import_module(home), current)
    assert warned[0].filename == __file__


def test_an_unknown_name_is_an_attribute_error() -> None:
    former = importlib.import_module(f"{LAYERS}.cuts")
    with pytest.raises(AttributeError, match="has no attribute 'Trim'"):
        _ = former.Trim
