"""A platform can read system files without handling those that are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from interposer_ops.devices.system_files import (
    is_in_container,
    list_folder,
    pci_devices,
    read_text,
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_missing_files_are_empty(tmp_path: Path) -> None:
    assert read_text(tmp_path / "version") == ""
    assert list_folder(tmp_path / "dev") == []
    assert pci_devices(tmp_path, "0x8086", ["0x03"]) == []
    assert not is_in_container(tmp_path)


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "name").write_bytes(b"card \xff")
    assert read_text(tmp_path / "name") == "card \N{REPLACEMENT CHARACTER}"


def test_pci_devices_have_the_vendor_and_a_class(tmp_path: Path) -> None:
    bus = tmp_path / "sys/bus/pci/devices"
    for address, vendor, device_class in [
        ("0000:03:00.0", "0x1002", "0x030000"),
        ("0000:02:00.0", "0x1002", "0x120000"),
        ("0000:01:00.0", "0x1002", "0x020000"),
        ("0000:00:02.0", "0x8086", "0x030000"),
    ]:
        write(bus / address / "vendor", f"{vendor}\n")
        write(bus / address / "class", f"{device_class}\n")
    found = pci_devices(tmp_path, "0x1002", ["0x03", "0x12"])
    assert [path.name for path in found] == ["0000:02:00.0", "0000:03:00.0"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (".dockerenv", ""),
        ("run/.containerenv", ""),
        ("proc/1/cgroup", "0::/kubepods/besteffort/pod1\n"),
    ],
)
def test_a_container_is_recognized(tmp_path: Path, file: str, text: str) -> None:
    write(tmp_path / file, text)
    assert is_in_container(tmp_path)
