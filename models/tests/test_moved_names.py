"""Names that moved to another distribution still load from their former home, with a warning."""

from __future__ import annotations

import importlib
import sys

import pytest

import interposer_adapt
import interposer_engine
import interposer_models

# Names that were never in interposer_models.
NEW = {
    "EmbeddedInput",
    "Media",
    "AudioLimits",
    "EncoderFeatures",
    "MemoryNeed",
    "Transcript",
    "TranscriptSegment",
    "TranscriptStream",
    "TranscriptionOptions",
}
MOVED = [
    (home, name)
    for home in (interposer_engine, interposer_adapt)
    for name in home.__all__
    if name != "CausalLM" and name not in NEW
]


@pytest.mark.parametrize(("home", "name"), MOVED, ids=[name for _, name in MOVED])
def test_a_moved_name_loads_with_a_warning(home: object, name: str) -> None:
    new = f"{getattr(home, '__name__', '')}.{name}"
    with pytest.warns(
        DeprecationWarning, match=rf"^interposer_models\.{name} is now {new}:"
    ) as warned:
        value = getattr(interposer_models, name)
    assert value is getattr(home, name)
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("module", "name"), [("roofline", "ModelWork"), ("quantizer", "InterposerConfig")]
)
def test_a_moved_module_loads_with_a_warning(module: str, name: str) -> None:
    former = importlib.import_module(f"interposer_models.{module}")
    with pytest.warns(DeprecationWarning, match=rf"^interposer_models\.{module}\.{name} is now "):
        assert getattr(former, name).__name__ == name


def test_without_the_new_home_the_package_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # None in sys.modules is how Python notes a module that cannot be found.
    monkeypatch.setitem(sys.modules, "interposer_adapt", None)
    with pytest.raises(ImportError, match=r"Try: pip .* interposer-adapt .*, then import it"):
        _ = interposer_models.adapt


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        _ = interposer_models.lode
