"""Presence of a GPU, checked with stand-ins for NVIDIA's libraries that the tests compile.

The checks run in clean processes; the log of the libraries shows every load and call.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.landing import landing_sample

needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc, to compile a driver")
pytestmark = [
    needs_gcc,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, for which this plugin is"),
    pytest.mark.process,
]

SOURCE = Path(__file__).with_name("fake_driver.c")
UUIDS = [f"GPU-{digit * 8}-0000-4000-8000-000000000000" for digit in "12345678"]
PARTS = [f"MIG-{digit * 8}-0000-5000-8000-000000000000" for digit in "abcdef"]
H100 = {
    8: 49152,
    16: 132,
    19: 1,
    36: 2619000,
    37: 5120,
    38: 52428800,
    41: 1,
    75: 9,
    76: 0,
    97: 232448,
    120: 1,
    127: 1,
}


@dataclass
class GPU:
    name: str = "NVIDIA H100 80GB HBM3"
    major: int = 9
    minor: int = 0
    mig: int = 0
    parts: list[str] = field(default_factory=list)
    fault: int = 0
    attributes: dict[int, int] = field(default_factory=lambda: dict(H100))
    peers: list[int] = field(default_factory=list)

    def c(self, index: int, bus: int) -> str:
        parts = ",".join(f'"{part}"' for part in self.parts) or "0"
        attributes = ",".join(f"[{key}]={value}" for key, value in self.attributes.items())
        peers = ",".join(f"[{peer}]=1" for peer in self.peers) or "0"
        return (
            f'{{"{self.name}", "{UUIDS[index]}", "00000000:{bus:02X}:00.0", "abcdefghijklmno", '
            f"{self.major}, {self.minor}, 85520809984ULL, {self.mig}, {{{parts}}}, {self.fault}, "
            f"{{{attributes}}}, {{{peers}}}}}"
        )


# Runs in a clean process, and prints the outcome and the state of the process.
PROGRAM = """
import json, os, sys
from pathlib import Path
from interposer_cuda._hardware import driver, system
from interposer_cuda._hardware.presence import Presence
from interposer_cuda._hardware.torch_build import TorchBuild
from interposer_ops.devices.driver_inquiry import DriverError, DriverLostError

root, build, wanted = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
build["targets"] = tuple(build.get("targets", ()))
presence = Presence(system.read_system(root), TorchBuild(**build), os.environ)
if wanted == "probe":
    try:
        verdict = presence.judge()
        said = {"accepted": verdict.accepted, "reason": verdict.reason}
    except DriverLostError as error:
        said = {"raised": str(error)}
else:
    try:
        answer = driver.ask(presence.libraries())
        said = {"cuda": answer.cuda, "devices": [repr(device) for device in answer.devices]}
    except DriverError as error:
        said = {"error": str(error), "code": error.code}
said["pid"] = os.getpid()
said["torch"] = "torch" in sys.modules
print(json.dumps(said))
"""
BUILD: dict[str, Any] = {"version": "2.13.0+cu128", "cuda": "12.8"}


class Machine:
    """Files of a system, and libraries beside it."""

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

    def install(
        self,
        *gpus: GPU,
        nvml: bool = True,
        cuda: bool = True,
        into: Path | None = None,
        buses: tuple[int, ...] = (),
        **values: object,
    ) -> Machine:
        """Compile the libraries for these GPUs; ``values`` are those of the description."""
        facts: dict[str, object] = {
            "DRIVER": '"570.86.15"',
            "CUDA": 12080,
            "NVML_INIT": 0,
            "CU_INIT": 0,
            "CU_INIT_CRASHES": 0,
            "CU_INIT_SECONDS": 0,
            "NEWEST_ATTRIBUTE": 159,
            **values,
        }
        places = buses or tuple(range(1, len(gpus) + 1))
        rows = ",\n".join(gpu.c(i, places[i]) for i, gpu in enumerate(gpus)) or "{0}"
        header = self.libraries / "description.h"
        lines = [f"#define {name} {value}" for name, value in facts.items()]
        lines += [f"#define COUNT {len(gpus)}", f"static struct gpu GPUS[] = {{{rows}}};"]
        header.write_text("\n".join(lines))
        into = into or self.libraries
        into.mkdir(parents=True, exist_ok=True)
        for wanted, name, flags in (
            (nvml, "libnvidia-ml.so.1", ["-DNVML"]),
            (cuda, "libcuda.so.1", []),
        ):
            if wanted:
                command = ["gcc", "-shared", "-fPIC", "-Wall", f'-DDESCRIPTION="{header}"', *flags]
                subprocess.run([*command, str(SOURCE), "-o", str(into / name)], check=True)
        return self

    def ask(self, wanted: str = "probe", build: Any = BUILD, **variables: str) -> dict[str, Any]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
        environment |= self.variables()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(self.root), json.dumps(build), wanted],
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        assert said["torch"] is False
        self.assert_untouched(said["pid"])
        return said

    def variables(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self.libraries), "FAKE_DRIVER_LOG": str(self.log)}

    def calls(self) -> list[tuple[int, str]]:
        lines = (line.split(" ", 1) for line in self.log.read_text().splitlines())
        return [(int(process), call) for process, call in lines]

    def assert_untouched(self, process: int) -> None:
        """Assert that the process never had CUDA's driver, and that nobody had a context."""
        own = {call for pid, call in self.calls() if pid == process}
        assert not own & {"load libcuda", "cuInit"}
        assert not [call for _, call in self.calls() if "Ctx" in call]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def workstation(machine: Machine) -> Machine:
    return machine.file("dev/nvidia0").file("dev/nvidiactl")


def reason(said: dict[str, Any], accepted: bool = False) -> str:
    assert said["accepted"] is accepted, said
    return str(said["reason"])


def test_a_gpu_is_found_without_cuda(workstation: Machine) -> None:
    said = workstation.install(GPU(), GPU()).ask()
    assert reason(said, True) == "2 visible of 2: NVIDIA H100 80GB HBM3; driver 570.86.15"
    assert [call for _, call in workstation.calls()] == [
        "load libnvidia-ml",
        "nvmlInit_v2",
        "nvmlShutdown",
    ]


def test_nothing_is_loaded_without_a_device_file(machine: Machine) -> None:
    said = machine.install(GPU()).ask()
    assert reason(said) == "no GPU of NVIDIA: no device file, no driver and none on the bus"
    assert machine.calls() == []


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        ({"version": "2.13.0+cpu"}, "torch 2.13.0+cpu is built without CUDA. Try: pip install"),
        (
            {"version": "2.13.0+rocm7", "hip": "7.1.2"},
            "torch 2.13.0+rocm7 is built for HIP 7.1.2: its cuda devices are AMD GPUs",
        ),
    ],
)
def test_nothing_is_loaded_if_torch_cannot_use_the_gpu(
    workstation: Machine, build: dict[str, str], expected: str
) -> None:
    assert expected in reason(workstation.install(GPU()).ask(build=build))
    assert workstation.calls() == []


def bus(machine: Machine) -> Machine:
    device = "sys/bus/pci/devices/0000:01:00.0"
    return machine.file(f"{device}/vendor", "0x10de\n").file(f"{device}/class", "0x030200\n")


def loaded(machine: Machine) -> Machine:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC\n"
    return machine.file("proc/driver/nvidia/version", text)


def wsl(machine: Machine) -> Machine:
    return machine.file("proc/sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2\n")


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (bus, "a GPU of NVIDIA is on the PCI bus (0000:01:00.0), but no driver for it is loaded"),
        (loaded, "driver 535.104.05 is loaded, but /dev/nvidia0 is missing. Run nvidia-modprobe"),
        (
            lambda m: loaded(m).file(".dockerenv"),
            "but this container was given no GPU: /dev/nvidia0 is missing. Start it with --gpus",
        ),
        (
            lambda m: loaded(m).file("proc/1/cgroup", "0::/kubepods/pod1\n"),
            "but this container was given no GPU",
        ),
        (
            wsl,
            "this is WSL without /dev/dxg, through which Windows shares its GPUs. It needs WSL 2",
        ),
    ],
)
def test_the_missing_part_is_named(
    machine: Machine, prepare: Callable[[Machine], Machine], expected: str
) -> None:
    assert expected in reason(prepare(machine).install(GPU()).ask())
    assert machine.calls() == []


def test_the_version_of_an_open_module_is_read(machine: Machine) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    said = machine.file("proc/driver/nvidia/version", text).ask()
    assert "driver 570.86.15 is loaded" in reason(said)


def test_wsl_loads_the_windows_libraries_first(machine: Machine) -> None:
    wsl(machine).file("dev/dxg")
    machine.install(GPU("Of Linux"))
    machine.install(GPU("Of Windows"), into=machine.root / "usr/lib/wsl/lib")
    assert "Of Windows" in reason(machine.ask(), True)
    assert "Of Windows" in str(machine.ask("driver")["devices"])


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("cuda", "driver", "accepted"),
    [(12080, "570.86.15", True), (12020, "535.104.05", True), (13000, "580.65.06", True)],
)
def test_a_driver_serves_its_major_version_of_cuda(
    workstation: Machine, cuda: int, driver: str, accepted: bool
) -> None:
    said = workstation.install(GPU(), CUDA=cuda, DRIVER=f'"{driver}"').ask()
    assert said["accepted"] is accepted


def test_a_driver_that_is_too_old_is_refused(workstation: Machine) -> None:
    workstation.install(GPU(), CUDA=11040, DRIVER='"470.42.01"')
    assert reason(workstation.ask()).startswith(
        "torch 2.13.0+cu128 is built for CUDA 12.8, but driver 470.42.01 serves CUDA up to 11.4. "
        "Update NVIDIA's driver to 525.60.13 or newer, or install a torch for CUDA 11"
    )
    newer = {"version": "2.20.0+cu140", "cuda": "14.0"}
    assert "Update NVIDIA's driver to a newer one" in reason(workstation.ask(build=newer))


def test_a_gpu_without_kernels_in_torch_is_refused(workstation: Machine) -> None:
    workstation.install(GPU("Tesla P100", 6, 0), GPU("Tesla V100", 7, 0))
    build = {**BUILD, "targets": ["sm_75", "sm_90", "compute_90"]}
    assert "Tesla P100 is an sm_60, and torch 2.13.0+cu128 has kernels for sm_75, sm_90" in reason(
        workstation.ask(build=build)
    )
    build["targets"] = ["sm_70"]
    assert workstation.ask(build=build)["accepted"]
    assert not workstation.ask(build=build, CUDA_VISIBLE_DEVICES=UUIDS[0])["accepted"]


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("listed", "count", "note"),
    landing_sample(
        [
            ("0", 1, "CUDA_VISIBLE_DEVICES=0"),
            ("2,0", 2, "CUDA_VISIBLE_DEVICES=2,0"),
            ("1,7,0", 1, "there is no GPU 7, the last is 2, and entries from there on are ignored"),
            ("0,-1,1", 1, "-1 ends the list"),
            ("1x", 1, "CUDA_VISIBLE_DEVICES=1x"),
            (UUIDS[1], 1, ""),
            (UUIDS[1][:8], 1, ""),
            (f"{UUIDS[2]},nonsense", 1, "'nonsense' is neither an index nor a uuid"),
        ],
        every=3,
    ),
)
def test_visible_devices_are_counted(
    workstation: Machine, listed: str, count: int, note: str
) -> None:
    said = workstation.install(GPU(), GPU(), GPU()).ask(CUDA_VISIBLE_DEVICES=listed)
    assert reason(said, True).startswith(f"{count} visible of 3")
    assert note in said["reason"]


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("", "CUDA_VISIBLE_DEVICES is empty, which hides every GPU"),
        ("-1", "-1 ends the list"),
        ("9", "there is no GPU 9, the last is 1"),
        ("NoDevFiles", "'NoDevFiles' is neither an index nor a uuid"),
        ("1,1", "names 1 twice, which hides every GPU"),
        ("GPU-", "2 GPUs of a uuid that begins with GPU-"),
        ("GPU-99", "no GPU of a uuid that begins with GPU-99"),
    ],
)
def test_hidden_devices_are_explained(workstation: Machine, listed: str, expected: str) -> None:
    said = workstation.install(GPU(), GPU()).ask(CUDA_VISIBLE_DEVICES=listed)
    assert reason(said).startswith("none of 2 GPUs is visible: ")
    assert expected in said["reason"]


def test_the_order_decides_which_gpu_an_index_is(workstation: Machine) -> None:
    workstation.install(GPU("Second"), GPU("First"), buses=(9, 3))
    by_bus = workstation.ask(CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert "1 visible of 2: First;" in reason(by_bus, True)
    unknown = workstation.ask(CUDA_VISIBLE_DEVICES="0")
    assert "1 visible of 2: First, Second;" in reason(unknown, True)


def test_mig_without_devices_is_refused(workstation: Machine) -> None:
    workstation.install(GPU(mig=1))
    assert "MIG divides NVIDIA H100 80GB HBM3 at 00000000:01:00.0, but no part exists" in reason(
        workstation.ask()
    )
    by_index = workstation.ask(CUDA_VISIBLE_DEVICES="0")
    assert "GPU 0 is divided by MIG, and no part of it exists" in reason(by_index)


def test_one_mig_device_is_visible(workstation: Machine) -> None:
    workstation.install(GPU(mig=1, parts=PARTS[:2]))
    assert "1 visible of 1" in reason(workstation.ask(), True)
    assert "a process sees one part, and CUDA_VISIBLE_DEVICES=MIG-... picks it" in reason(
        workstation.ask(), True
    )
    assert reason(workstation.ask(CUDA_VISIBLE_DEVICES=PARTS[1]), True)
    both = workstation.ask(CUDA_VISIBLE_DEVICES=",".join(PARTS[:2]))
    assert f"one part of a divided GPU, {PARTS[0]}" in reason(both, True)
    old = f"MIG-{UUIDS[0]}/3/0"
    assert f"CUDA_VISIBLE_DEVICES={old}" in reason(workstation.ask(CUDA_VISIBLE_DEVICES=old), True)


def test_a_faulty_gpu_is_reported_with_the_others(workstation: Machine) -> None:
    said = workstation.install(GPU(), GPU(fault=15)).ask()
    assert "GPU 1: nvmlDeviceGetHandleByIndex_v2: GPU is lost (code 15)" in reason(said, True)
    alone = workstation.install(GPU(fault=15)).ask()
    assert "shows no usable GPU: GPU 0: nvmlDevice" in reason(alone)


def test_a_driver_that_was_updated_is_refused(workstation: Machine) -> None:
    said = workstation.install(GPU(), NVML_INIT=18).ask()
    assert "the driver was updated and its old module is still loaded. Restart" in reason(said)


def test_without_nvml_a_child_process_queries_the_driver(workstation: Machine) -> None:
    said = workstation.install(GPU(), GPU(), nvml=False).ask()
    expected = "2 visible: NVIDIA H100 80GB HBM3; asked of CUDA's driver"
    assert reason(said, True) == expected
    assert "cuInit" in {call for _, call in workstation.calls()}
    hidden = workstation.ask(CUDA_VISIBLE_DEVICES="-1")
    assert "cuInit: no device (code 100); no device is visible; NVML says" in reason(hidden)


def test_without_nvml_an_old_driver_is_refused(workstation: Machine) -> None:
    workstation.install(GPU(), nvml=False, CUDA=11040)
    assert "but the driver serves CUDA up to 11.4" in reason(workstation.ask())


def test_without_any_library_both_failures_are_named(workstation: Machine) -> None:
    text = reason(workstation.ask())
    assert "there is a GPU (/dev/nvidia0)" in text
    assert "libcuda.so.1" in text
    assert "libnvidia-ml.so.1" in text


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"CU_INIT": 802}, "cuInit: system not yet initialized (code 802); the fabric of the GPUs"),
        ({"CU_INIT": 999}, "/dev/nvidia-uvm may be missing"),
    ],
)
def test_a_driver_error_is_explained(
    workstation: Machine, values: dict[str, Any], expected: str
) -> None:
    workstation.install(GPU(), nvml=False, **values)
    assert expected in workstation.ask("driver")["error"]
    assert expected in reason(workstation.ask())


def test_a_driver_crash_is_not_reported_as_a_missing_gpu(workstation: Machine) -> None:
    workstation.install(GPU(), nvml=False, CU_INIT_CRASHES=1)
    expected = "the process that asks CUDA's driver ended with -6"
    assert expected in workstation.ask("driver")["error"]
    assert expected in workstation.ask()["raised"]


@pytest.mark.slow
def test_a_driver_that_hangs_times_out(workstation: Machine) -> None:
    workstation.install(GPU(), nvml=False, CU_INIT_SECONDS=60)
    assert "CUDA's driver gave no answer in 4 s" in workstation.ask()["raised"]


def test_the_platform_lists_the_devices_of_the_driver(workstation: Machine) -> None:
    workstation.install(GPU(peers=[1]), GPU())
    program = """
import json, os, torch
from interposer_cuda._platform import CUDAPlatform
found = [(d.torch_device, d.name, d.capability.architecture) for d in CUDAPlatform().devices()]
print(json.dumps([found, torch.cuda.is_initialized(), os.getpid()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **workstation.variables()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found, initialised, process = json.loads(done.stdout)
    assert found == [[f"cuda:{n}", "NVIDIA H100 80GB HBM3", "sm_90"] for n in (0, 1)]
    assert not initialised
    workstation.assert_untouched(process)


def test_the_driver_describes_its_devices(workstation: Machine) -> None:
    workstation.install(GPU(peers=[1]), GPU("Tesla T4", attributes={16: 40, 75: 7, 76: 5}))
    said = workstation.ask("driver")
    assert said["cuda"] == [12, 8]
    first, second = said["devices"]
    assert "name='NVIDIA H100 80GB HBM3', uuid='61626364-6566-6768-696a-6b6c6d6e6f00'" in first
    for fact in ("peers=(1,)", "multiprocessors=132", "l2_bytes=52428800", "cluster_launch=True"):
        assert fact in first
    assert "peers=()" in second
    assert "tensor_map_access=False" in second
    (only,) = workstation.ask("driver", CUDA_VISIBLE_DEVICES="1")["devices"]
    assert "Tesla T4" in only


def test_an_attribute_unknown_to_the_driver_is_zero(workstation: Machine) -> None:
    workstation.install(GPU(), NEWEST_ATTRIBUTE=119)
    (only,) = workstation.ask("driver")["devices"]
    assert "cluster_launch=False" in only
    assert "shared_optin_bytes=232448" in only
