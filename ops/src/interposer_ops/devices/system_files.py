"""Linux system files that describe hardware, read without raising.

The ``probe`` of a platform reads these files before a library of the vendor is loaded. A file that
is missing or may not be read counts as empty.

Source: the Linux kernel's documentation of the PCI bus in sysfs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["is_in_container", "list_folder", "pci_devices", "read_text"]

_CONTAINER = re.compile("docker|kubepods|containerd|lxc")


def read_text(path: Path) -> str:
    """Return the text of a file, "" if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def list_folder(folder: Path) -> list[Path]:
    """Return the paths in a folder, none if the folder cannot be read."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def pci_devices(root: Path, vendor: str, classes: Sequence[str]) -> list[Path]:
    """Return the folders of a vendor's PCI devices, sorted by PCI address.

    Args:
        root: folder that contains ``sys``.
        vendor: PCI vendor id, such as ``"0x8086"``.
        classes: first digits of PCI classes, such as ``"0x03"`` for display controllers.
    """
    return sorted(
        path
        for path in list_folder(root / "sys/bus/pci/devices")
        if read_text(path / "vendor").strip() == vendor
        and read_text(path / "class").startswith(tuple(classes))
    )


def is_in_container(root: Path) -> bool:
    """Return whether this process runs in a container.

    Args:
        root: folder that contains ``proc``, and the files that Docker and Podman create.
    """
    container_files = (root / ".dockerenv", root / "run/.containerenv")
    return any(file.exists() for file in container_files) or bool(
        _CONTAINER.search(read_text(root / "proc/1/cgroup"))
    )
