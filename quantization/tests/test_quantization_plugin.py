"""What the plugin declares is light to import and can be loaded."""

from __future__ import annotations

from interposer import CustomOp, OpEntry, QuantizationScheme, SchemeEntry
from interposer.records import load_target
from interposer.testing import check_lightness
from interposer_quantization.plugin import interposer_records


def test_plugin_is_light() -> None:
    assert check_lightness("interposer_quantization.plugin") == []


def test_records_name_what_they_promise() -> None:
    records = interposer_records()
    assert len(records) == 2
    for record in records:
        assert isinstance(record, OpEntry | SchemeEntry)
        target = load_target(record.target)
        if isinstance(record, SchemeEntry):
            assert issubclass(target, QuantizationScheme)
            assert target.method == record.method
        else:
            assert isinstance(target, CustomOp)
            assert target.name == record.name
