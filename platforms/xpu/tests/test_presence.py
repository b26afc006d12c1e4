"""Presence of a GPU, checked with a stand-in for Intel's loader that the tests compile.

The checks run in clean processes; the log of the library shows every load and call.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from interposer_xpu._hardware.architectures import packed
from interposer_xpu._hardware.system import read_system

pytestmark = [
    pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc, to compile a driver"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, for which this plugin is"),
    pytest.mark.process,
]

SOURCE = Path(__file__).with_name("fake_level_zero.c")


@dataclass
class GPU:
    name: str = "Intel(R) Arc(TM) B580 Graphics"
    kind: int = 1
    ip_version: int = packed(20, 1, 4)
    flags: int = 0

    def c(self) -> str:
        return (
            f'{{"{self.name}", "abcdefghijklmno", {self.kind}, 0xe20b, {self.ip_version}, '
            f"{self.flags}, 5, 4, 8, 12884901888ULL, 456, 131072, 18874368ULL, 2, {{16, 32}}, 3}}"
        )


# Runs in a clean process, and prints the outcome and the state of the process.
PROGRAM = """
import json, os, sys
from pathlib import Path
from interposer_ops.devices.driver_inquiry import DriverError, DriverLostError
from interposer_xpu._hardware import level_zero, system
from interposer_xpu._hardware.presence import Presence
from interposer_xpu._hardware.presence import TorchBuild

root, build, wanted = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
# Of the platform's own limit a busy machine may need more.
limit = float(sys.argv[4])
presence = Presence(system.read_system(root), TorchBuild(**build), os.environ, limit)
try:
    if wanted == "probe":
        verdict = presence.judge()
        said = {"accepted": verdict.accepted, "reason": verdict.reason}
    else:
        answer = level_zero.ask()
        said = {"driver": answer.driver, "devices": [repr(device) for device in answer.devices]}
except DriverLostError as error:
    said = {"lost": str(error)}
except DriverError as error:
    said = {"error": str(error), "code": error.code}
said["pid"] = os.getpid()
said["torch"] = "torch" in sys.modules
print(json.dumps(said))
"""
BUILD = {"version": "2.13.0+xpu", "xpu": "20250301"}
VARIABLES = ("ZE_", "ONEAPI_", "FAKE_")


class Machine:
    """Files of a system, and a loader beside it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.libraries = folder / "lib"
        self.log = folder / "log"
        self.libraries.mkdir(parents=True)
        self.root.mkdir()
        self.log.touch()

    def file(self, path: str, text: str = "") -> Machine:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return self

    def display(self, driver: str = "xe", vendor: str = "0x8086") -> Machine:
        device = "sys/bus/pci/devices/0000:03:00.0"
        self.file(f"{device}/vendor", f"{vendor}\n").file(f"{device}/class", "0x030000\n")
        if driver:
            bound = self.root / "sys/bus/pci/drivers" / driver
            bound.mkdir(parents=True)
            (self.root / device / "driver").symlink_to(bound)
        return self

    def node(self, number: int = 128, vendor: str = "0x8086") -> Machine:
        self.file(f"sys/class/drm/renderD{number}/device/vendor", f"{vendor}\n")
        return self.file(f"dev/dri/renderD{number}").file(f"dev/dri/card{number - 128}")

    def install(self, *gpus: GPU, **values: object) -> Machine:
        """Compile the loader for these GPUs; ``values`` are those of the description."""
        driver = 1 << 24 | 6 << 16 | 33578
        facts = {"DRIVER": driver, "INIT": 0, "INIT_CRASHES": 0, "INIT_SECONDS": 0, **values}
        rows = ",\n".join(gpu.c() for gpu in gpus) or "{0}"
        lines = [f"#define {name} {value}" for name, value in facts.items()]
        lines += [f"#define COUNT {len(gpus)}", f"static struct gpu GPUS[] = {{{rows}}};"]
        header = self.libraries / "description.h"
        header.write_text("\n".join(lines))
        command = ["gcc", "-shared", "-fPIC", "-Wall", f'-DDESCRIPTION="{header}"', str(SOURCE)]
        subprocess.run([*command, "-o", str(self.libraries / "libze_loader.so.1")], check=True)
        return self

    def ask(
        self, wanted: str = "probe", build: Any = BUILD, limit: float = 60, **variables: str
    ) -> dict[str, Any]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(VARIABLES)}
        environment |= {
            "LD_LIBRARY_PATH": str(self.libraries),
            "FAKE_LEVEL_ZERO_LOG": str(self.log),
        }
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(self.root), json.dumps(build), wanted, str(limit)],
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        assert said["torch"] is False
        # The process that asks never has the loader, whatever comes out.
        assert said["pid"] not in [int(line.split()[0]) for line in self.calls()]
        return said

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def workstation(machine: Machine) -> Machine:
    return machine.display().node()


def reason(said: dict[str, Any], accepted: bool = False) -> str:
    assert said["accepted"] is accepted, said
    return str(said["reason"])


def test_a_child_process_finds_the_gpu(workstation: Machine) -> None:
    said = workstation.install(GPU(), GPU()).ask()
    assert reason(said, True) == (
        "2 visible of 2: Intel(R) Arc(TM) B580 Graphics; driver 1.6.33578"
    )
    assert [line.split(" ", 1)[1] for line in workstation.calls()] == [
        "load libze_loader",
        "zeInit",
    ]


def test_driver_properties_are_read(workstation: Machine) -> None:
    said = workstation.install(GPU(flags=1), GPU("A processor", kind=2)).ask("driver")
    assert said["driver"] == "1.6.33578"
    assert said["devices"] == [
        "XPUDevice(name='Intel(R) Arc(TM) B580 Graphics', "
        "uuid='61626364-6566-6768-696a-6b6c6d6e6f00', device_id=57867, ip_version=83902468, "
        "integrated=True, xe_cores=20, vector_engines=160, memory_bytes=12884901888, "
        "bandwidth_bytes_per_s=456000000000, shared_bytes=131072, cache_bytes=18874368, "
        "sub_group_sizes=(16, 32), float64=True)"
    ]


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    "prepare",
    [
        lambda m: m,
        lambda m: m.node(vendor="0x10de").display(vendor="0x10de"),
        lambda m: m.file("dev/dri/renderD128"),
    ],
    ids=["nothing", "of another vendor", "of nobody"],
)
def test_the_driver_is_not_queried_without_a_gpu(
    machine: Machine, prepare: Callable[[Machine], Machine]
) -> None:
    said = prepare(machine).install(GPU()).ask()
    assert reason(said) == "no GPU of Intel: no device file, and none on the bus"
    assert machine.calls() == []


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        ({"version": "2.13.0+cpu"}, "but torch 2.13.0+cpu is built without XPU. Try: pip install"),
        (
            {"version": "2.13.0+cu128", "cuda": "12.8"},
            "but torch 2.13.0+cu128 is built for CUDA 12.8. Try: pip install",
        ),
    ],
)
def test_the_driver_is_not_queried_if_torch_cannot_use_the_gpu(
    workstation: Machine, build: dict[str, str], expected: str
) -> None:
    text = reason(workstation.install(GPU()).ask(build=build))
    assert text.startswith("there is a GPU of Intel (/dev/dri/renderD128) at 0000:03:00.0, xe, ")
    assert expected in text
    assert workstation.calls() == []


def wsl(machine: Machine) -> Machine:
    return machine.file("proc/sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2\n")


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda m: m.display(""), "(0000:03:00.0, no driver), but neither i915 nor xe drives it"),
        (
            lambda m: m.display("vfio-pci"),
            "(0000:03:00.0, vfio-pci), but neither i915 nor xe drives it",
        ),
        (lambda m: m.display("i915"), "(0000:03:00.0, i915), but it has no file /dev/dri/renderD*"),
        (
            lambda m: m.display().file(".dockerenv"),
            "but this container was given none: start it with --device /dev/dri",
        ),
        (
            lambda m: m.display().file("proc/1/cgroup", "0::/kubepods/pod1\n"),
            "but this container was given none",
        ),
        (wsl, "this is WSL without /dev/dxg, through which Windows hands on its GPUs"),
    ],
)
def test_the_missing_part_is_named(
    machine: Machine, prepare: Callable[[Machine], Machine], expected: str
) -> None:
    assert expected in reason(prepare(machine).install(GPU()).ask())
    assert machine.calls() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user to whom files can be closed")
def test_a_device_file_without_permission_is_named(workstation: Machine) -> None:
    (workstation.root / "dev/dri/renderD128").chmod(0)
    text = reason(workstation.install(GPU()).ask())
    assert text.startswith("this user may not open /dev/dri/renderD128. Join the group")


def test_one_open_device_file_is_enough(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.node(128).node(129)
    monkeypatch.setattr(os, "access", lambda path, _: path.name == "renderD129")
    assert read_system(machine.root).judge()
    monkeypatch.setattr(os, "access", lambda *_: False)
    reason = read_system(machine.root).judge().reason
    assert "may not open /dev/dri/renderD128, /dev/dri/renderD129" in reason


def test_wsl_queries_the_loader(machine: Machine) -> None:
    wsl(machine).file("dev/dxg")
    text = reason(machine.ask(build={"version": "2.13.0+cu128", "cuda": "12.8"}))
    assert text.startswith("there may be a GPU of Intel behind /dev/dxg, but torch 2.13.0+cu128")
    assert reason(machine.install(GPU()).ask(), True).startswith("1 visible")


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("selector", "count"),
    [
        ("level_zero:0", 1),
        ("level_zero:gpu", 3),
        ("*:gpu", 3),
        ("level_zero:0,2;opencl:*", 2),
        ("!level_zero:1", 2),
        ("level_zero:*;!level_zero:0", 2),
        ("level_zero:1.0,1.1", 1),
        ("!opencl:*", 3),
    ],
)
def test_selected_devices_are_counted(workstation: Machine, selector: str, count: int) -> None:
    said = workstation.install(GPU(), GPU(), GPU()).ask(ONEAPI_DEVICE_SELECTOR=selector)
    text = reason(said, True)
    assert text.startswith(f"{count} visible of 3")
    assert text.endswith(f"ONEAPI_DEVICE_SELECTOR={selector}")


@pytest.mark.landing(2)
@pytest.mark.parametrize("selector", ["opencl:*", "level_zero:7", "level_zero:cpu", "nonsense"])
def test_hidden_devices_are_explained(workstation: Machine, selector: str) -> None:
    said = workstation.install(GPU()).ask(ONEAPI_DEVICE_SELECTOR=selector)
    assert reason(said) == (f"none of 1 GPU is visible to SYCL: ONEAPI_DEVICE_SELECTOR={selector}")


def test_a_mask_that_hides_all_is_named(workstation: Machine) -> None:
    said = workstation.install().ask(ZE_AFFINITY_MASK="9", ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE")
    assert reason(said) == (
        "Level Zero shows no GPU to this process: ZE_AFFINITY_MASK=9 and "
        "ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE hides every GPU, or names none"
    )
    assert reason(workstation.ask()) == "Level Zero shows no GPU to this process"


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0x78000001, "no driver of Level Zero found a device. Install Intel's"),
        (0x70010000, "this user may not use the device. Join the group"),
        (0x7FFFFFFE, "zeInit: error 0x7ffffffe"),
    ],
)
def test_a_loader_error_is_explained(workstation: Machine, code: int, expected: str) -> None:
    text = reason(workstation.install(GPU(), INIT=code).ask())
    assert text.startswith("there is a GPU of Intel (/dev/dri/renderD128) at 0000:03:00.0, xe, but")
    assert expected in text


def test_a_missing_loader_is_named(workstation: Machine) -> None:
    assert "libze_loader.so.1: cannot open shared object file" in reason(workstation.ask())


def test_a_loader_crash_is_not_reported_as_a_missing_gpu(workstation: Machine) -> None:
    said = workstation.install(GPU(), INIT_CRASHES=1).ask()
    assert said["lost"].startswith("the process that asks Level Zero ended with -6")


@pytest.mark.slow
def test_a_loader_that_hangs_is_not_reported_as_a_missing_gpu(workstation: Machine) -> None:
    said = workstation.install(GPU(), INIT_SECONDS=30).ask(limit=2)
    assert said["lost"].startswith("Level Zero gave no answer in 2 s")


def test_a_gpu_without_kernels_in_torch_is_refused(workstation: Machine) -> None:
    old = GPU("Intel(R) UHD Graphics 770", ip_version=packed(12, 2))
    text = reason(workstation.install(old).ask())
    assert text.startswith("Intel(R) UHD Graphics 770 is of an architecture before Xe-HPG")
    assert workstation.install(old, GPU()).ask()["accepted"]
