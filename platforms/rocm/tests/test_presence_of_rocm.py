"""Presence of a GPU, checked with system files in a temporary folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from platforms.rocm.tests.fake_machine import Machine, Node

from interposer_rocm._hardware.presence import Presence
from interposer_rocm._hardware.system import read_system
from interposer_rocm._hardware.torch_build import TorchBuild

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, as the driver does")
HIP = TorchBuild("2.13.0+rocm7.0", hip="7.0.51831", targets=("gfx90a", "gfx942", "gfx1100"))
IDS = "0x1111111111111111", "0x2222222222222222", "0x2233333333333333"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def judged(machine: Machine, build: TorchBuild = HIP, **variables: str) -> tuple[bool, str]:
    verdict = Presence(read_system(machine.root), build, variables).judge()
    return verdict.accepted, verdict.reason


def node(number: int, **others: Any) -> Node:
    return Node(unique_id=int(IDS[number], 16), **others)


def test_a_gpu_is_found(machine: Machine) -> None:
    machine.file("sys/class/drm/renderD128/device/product_name", "AMD Instinct MI300X\n")
    assert judged(machine.gpus(Node())) == (
        True,
        "1 visible of 1: AMD Instinct MI300X (gfx942); amdgpu 6.12.12",
    )


def test_names_come_from_the_table_of_libdrm(machine: Machine) -> None:
    machine.file("sys/class/drm/renderD128/device/revision", "0xc8\n")
    machine.file(
        "usr/share/libdrm/amdgpu.ids",
        "# a comment\n1.0.0\n"
        "744C,\tCC,\tAMD Radeon RX 7900 XT\n744C,\tC8,\tAMD Radeon RX 7900 XTX\n",
    )
    (gpu,) = read_system(machine.gpus(Node(110000, device_id=0x744C)).root).topology.gpus
    assert (gpu.name, str(gpu.version)) == ("AMD Radeon RX 7900 XTX", "gfx1100")


def test_a_gpu_without_a_name_goes_by_its_architecture(machine: Machine) -> None:
    assert judged(machine.gpus(Node(90010)))[1].startswith("1 visible of 1: AMD gfx90a (gfx90a)")


def test_no_gpu_is_reported(machine: Machine) -> None:
    assert judged(machine) == (False, "no GPU of AMD: no /dev/kfd and none on the bus")


def test_gpus_of_other_vendors_do_not_count(machine: Machine) -> None:
    folder = "sys/bus/pci/devices/0000:01:00.0"
    machine.file(f"{folder}/vendor", "0x10de\n").file(f"{folder}/class", "0x030000\n")
    # A bridge of the right vendor is no GPU either.
    machine.on_bus("0000:02:00.0", "0x060400")
    assert judged(machine)[1].startswith("no GPU of AMD")


@pytest.mark.parametrize("kind", ["0x030000", "0x038000", "0x120000"])
def test_a_missing_driver_is_reported(machine: Machine, kind: str) -> None:
    accepted, reason = judged(machine.on_bus(kind=kind))
    assert not accepted
    assert reason == (
        "a GPU of AMD is on the PCI bus (0000:05:00.0), but no driver for it is loaded. "
        "Load it: modprobe amdgpu"
    )


def test_a_container_without_devices(machine: Machine) -> None:
    accepted, reason = judged(machine.on_bus().driver())
    assert not accepted
    assert reason.startswith("amdgpu 6.12.12 drives a GPU (0000:05:00.0), but /dev/kfd is missing.")


def test_a_container_with_half_of_the_devices(machine: Machine) -> None:
    accepted, reason = judged(machine.gpus(Node(), Node(), render_files=False))
    assert not accepted
    assert "but not /dev/dri/renderD128, /dev/dri/renderD129" in reason


def test_a_container_that_was_given_other_gpus(machine: Machine) -> None:
    machine.gpus()
    # Properties of a GPU that a control group denies cannot be read; here they are a folder.
    (machine.root / "sys/class/kfd/kfd/topology/nodes/1/properties").mkdir(parents=True)
    accepted, reason = judged(machine)
    assert not accepted
    assert reason.endswith("1 nodes cannot be read, as of GPUs that a container was not given")


def test_an_error_names_the_group_to_a_user_without_permission(machine: Machine) -> None:
    system = read_system(machine.gpus(Node()).root)
    files = replace(system.files, closed=system.files.nodes)
    verdict = replace(system, files=files).judge()
    assert not verdict
    assert "usermod -a -G render,video" in verdict.reason


def test_wsl(machine: Machine) -> None:
    machine.file("proc/sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2\n")
    assert judged(machine)[1].startswith("this is WSL, where /dev/kfd")


def test_a_driver_without_a_version_goes_by_the_kernels(machine: Machine) -> None:
    machine.gpus(Node()).file("proc/sys/kernel/osrelease", "6.14.0-generic\n")
    (machine.root / "sys/module/amdgpu/version").unlink()
    assert judged(machine)[1].endswith("amdgpu of Linux 6.14.0-generic")


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (TorchBuild("2.13.0+cpu"), "torch 2.13.0+cpu is built without HIP"),
        (TorchBuild("2.13.0", cuda="12.8"), "torch 2.13.0 is built for CUDA 12.8, that is GPUs of"),
    ],
)
def test_torch_for_something_else(machine: Machine, build: TorchBuild, expected: str) -> None:
    accepted, reason = judged(machine.gpus(Node()), build)
    assert not accepted
    assert reason.startswith("there is AMD gfx942 (gfx942), but ")
    assert expected in reason
    # Without a GPU that is no matter.
    assert "torch" not in judged(Machine(machine.root / "empty"), build)[1]


def test_torch_without_kernels_for_the_gpu(machine: Machine) -> None:
    accepted, reason = judged(machine.gpus(Node(100300)))
    assert not accepted
    assert reason.startswith("torch 2.13.0+rocm7.0 has kernels for gfx1100, gfx90a, gfx942 only, ")
    assert "not for gfx1030" in reason


def test_an_override_changes_the_architecture(machine: Machine) -> None:
    machine.gpus(Node(110002), Node(90402))
    presence = Presence(read_system(machine.root), HIP, {"HSA_OVERRIDE_GFX_VERSION_1": "11.0.0"})
    assert [str(gpu.version) for gpu in presence.visible_gpus().devices] == ["gfx1100", "gfx942"]
    both = replace(presence, variables={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"})
    assert [str(gpu.version) for gpu in both.visible_gpus().devices] == ["gfx1100", "gfx1100"]
    nonsense = replace(presence, variables={"HSA_OVERRIDE_GFX_VERSION": "11"})
    assert [str(gpu.version) for gpu in nonsense.visible_gpus().devices] == ["gfx1102", "gfx942"]


@pytest.mark.parametrize(
    ("variables", "nodes", "note"),
    [
        ({}, [1, 2, 3], ""),
        ({"ROCR_VISIBLE_DEVICES": "2,0"}, [3, 1], "ROCR_VISIBLE_DEVICES=2,0"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1111111111111111"}, [1], "ROCR_VISIBLE_DEVICES=GPU-"),
        ({"ROCR_VISIBLE_DEVICES": "gpu-223"}, [3], ""),
        ({"ROCR_VISIBLE_DEVICES": "GPU-22"}, [], "2 GPUs have a unique id that begins with GPU-22"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-9"}, [], "no GPU has a unique id"),
        ({"ROCR_VISIBLE_DEVICES": ""}, [], "is empty, which hides every GPU"),
        ({"ROCR_VISIBLE_DEVICES": "1,1,2"}, [2], "GPU 1 was named before"),
        ({"ROCR_VISIBLE_DEVICES": "0,7,1"}, [1], "there is no GPU 7, the last is 2"),
        ({"ROCR_VISIBLE_DEVICES": " 2 , 0,"}, [3, 1], ""),
        ({"HIP_VISIBLE_DEVICES": "1,1,2"}, [2, 3], ""),
        ({"HIP_VISIBLE_DEVICES": "2,"}, [3], ""),
        ({"HIP_VISIBLE_DEVICES": "0, 1"}, [1], "' 1' is neither an index nor a unique id"),
        ({"HIP_VISIBLE_DEVICES": "GPU-22"}, [2], ""),
        ({"HIP_VISIBLE_DEVICES": "-1"}, [], "there is no GPU -1"),
        ({"HIP_VISIBLE_DEVICES": "first"}, [], "'first' is neither an index nor a unique id"),
        ({"HIP_VISIBLE_DEVICES": ""}, [1, 2, 3], ""),
        ({"CUDA_VISIBLE_DEVICES": "2"}, [3], "CUDA_VISIBLE_DEVICES=2"),
        # An empty one counts as not set, and the other one is read.
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, [2], ""),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [1], ""),
        # HIP counts in what the lower runtime has left.
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "1"}, [2], ""),
        ({"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "1"}, [], "the last is 0"),
    ],
)
def test_variables_select_the_visible_gpus(
    machine: Machine, variables: dict[str, str], nodes: list[int], note: str
) -> None:
    machine.gpus(node(0), node(1), node(2))
    presence = Presence(read_system(machine.root), HIP, variables)
    shown = presence.visible_gpus()
    assert [gpu.node for gpu in shown.devices] == nodes
    assert note in shown.note
    verdict = presence.judge()
    assert verdict.accepted == bool(nodes)
    assert nodes or verdict.reason == f"none of 3 GPUs is visible: {shown.note}"


PROGRAM = """
import json, sys
from pathlib import Path
from interposer.tooling import variables
from interposer_rocm._hardware.presence import Presence
from interposer_rocm._hardware.system import read_system
from interposer_rocm._hardware.torch_build import TorchBuild

build = TorchBuild("2.13.0+rocm7.0", hip="7.0", targets=("gfx942",))
verdict = Presence(read_system(Path(sys.argv[1])), build, variables()).judge()
mapped = {line.rsplit("/", 1)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
vendor = ("libamdhip", "libhsa", "librocm", "libdrm")
print(json.dumps([
    verdict.accepted,
    verdict.reason,
    "torch" in sys.modules,
    "ctypes" in sys.modules,
    [name for name in mapped if name.startswith(vendor)],
]))
"""


@pytest.mark.process
def test_a_clean_process_loads_nothing(machine: Machine) -> None:
    machine.gpus(Node(), Node())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(machine.root)],
        env={**os.environ, "ROCR_VISIBLE_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    reason = "1 visible of 2: AMD gfx942 (gfx942); amdgpu 6.12.12; ROCR_VISIBLE_DEVICES=1"
    assert json.loads(done.stdout) == [True, reason, False, False, []]


def test_the_installed_torch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    own = TorchBuild.installed()
    assert own == TorchBuild(
        torch.__version__, torch.version.cuda or "", torch.version.hip or "", targets=own.targets
    )
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    monkeypatch.setattr(
        torch._C, "_cuda_getArchFlags", lambda: "gfx942:xnack- gfx1100", raising=False
    )
    build = TorchBuild.installed()
    assert (build.hip, build.targets) == ("7.0.51831", {"gfx942", "gfx1100"})
    assert not torch.cuda.is_initialized()
