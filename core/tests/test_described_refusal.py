"""Without the conformance kit, a described device is refused with the next action."""

from __future__ import annotations

import sys

import pytest

from interposer import explain
from interposer.errors import ConfigError


def test_a_missing_kit_is_named_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "interposer_testing.described", None)
    with pytest.raises(
        ConfigError,
        match=r"'graviton4' is described.*Try: pip .* interposer-testing",
    ):
        explain(device="graviton4")
