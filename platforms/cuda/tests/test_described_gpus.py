"""Each described GPU equals the description that the platform gives of the real device."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hatchling.builders.wheel import WheelBuilder

import interposer_cuda
from interposer import Request, explain
from interposer.records import (
    AttentionEntry,
    DeviceEntry,
    Kernel,
    PlatformEntry,
    load_target,
    resource_path,
)
from interposer_cuda._hardware.architectures import architecture_of
from interposer_cuda._platform import CUDAPlatform
from interposer_cuda.plugin import interposer_records
from interposer_ops.devices.architecture import bandwidth_features
from interposer_testing.described import DeviceDescription

FOLDER = Path(interposer_cuda.__file__).parent / "devices"
ENTRIES = {
    record.name: record for record in interposer_records() if isinstance(record, DeviceEntry)
}
# Compute capability, and MHz and bits of the memory; a description holds the bandwidth class.
# Sources: NVIDIA's architecture whitepapers (A100, H100, Turing, Ada, RTX Blackwell); H200 data
# sheet (141 GB at 4.8 TB/s; clock and bus follow from it); B200: Blackwell tuning guide, and
# properties in pytorch/ao, pull request 4002; RTX 5090: deviceQuery in NVIDIA/nccl, issue 1637.
# Memory is the total that nvidia-smi shows.
MEMORY = {
    "a100": ((8, 0), 1593, 5120),
    "b200": ((10, 0), 3996, 7680),
    "h100": ((9, 0), 2619, 5120),
    "h200": ((9, 0), 3201, 6016),
    "rtx4090": ((8, 9), 10501, 384),
    "rtx5090": ((12, 0), 14001, 512),
    "t4": ((7, 5), 5001, 256),
}
# What depends on the machine that a device is in.
OF_THE_MACHINE = {"host_mapping", "p2p"}


def described(name: str) -> DeviceDescription:
    return DeviceDescription.read(resource_path(ENTRIES[name].resource))


def test_every_file_is_declared() -> None:
    assert sorted(ENTRIES) == sorted(path.stem for path in FOLDER.iterdir()) == sorted(MEMORY)


@pytest.mark.parametrize("name", sorted(MEMORY))
def test_a_description_matches_its_architecture(name: str) -> None:
    description = described(name)
    version, mhz, bits = MEMORY[name]
    known = architecture_of(*version)
    assert description.architecture == f"sm_{version[0]}{version[1]}"
    bandwidth = bandwidth_features(2 * mhz * 1e6 * bits / 8)
    assert description.features - OF_THE_MACHINE == known.features | bandwidth
    assert description.formats == known.formats
    assert description.dtypes == known.dtypes
    assert description.caches_bytes["shared"] == known.shared_bytes
    assert description.caches_bytes["l2"] < description.memory_bytes
    assert description.platform == CUDAPlatform.name
    assert torch.device(description.torch_device).type == CUDAPlatform.device_type


@pytest.mark.parametrize("name", sorted(MEMORY))
def test_portable_triton_kernels_are_candidates(name: str) -> None:
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
    [r for r in interposer_records() if isinstance(r, AttentionEntry | Kernel | PlatformEntry)],
    ids=lambda record: record.name,
)
def test_every_record_resolves(record: AttentionEntry | Kernel | PlatformEntry) -> None:
    assert callable(load_target(record.target))


@pytest.mark.parametrize(
    "record",
    [r for r in interposer_records() if isinstance(r, AttentionEntry | Kernel)],
    ids=lambda record: record.name,
)
def test_every_requirement_is_met_by_some_gpu(record: AttentionEntry | Kernel) -> None:
    known = [described(name).device().capability for name in ENTRIES]
    wanted = replace(record.requires, dtypes=(), dims={})
    assert any(wanted.judge(Request("kernel", "any", capability=can)) for can in known)


def test_the_wheel_holds_the_descriptions(tmp_path: Path) -> None:
    project = Path(__file__).parents[1]
    (wheel,) = WheelBuilder(str(project)).build(directory=str(tmp_path))
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"interposer_cuda/devices/{name}.json" for name in ENTRIES} <= names


def test_the_plugin_provides_their_platform() -> None:
    provided = {record.name for record in interposer_records() if isinstance(record, PlatformEntry)}
    assert {entry.platform for entry in ENTRIES.values()} <= provided
