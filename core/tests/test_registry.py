"""The registry files every record as a candidate, and says what it does not know."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from interposer import (
    AttentionEntry,
    Config,
    Kernel,
    LayerEntry,
    ModelEntry,
    OpEntry,
    PlatformEntry,
    SchemeEntry,
    current_registry,
)
from interposer._contract.request import Kind
from interposer._plugins.plugins import Plugins
from interposer._plugins.registry import Registry
from interposer.errors import PluginError, UnknownNameError

Make = Callable[..., ModuleType]
Register = Callable[..., Registry]

RECORDS = (
    OpEntry("linear", "acme.ops:linear"),
    Kernel("linear", "linear_fast", "acme.kernels:fast", score=7.0),
    LayerEntry("rms_norm", "acme_norm", "acme.layers:Norm"),
    AttentionEntry("paged", "acme.attention:Paged"),
    SchemeEntry("gptq", "acme_gptq", "acme.schemes:Gptq"),
    ModelEntry(("Gem", "Gem2", "Gem"), "acme_gem", "acme.models:Gem"),
    PlatformEntry("tpu", "acme.tpu:Tpu"),
)


def test_every_record_is_a_candidate(registered: Register) -> None:
    registry = registered(*RECORDS)
    subjects: list[tuple[Kind, str, list[str]]] = [
        ("kernel", "linear", ["acme/reference", "acme/linear_fast"]),
        ("layer", "rms_norm", ["acme/acme_norm"]),
        ("attention", "", ["acme/paged"]),
        ("scheme", "gptq", ["acme/acme_gptq"]),
        ("model", "Gem", ["acme/acme_gem"]),
        ("model", "Gem2", ["acme/acme_gem"]),
        ("platform", "", ["acme/tpu"]),
    ]
    for kind, subject, names in subjects:
        assert [c.qualified_name for c in registry.candidates(kind, subject)] == names
    assert [c.score for c in registry.candidates("kernel", "linear")] == [0.0, 7.0]
    assert set(registry.ops) == {"linear"}


def test_the_runs_relation_is_not_transitive(registered: Register) -> None:
    registry = registered(
        PlatformEntry("board", "acme.board:Board", runs=("tpu", "of-nobody")),
        PlatformEntry("tpu", "acme.tpu:Tpu", runs=("host",)),
    )
    assert registry.runs("board") == {"", "board", "tpu", "of-nobody"}
    assert registry.runs("tpu") == {"", "tpu", "host"}
    assert registry.runs("host") == {"", "host"}


def test_a_plugin_cannot_extend_runs_of_another_plugins_platform(make_plugin: Make) -> None:
    original = make_plugin("acme", PlatformEntry("board", "acme.board:Board", runs=("tpu", "host")))
    foreign = make_plugin("evil", PlatformEntry("board", "evil.board:Board", runs=("tpu", "gpu")))
    assert Registry(Plugins.of(original)).runs("board") == {"", "board", "tpu", "host"}
    assert Registry(Plugins.of(original, foreign)).runs("board") == {"", "board", "tpu"}


def test_an_empty_registry_has_no_platform_and_no_backend(registered: Register) -> None:
    registry = registered()
    assert registry.candidates("platform") == []
    assert registry.candidates("attention") == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("kernel", "Unknown op 'linaer'. Known, nearest first: 'linear'"),
        ("layer", "Unknown layer id 'linaer'. Known, nearest first: 'rms_norm'"),
        ("scheme", "Unknown quantization method 'linaer'. Known, nearest first: 'gptq'"),
    ],
)
def test_an_unknown_subject_lists_the_known(kind: Kind, message: str, registered: Register) -> None:
    with pytest.raises(UnknownNameError) as caught:
        registered(*RECORDS).candidates(kind, "linaer")
    assert str(caught.value).startswith(message)
    assert "interposer doctor" in caught.value.hint


def test_a_kernel_does_not_define_its_op(registered: Register) -> None:
    with pytest.raises(UnknownNameError, match="Unknown op 'linear'"):
        registered(Kernel("linear", "linear_fast", "acme.kernels:fast")).candidates(
            "kernel", "linear"
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(kernels={"linaer": "x"}), "op 'linaer' in Config.kernels.* 'linear'"),
        (Config(kernels={"linaer@layers.*": "x"}), "op 'linaer' in Config.kernels.* 'linear'"),
        (Config(layers={"norm": "x"}), "layer id 'norm' in Config.layers.* 'rms_norm'"),
        (Config(attention={"decode": "x"}), "attention type 'decode' in Config.attention.* 'deco"),
    ],
)
def test_a_pin_on_an_unknown_subject_raises(
    config: Config, message: str, registered: Register
) -> None:
    with pytest.raises(UnknownNameError, match=message):
        registered(*RECORDS).check_rules(config)


def test_pins_on_known_subjects_pass(registered: Register) -> None:
    config = Config(
        kernels={"linear": "x", "linear@a.*": "y"},
        layers={"rms_norm@b": "x"},
        attention={"encoder_only": "x"},
    )
    registered(*RECORDS).check_rules(config)


def test_a_target_that_cannot_be_loaded_names_plugin_target_and_mend(
    registered: Register,
) -> None:
    registry = registered(*RECORDS)
    candidate = registry.candidates("kernel", "linear")[1]
    with pytest.raises(PluginError) as caught:
        registry.load(candidate, "acme_of_nowhere.kernels:fast")
    assert (caught.value.plugin, caught.value.distribution) == ("acme", "acme in code")
    assert "'acme_of_nowhere.kernels:fast' cannot be loaded" in caught.value.reason
    assert "No module named 'acme_of_nowhere'" in caught.value.reason
    assert "INTERPOSER_DISABLE=acme" in caught.value.mend
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_the_current_registry_is_cached_per_discovery() -> None:
    everything = frozenset(
        plugin.distribution for plugin in current_registry().plugins.loaded
    ) | frozenset(failure.distribution for failure in current_registry().plugins.failed)
    disabled = Config(disable=everything)
    assert current_registry() is current_registry(Config(platform="cpu"))
    assert current_registry(disabled) is current_registry(disabled)
    assert current_registry(disabled) is not current_registry()
    assert current_registry(disabled).plugins.loaded == []
