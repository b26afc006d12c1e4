"""The XPU platform without a GPU: its services, and its errors without a driver."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from interposer.errors import ConfigError, PluginError, UnknownNameError
from interposer_xpu import _triton_backend as triton_backend
from interposer_xpu._hardware import host_mapping, level_zero
from interposer_xpu._hardware.architectures import packed
from interposer_xpu._hardware.level_zero import Answer, XPUDevice
from interposer_xpu._hardware.presence import TorchBuild
from interposer_xpu._hardware.system import read_system
from interposer_xpu._hardware.visibility import visible_devices
from interposer_xpu._platform import XPUPlatform

DEVICE = XPUDevice(
    *("Intel(R) Arc(TM) B580 Graphics", "uuid", 0xE20B, packed(20, 1, 4), False, 20, 160),
    *(12 * 2**30, 456 * 10**9, 2**17, 18 * 2**20, (16, 32), True),
)
SMALL = replace(
    DEVICE, name="Intel(R) Arc(TM) 140V GPU (16GB)", ip_version=packed(20, 4), integrated=True
)
without_gpu = pytest.mark.skipif(bool(read_system().nodes), reason="needs a machine without a GPU")


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> XPUPlatform:
    """Return a platform whose driver answers with two devices."""
    answer = Answer("1.6.33578", (DEVICE, SMALL))
    monkeypatch.setattr(level_zero, "ask", lambda *_: answer)
    for name in ("ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY"):
        monkeypatch.delenv(name, raising=False)
    return XPUPlatform()


def test_the_platform_provides_its_services() -> None:
    provided = {m for m in XPUPlatform.optional_members() if XPUPlatform.provides(m)}
    assert provided == {
        *("compile_backend", "distributed_backend", "facts", "map_host_memory"),
        *("memory_profile", "peak_memory_bytes", "pin_memory", "start_method", "stream"),
    }


def test_devices_are_in_the_order_of_the_driver(platform: XPUPlatform) -> None:
    devices = platform.devices()
    assert [(d.platform, d.torch_device, d.name) for d in devices] == [
        ("xpu", "xpu:0", "Intel(R) Arc(TM) B580 Graphics"),
        ("xpu", "xpu:1", "Intel(R) Arc(TM) 140V GPU (16GB)"),
    ]
    assert platform.capability("xpu") == platform.capability("xpu:0") == devices[0].capability
    assert "integrated" in platform.capability("xpu:1").features
    assert platform.dtypes("xpu:1") == [torch.bfloat16, torch.float16, torch.float32]


def test_only_selected_devices_are_listed(
    platform: XPUPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "level_zero:1")
    assert [(d.torch_device, d.name) for d in platform.devices()] == [("xpu:0", SMALL.name)]


def test_an_unknown_device_is_refused(platform: XPUPlatform) -> None:
    with pytest.raises(UnknownNameError, match=r"'xpu:2'.*'xpu:0', 'xpu:1'"):
        platform.capability("xpu:2")


def test_triton_without_the_intel_backend_is_no_feature(platform: XPUPlatform) -> None:
    there = triton_backend.judge()
    assert ("triton" in platform.capability("xpu").features) is bool(there)


@pytest.mark.process
@pytest.mark.parametrize(("folders", "accepted"), [(("intel",), True), (("nvidia", "amd"), False)])
def test_the_triton_backend_is_found(
    tmp_path: Path, folders: tuple[str, ...], accepted: bool
) -> None:
    for folder in folders:
        place = tmp_path / "triton/backends" / folder
        place.mkdir(parents=True)
        (place / "compiler.py").write_text("raise SystemExit('was imported')")
    (tmp_path / "triton/__init__.py").write_text("raise SystemExit('was imported')")
    program = "from interposer_xpu._triton_backend import judge; print(judge().reason)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    refused = "the installed triton has no backend 'intel', it has amd, nvidia. Install that of"
    assert done.stdout.strip().startswith("" if accepted else refused)
    assert bool(done.stdout.strip()) is not accepted


def test_facts_describe_the_devices(platform: XPUPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0,1")
    facts = platform.facts()
    assert facts["ZE_AFFINITY_MASK"] == "'0,1'"
    assert facts["driver"] == "Level Zero 1.6.33578"
    assert facts["xpu:1"] == (
        "Intel(R) Arc(TM) 140V GPU (16GB), lnl_m (Xe2-LPG), 20 Xe-cores with 160 vector engines, "
        "12.0 GiB at 456 GB/s, of the processor's memory, uuid"
    )


def test_backend_names_equal_torch(platform: XPUPlatform) -> None:
    assert platform.distributed_backend() == "xccl"
    assert platform.compile_backend() == "inductor"
    assert platform.start_method() == "spawn"


@pytest.mark.process
@without_gpu
def test_without_a_loader_there_is_no_device() -> None:
    with pytest.raises(PluginError, match=r"Level Zero lists no device: "):
        XPUPlatform().devices()


def test_hidden_devices_are_not_listed(
    platform: XPUPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "opencl:*")
    with pytest.raises(PluginError, match="show no device to this process"):
        platform.devices()


def test_only_pinned_contiguous_memory_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="this tensor is on cpu and not pinned"):
        host_mapping.device_view(torch.zeros(4))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _self: True)
    with pytest.raises(ConfigError, match="only contiguous memory is mapped, strides are"):
        host_mapping.device_view(torch.zeros(4, 4).t())
    with pytest.raises(ConfigError, match="host memory cannot be mapped: needs the package vllm"):
        host_mapping.device_view(torch.zeros(4))


def test_the_installed_build_is_read() -> None:
    build = TorchBuild.installed()
    assert build.version == torch.__version__
    assert bool(build.judge("a GPU")) is bool(getattr(torch.version, "xpu", None))


def test_sub_devices_and_device_types_are_parsed() -> None:
    assert visible_devices(2, {}).devices == (0, 1)
    assert visible_devices(2, {"ONEAPI_DEVICE_SELECTOR": " "}).devices == (0, 1)
    assert visible_devices(2, {"ONEAPI_DEVICE_SELECTOR": "LEVEL_ZERO:GPU"}).devices == (0, 1)
    assert visible_devices(2, {"ONEAPI_DEVICE_SELECTOR": "level_zero:*.*"}).devices == (0, 1)
