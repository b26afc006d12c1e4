"""A vendor's table decides which system files are GPUs, and why there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from interposer_ops.devices.gpu_files import GPUFiles, GPUVendor, read_gpu_files
from interposer_ops.devices.system_files import read_text

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
ACME = GPUVendor(
    pci_id="0xacac",
    pci_classes=["0x03"],
    folder="dev/dri",
    file_names=r"renderD\d+",
    read_driver=lambda root: read_text(root / "sys/module/acme/version").strip(),
    in_wsl=True,
    refusals={
        ("closed",): "join the group of {closed}",
        ("driver", "container"): "acme {driver} gave this container no GPU",
        ("on_bus",): "no driver for {addresses} ({displays})",
        (): "no GPU of Acme",
    },
)


def write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def read(root: Path, *files: tuple[str, str]) -> GPUFiles:
    for path, text in files:
        write(root, path, text)
    return read_gpu_files(ACME, root)


DEVICE_FILE = ("dev/dri/renderD128", "")
SLOT = "sys/bus/pci/devices/0000:03:00.0"
ON_BUS = [(f"{SLOT}/vendor", "0xacac\n"), (f"{SLOT}/class", "0x030000\n")]
MODULE = ("sys/module/acme/version", "1.2\n")


@pytest.mark.parametrize(
    ("files", "accepted", "reason"),
    [
        ([], False, "no GPU of Acme"),
        (ON_BUS, False, "no driver for 0000:03:00.0 (0000:03:00.0, no driver)"),
        ([MODULE, (".dockerenv", "")], False, "acme 1.2 gave this container no GPU"),
        ([DEVICE_FILE], False, "no GPU of Acme"),
        (
            [DEVICE_FILE, ("sys/class/drm/renderD128/device/vendor", "0xacac\n")],
            True,
            "/dev/dri/renderD128",
        ),
        (
            [("dev/dxg", ""), ("proc/sys/kernel/osrelease", "5.15-Microsoft-WSL2")],
            True,
            "/dev/dxg",
        ),
    ],
    ids=["nothing", "bus", "container", "file of another vendor", "file", "WSL"],
)
def test_the_files_decide(
    tmp_path: Path, files: list[tuple[str, str]], accepted: bool, reason: str
) -> None:
    verdict = read(tmp_path, *files).judge()
    assert (verdict.accepted, verdict.reason) == (accepted, reason)


def test_device_files_that_the_user_may_not_open_are_refused() -> None:
    nodes = ("/dev/dri/renderD128",)
    verdict = GPUFiles(ACME, Path("/"), nodes, closed=nodes).judge()
    assert verdict.reason == "join the group of /dev/dri/renderD128"
