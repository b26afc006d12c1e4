"""Each described GPU equals the description that the platform gives of the real device."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import interposer_rocm
from interposer import Request, explain
from interposer.records import (
    AttentionEntry,
    DeviceEntry,
    Kernel,
    PlatformEntry,
    Record,
    load_target,
    resource_path,
)
from interposer_rocm._hardware.architectures import GfxVersion, architecture_of
from interposer_rocm._hardware.topology import GPU, capability_of
from interposer_rocm._platform import ROCmPlatform
from interposer_rocm.plugin import interposer_records
from interposer_testing.described import DeviceDescription

FOLDER = Path(interposer_rocm.__file__).parent / "devices"
RECORDS = interposer_records()
ENTRIES = {record.name: record for record in RECORDS if isinstance(record, DeviceEntry)}
CODE = [r for r in RECORDS if isinstance(r, AttentionEntry | Kernel | PlatformEntry)]
GIB, MIB = 2**30, 2**20
# Version, compute units, bytes, MHz and bits of the memory, bytes of L2, and whether several
# are connected by xGMI in one machine.
# Sources: AMD's "GPU hardware specifications" in the documentation of ROCm; for bandwidths, AMD's
# data sheets (MI300X 5.3 TB/s, MI355X 8 TB/s, MI250X 3.2 TB/s of both dies, RX 7900 XTX 960 GB/s,
# RX 9070 XT 640 GB/s). Clock and bus of the MI300X are from ROCm's issues; the others follow from
# the bandwidth.
GPUS = {
    "mi250x": ("gfx90a", 110, 64 * GIB, 1600, 4096, 8 * MIB, True),
    "mi300x": ("gfx942", 304, 192 * GIB, 1300, 8192, 32 * MIB, True),
    "mi355x": ("gfx950", 256, 288 * GIB, 2000, 8192, 32 * MIB, True),
    "rx7900xtx": ("gfx1100", 96, 24 * GIB, 1249, 384, 6 * MIB, False),
    "rx9070xt": ("gfx1201", 64, 16 * GIB, 1258, 256, 8 * MIB, False),
}


def described(name: str) -> DeviceDescription:
    return DeviceDescription.read(resource_path(ENTRIES[name].resource))


def test_every_file_is_declared() -> None:
    assert sorted(ENTRIES) == sorted(path.stem for path in FOLDER.iterdir()) == sorted(GPUS)


@pytest.mark.parametrize("name", sorted(GPUS))
def test_a_description_matches_the_driver_files_of_the_device(name: str) -> None:
    description = described(name)
    version, units, memory, mhz, bits, l2, xgmi = GPUS[name]
    gfx = GfxVersion.of_name(version)
    known = architecture_of(gfx)
    lanes = 64 if "wave64" in known.features else 32
    peers = (2,) if xgmi else ()
    clocks = (memory, mhz, bits, l2, known.shared_bytes, lanes, 0, 128)
    gpu = GPU(1, gfx, description.name, "", units, *clocks, peers, xgmi)
    assert description.device().capability == capability_of(gpu, frozenset({1, 2}))
    assert description.dtypes == known.dtypes
    assert description.platform == ROCmPlatform.name


@pytest.mark.parametrize("name", sorted(GPUS))
def test_portable_triton_kernels_are_candidates(name: str) -> None:
    options = {
        option.candidate.name: option.verdict
        for subject in explain(device=name).subjects
        for option in subject.options
        if subject.kind == "kernel" and option.candidate.name.endswith("_triton")
    }
    assert len(options) > 60
    assert [kernel for kernel, verdict in options.items() if not verdict] == []


@pytest.mark.parametrize("record", CODE, ids=lambda record: record.name)
def test_every_record_resolves(record: Record) -> None:
    targets = [
        getattr(record, label, "") for label in ("target", "predicate", "prepare", "confirm")
    ]
    assert all(callable(load_target(target)) for target in targets if target)


@pytest.mark.parametrize(
    "record", [r for r in CODE if not isinstance(r, PlatformEntry)], ids=lambda r: r.name
)
def test_every_requirement_is_met_by_some_gpu(record: AttentionEntry | Kernel) -> None:
    known = [described(name).device().capability for name in ENTRIES]
    wanted = replace(record.requires, dtypes=(), dims={})
    assert any(wanted.judge(Request("kernel", "any", capability=can)) for can in known)


def test_the_wheel_holds_the_descriptions(tmp_path: Path) -> None:
    project = Path(__file__).parents[1]
    (wheel,) = WheelBuilder(str(project)).build(directory=str(tmp_path))
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"interposer_rocm/devices/{name}.json" for name in ENTRIES} <= names
