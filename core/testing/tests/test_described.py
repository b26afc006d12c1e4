"""A description says of a device what its platform would, and wrong files say what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interposer import Capability, Device, PlatformEntry, Registry, current_registry
from interposer.errors import (
    ConfigError,
    MissingMemberError,
    RecordError,
    StorageError,
    UnknownNameError,
    install_command,
)
from interposer.records import DeviceEntry
from interposer.tooling import Skipped
from interposer_testing.described import (
    _DESCRIPTIONS,
    DescribedPlatform,
    DeviceDescription,
    described_placement,
    find_description,
)

words = st.text(min_size=1, max_size=30).filter(lambda t: t.isprintable() and t == t.strip())
amounts = st.integers(min_value=0, max_value=2**63)
descriptions = st.builds(
    DeviceDescription,
    version=st.just(1),
    name=words,
    platform=words,
    torch_device=words,
    architecture=words,
    features=st.frozensets(words, max_size=5),
    formats=st.frozensets(words, max_size=5),
    units=st.integers(min_value=1, max_value=10**6),
    memory_bytes=amounts,
    caches_bytes=st.dictionaries(words, amounts, max_size=4),
    rates=st.dictionaries(st.just("flops_per_s"), st.floats(1, 1e18), max_size=1),
    dtypes=st.lists(st.sampled_from(["float32", "bfloat16", "float16"]), min_size=1).map(tuple),
    default_kernels=st.dictionaries(words, words, max_size=3),
)

FACTS: dict[str, Any] = {
    "version": 1,
    "name": "Abacus 9",
    "platform": "abacus",
    "torch_device": "cpu",
    "architecture": "beads",
    "features": ["slide", "carry"],
    "formats": ["float32"],
    "units": 13,
    "memory_bytes": 1024,
    "caches_bytes": {"l1d": 16},
    "rates": {"link_seconds": 2e-06},
    "dtypes": ["bfloat16", "float32"],
    "default_kernels": {"rms_norm": "reference"},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "abacus.json"
    path.write_text(json.dumps(FACTS))
    return path


@pytest.fixture
def registry(
    registered: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Registry:
    """Return a registry whose plugin ships the description as ``nine``."""
    folder = tmp_path / "acme_devices" / "inside"
    folder.mkdir(parents=True)
    (folder / "nine.json").write_text(json.dumps(FACTS))
    monkeypatch.syspath_prepend(tmp_path)
    return registered(
        PlatformEntry("abacus", "acme_of_nowhere:Abacus"),
        PlatformEntry("slide_rule", "acme_of_nowhere:SlideRule", score=90.0),
        DeviceEntry("nine", "abacus", "acme_devices:inside/nine.json"),
        DeviceEntry("mislabelled", "slide_rule", "acme_devices:inside/nine.json"),
    )


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(descriptions)
def test_json_round_trip_keeps_everything(description: DeviceDescription) -> None:
    text = description.to_json()
    again = DeviceDescription.model_validate_json(text)
    assert again == description
    assert again.to_json() == text
    assert again.device() == description.device()


def test_equal_descriptions_give_equal_files(file: Path) -> None:
    turned = {**FACTS, "features": FACTS["features"][::-1]}
    text = DeviceDescription.read(file).to_json()
    assert DeviceDescription.model_validate_json(json.dumps(turned)).to_json() == text
    assert json.loads(text) == {**FACTS, "features": ["carry", "slide"]}


def test_the_device_is_the_one_that_the_platform_would_report(file: Path) -> None:
    can = Capability(
        "beads",
        frozenset({"carry", "slide"}),
        frozenset({"float32"}),
        13,
        1024,
        {"l1d": 16},
        {"link_seconds": 2e-6},
    )
    device = DeviceDescription.read(file).device()
    assert device == Device("abacus", "cpu", "Abacus 9", can)
    assert device.capability.caches_bytes == {"l1d": 16}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"featurs": []}, "unknown key 'featurs', the nearest known is 'features'"),
        ({"version": 2}, "version is 2: Input should be 1"),
        ({"units": 0}, "units is 0: "),
        ({"units": "13"}, "units is '13': Input should be a valid integer"),
        ({"memory_bytes": -1}, "memory_bytes is -1: "),
        ({"caches_bytes": {"l1d": -1}}, "caches_bytes.l1d is -1: "),
        ({"features": [""]}, "features."),
        ({"name": "two\nlines"}, "must be printable"),
        ({"name": " padded "}, "without leading or trailing spaces"),
        ({"dtypes": []}, "dtypes is []: "),
        ({"dtypes": ["float17"]}, "'float17' is no dtype of torch"),
        ({"dtypes": ["nn"]}, "'nn' is no dtype of torch"),
        ({"units": 0, "memory_bytes": -1}, "; memory_bytes is -1"),
    ],
)
def test_an_invalid_description_names_the_wrong_field(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({**FACTS, **change}))
    with pytest.raises(StorageError, match="describes no device") as caught:
        DeviceDescription.read(path)
    assert reason in caught.value.reason
    assert caught.value.path == str(path)
    assert "doctor --describe" in caught.value.mend


@pytest.mark.parametrize("key", sorted(FACTS.keys() - {"default_kernels", "rates"}))
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({name: value for name, value in FACTS.items() if name != key}))
    with pytest.raises(StorageError, match=f"{key} is missing"):
        DeviceDescription.read(path)


def test_three_faults_are_named_and_further_ones_counted(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text('{"version": 1, "name": "Abacus 9"}')
    with pytest.raises(StorageError) as caught:
        DeviceDescription.read(path)
    assert caught.value.reason.count(" is missing") == 3
    assert caught.value.reason.endswith("; and 6 more")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_a_file_that_is_no_description_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(StorageError, match="describes no device"):
        DeviceDescription.read(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(StorageError, match="cannot be read"):
            DeviceDescription.read(path)


def test_a_description_is_found_by_name_by_provider_and_as_a_file(
    registry: Registry, file: Path
) -> None:
    expected = DeviceDescription.read(file)
    for wanted in ("nine", "acme/nine", str(file), file):
        assert find_description(registry, wanted) == expected


def test_an_unknown_name_lists_the_known_ones_and_a_missing_file_is_named(
    registry: Registry,
) -> None:
    with pytest.raises(UnknownNameError, match="Unknown device 'nien'") as caught:
        find_description(registry, "nien")
    assert caught.value.known == ["nine", "mislabelled"]
    assert "a file" in caught.value.hint
    for path in ("nien.json", "folder/nien"):
        with pytest.raises(StorageError, match="cannot be read"):
            find_description(registry, path)


def test_a_device_of_a_package_that_is_missing_names_the_package(
    registry: Registry, tmp_path: Path
) -> None:
    with pytest.raises(UnknownNameError) as caught:
        find_description(registry, "h100")
    assert caught.value.hint == (
        "interposer-cuda describes 'h100', and is not installed.\n"
        f"Try: {install_command('interposer-cuda')}"
    )
    path = tmp_path / "card.json"
    path.write_text(json.dumps({**FACTS, "platform": "rocm"}))
    with pytest.raises(UnknownNameError, match=r"Try: pip install .* interposer-rocm"):
        described_placement(registry, path)


def test_a_device_of_a_package_that_is_left_out_says_why(registry: Registry) -> None:
    reason = "disabled by the configuration"
    registry.plugins.skipped.append(Skipped("cuda", "interposer-cuda", reason))
    with pytest.raises(UnknownNameError, match=f"'h100', and is not used: {reason}"):
        find_description(registry, "h100")


def test_the_packages_describe_the_devices_that_they_ship() -> None:
    shipped: dict[str, set[str]] = {}
    for _, entry in current_registry().records(DeviceEntry):
        shipped.setdefault(entry.platform, set()).add(entry.name)
    for platform, names in _DESCRIPTIONS.items():
        assert {*names} == shipped.get(platform, {*names})


def test_a_file_without_a_suffix_is_found(registry: Registry, file: Path) -> None:
    plain = file.rename(file.with_name("described"))
    assert find_description(registry, plain.name).name == "Abacus 9"


def test_a_name_that_two_plugins_ship_needs_its_provider(
    registry: Registry, make_plugin: Callable[..., Any]
) -> None:
    from interposer.tooling import Plugins

    entry = DeviceEntry("nine", "abacus", "acme_devices:inside/nine.json")
    both = Registry(Plugins.of(make_plugin("acme", entry), make_plugin("zeta", entry)))
    with pytest.raises(ConfigError, match="'acme/nine' or 'zeta/nine'"):
        find_description(both, "nine")
    assert find_description(both, "zeta/nine").name == "Abacus 9"


def test_a_record_whose_file_is_of_another_platform_is_refused(registry: Registry) -> None:
    with pytest.raises(RecordError, match=r"'slide_rule', its file .* of 'abacus'"):
        find_description(registry, "mislabelled")


def test_the_placement_needs_neither_hardware_nor_the_platforms_code(registry: Registry) -> None:
    placement = described_placement(registry, "nine")
    assert placement.described
    assert placement.device.name == "Abacus 9"
    assert placement.choice.chosen.name == "abacus"
    assert placement.choice.why == "'Abacus 9' is described by nine of acme in code"
    (refusal,) = placement.choice.refusals
    assert refusal.candidate == "slide_rule"
    assert refusal.reason == "the device is described as one of acme in code"
    assert DeviceDescription.of(placement) == find_description(registry, "nine")


def test_the_placement_names_its_file(registry: Registry, file: Path) -> None:
    assert described_placement(registry, file).choice.why == f"'Abacus 9' is described in {file}"


def test_a_device_of_an_unknown_platform_is_refused(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({**FACTS, "platform": "abcaus"}))
    with pytest.raises(UnknownNameError, match="platform 'abcaus' of the device 'Abacus 9'") as e:
        described_placement(registry, path)
    assert e.value.known[0] == "abacus"


def test_a_described_platform_answers_but_does_not_run(file: Path) -> None:
    platform = DescribedPlatform(DeviceDescription.read(file))
    assert (platform.name, platform.device_type) == ("abacus", "cpu")
    assert platform.dtypes("cpu") == [torch.bfloat16, torch.float32]
    assert platform.memory("cpu").free_bytes == platform.memory("cpu").total_bytes == 1024
    assert platform.capability("cpu") == platform.devices()[0].capability
    assert platform.default_kernels() == {"rms_norm": "reference"}
    assert not platform.probe()
    with pytest.raises(MissingMemberError, match="nothing can run on it"):
        platform.synchronize("cpu")
    with pytest.raises(MissingMemberError, match="nothing can run on it"):
        platform.seed(1)
