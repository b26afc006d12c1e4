"""Records of the plugin are light to import and can be loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from interposer import QuantizationScheme, SchemeEntry
from interposer.records import load_target
from interposer_quantization.plugin import interposer_records
from interposer_testing import check_lightness


@pytest.mark.process
def test_plugin_is_light() -> None:
    assert check_lightness("interposer_quantization.plugin") == []


def test_records_load_the_scheme_of_their_method() -> None:
    for record in interposer_records():
        assert isinstance(record, SchemeEntry)
        target = load_target(record.target)
        assert issubclass(target, QuantizationScheme)
        assert target.method == record.method


def test_the_page_of_quantization_lists_every_checkpoint_format() -> None:
    page = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text(encoding="utf-8")
    table = page.split("\n| `quant_method` |")[1].split("\n\n")[0]
    listed = re.findall(r"`([\w-]+)`", " ".join(re.findall(r"^\|([^|]+)\|", table, re.M)))
    methods = {record.method for record in interposer_records() if isinstance(record, SchemeEntry)}
    assert {method for method in methods if not method.startswith("online_")} <= {*listed}
