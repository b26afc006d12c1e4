"""Descriptions of processors, compared with the platform's results on such machines."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import interposer_cpu
from interposer import Capability, explain
from interposer.records import DeviceEntry, PlatformEntry, resource_path
from interposer_cpu import _features as features
from interposer_cpu import native
from interposer_cpu._platform import CPUPlatform
from interposer_cpu.plugin import interposer_records
from interposer_testing.described import DeviceDescription

FOLDER = Path(interposer_cpu.__file__).parent / "devices"
ENTRIES = {
    record.name: record for record in interposer_records() if isinstance(record, DeviceEntry)
}
CACHES = ["l1d", "l2", "l2d", "l3", "l4"]


@pytest.fixture(params=sorted(ENTRIES))
def description(request: pytest.FixtureRequest) -> DeviceDescription:
    return DeviceDescription.read(resource_path(ENTRIES[request.param].resource))


def test_every_file_is_declared() -> None:
    assert sorted(ENTRIES) == sorted(path.stem for path in FOLDER.iterdir())
    assert len(ENTRIES) >= 9


def test_names_are_distinct() -> None:
    names = [DeviceDescription.read(path).name for path in FOLDER.iterdir()]
    assert len(set(names)) == len(names)


def test_features_have_the_names_that_this_platform_reports(description: DeviceDescription) -> None:
    reported = features.reported_by_torch(dict.fromkeys(description.features, True))
    assert reported == description.features
    assert description.formats == features.formats(description.features)
    assert description.architecture in ("x86_64", "aarch64", "s390x")


def test_dtypes_equal_the_platform(description: DeviceDescription) -> None:
    class Described(CPUPlatform):
        def capability(self, device: str) -> Capability:
            return description.device().capability

    offered = [str(dtype).removeprefix("torch.") for dtype in Described().dtypes("cpu")]
    assert list(description.dtypes) == offered
    assert description.platform == CPUPlatform.name
    assert description.torch_device == "cpu"


def test_caches_grow_by_level(description: DeviceDescription) -> None:
    levels = sorted(description.caches_bytes, key=CACHES.index)
    sizes = [description.caches_bytes[level] for level in levels]
    assert sizes == sorted(sizes)
    assert sizes[-1] < description.memory_bytes


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("ampere-altra", "dotprod"),
        ("apple-m4", "bf16_i8mm"),
        ("graviton4", "bf16_i8mm"),
        ("icelake-server", "avx512_vnni"),
        ("sapphire-rapids", "amx"),
        ("z14", "z14"),
        ("z16", "z15"),
        ("zen2", "avx2"),
        ("zen5", "avx512_bf16"),
    ],
)
def test_the_level_of_instructions_is_known(name: str, level: str) -> None:
    description = DeviceDescription.read(resource_path(ENTRIES[name].resource))
    assert native.levels_of(description.device().capability)[-1] == level


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sapphire-rapids", ""),
        ("zen5", ""),
        ("icelake-server", "needs avx512_bf16, which the device lacks"),
        ("zen2", "needs avx512_bf16, avx512bw, avx512dq, avx512f, avx512vl, which the device"),
        ("graviton4", "needs x86_64, the device is aarch64"),
        ("z16", "needs x86_64, the device is s390x"),
    ],
)
def test_kernels_can_be_planned_for_described_processors(name: str, reason: str) -> None:
    explanation = explain(device=name)
    options = {
        option.candidate.name: option.verdict
        for subject in explanation.subjects
        for option in subject.options
        if (subject.kind, subject.name) == ("kernel", "linear")
    }
    packed = options["linear_packed_bfloat16"]
    assert packed.accepted == (not reason)
    assert packed.reason.startswith(reason)
    assert options["reference"]


def test_the_wheel_holds_the_descriptions(tmp_path: Path) -> None:
    project = Path(__file__).parents[1]
    (wheel,) = WheelBuilder(str(project)).build(directory=str(tmp_path))
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"interposer_cpu/devices/{name}.json" for name in ENTRIES} <= names


def test_the_plugin_provides_their_platform() -> None:
    provided = {record.name for record in interposer_records() if isinstance(record, PlatformEntry)}
    assert {entry.platform for entry in ENTRIES.values()} <= provided
