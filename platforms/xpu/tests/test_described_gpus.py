"""Each described GPU equals the description that the platform gives of the real device."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from hatchling.builders.wheel import WheelBuilder

import interposer_xpu
from interposer import Request, explain
from interposer.records import DeviceEntry, Kernel, PlatformEntry, load_target, resource_path
from interposer.requires import Requires
from interposer_testing.described import DeviceDescription
from interposer_xpu._hardware.architectures import architecture_of, packed
from interposer_xpu._hardware.level_zero import XPUDevice, capability_of
from interposer_xpu._platform import XPUPlatform
from interposer_xpu.plugin import interposer_records

FOLDER = Path(interposer_xpu.__file__).parent / "devices"
RECORDS = interposer_records()
ENTRIES = {record.name: record for record in RECORDS if isinstance(record, DeviceEntry)}
KERNELS = [record for record in RECORDS if isinstance(record, Kernel)]
# Version, whether integrated, Xe-cores, and GB/s of the memory; a description holds the bandwidth
# class. Sources: Intel's product page (B580); Core Ultra 200V brief (Arc 140V: LPDDR5X-8533,
# 128 bits); Max 1550, one of two stacks: properties in intel/torch-xpu-ops, issue 3891, and Intel's
# product brief (3276.8 GB/s for both).
FACTS = {
    "arc140v": (packed(20, 4, 4), True, 8, 136.5),
    "b580": (packed(20, 1, 4), False, 20, 456.0),
    "max1550": (packed(12, 60, 7), False, 64, 1638.4),
}


def described(name: str) -> DeviceDescription:
    return DeviceDescription.read(resource_path(ENTRIES[name].resource))


def test_every_file_is_declared() -> None:
    assert sorted(ENTRIES) == sorted(path.stem for path in FOLDER.iterdir()) == sorted(FACTS)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_a_description_matches_the_platform(name: str) -> None:
    description = described(name)
    ip_version, integrated, xe_cores, speed = FACTS[name]
    known = architecture_of(ip_version)
    caches = description.caches_bytes
    device = XPUDevice(
        *(description.name, "", 0, ip_version, integrated, xe_cores, xe_cores * 8),
        *(description.memory_bytes, int(speed * 1e9), caches["shared"], caches["l2"]),
        sub_group_sizes=(16, 32),
        float64=True,
    )
    assert capability_of(device, triton=True) == description.device().capability
    assert description.dtypes == known.dtypes
    assert caches["shared"] == known.shared_bytes
    assert caches["l2"] < description.memory_bytes
    assert description.platform == XPUPlatform.name
    assert torch.device(description.torch_device).type == XPUPlatform.device_type


@pytest.mark.parametrize("name", sorted(FACTS))
def test_portable_triton_kernels_are_candidates(name: str) -> None:
    pytest.importorskip("triton", reason="needs the package triton, whose kernels are candidates")
    options = {
        option.candidate.name: option.verdict
        for subject in explain(device=name).subjects
        for option in subject.options
        if subject.kind == "kernel" and option.candidate.name.endswith("_triton")
    }
    assert len(options) > 60
    assert [kernel for kernel, verdict in options.items() if not verdict] == []


@pytest.mark.parametrize(
    "record",
    [r for r in RECORDS if isinstance(r, Kernel | PlatformEntry)],
    ids=lambda record: record.name,
)
def test_every_record_resolves(record: Kernel | PlatformEntry) -> None:
    targets = [record.target]
    if isinstance(record, Kernel):
        targets += [target for target in (record.predicate, record.prepare) if target]
    assert all(callable(load_target(target)) for target in targets)


@pytest.mark.parametrize("record", KERNELS, ids=lambda record: record.name)
def test_every_requirement_is_met_by_some_gpu(record: Kernel) -> None:
    known = [described(name).device().capability for name in ENTRIES]
    wanted = Requires(record.requires.features, record.requires.architectures)
    assert any(wanted.judge(Request("kernel", "any", capability=can)) for can in known)


def test_the_wheel_holds_the_descriptions(tmp_path: Path) -> None:
    project = Path(__file__).parents[1]
    (wheel,) = WheelBuilder(str(project)).build(directory=str(tmp_path))
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"interposer_xpu/devices/{name}.json" for name in ENTRIES} <= names


def test_the_plugin_provides_their_platform() -> None:
    provided = {record.name for record in RECORDS if isinstance(record, PlatformEntry)}
    assert {entry.platform for entry in ENTRIES.values()} <= provided
