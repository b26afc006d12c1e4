"""GPUs as the operating system shows them, before any library of their vendor is loaded.

Only files below ``root`` are read, so that a machine without such a GPU pays nothing.

Source: the Linux kernel's documentation of the PCI bus in sysfs and of DRM render nodes; the
names of the kernel's drivers for Intel graphics, ``i915`` and ``xe``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from interposer import Verdict

ROOT = Path("/")
_DRIVERS = ("i915", "xe")
_VENDOR = "0x8086"
_DISPLAY = "0x03"  # classes of PCI: display controllers
_NODE = re.compile(r"renderD\d+")
_CONTAINER = re.compile("docker|kubepods|containerd|lxc")


@dataclass(frozen=True, slots=True)
class Display:
    """A display controller of the vendor on the PCI bus.

    Attributes:
        address: such as ``"0000:03:00.0"``.
        driver: of the kernel, that is bound to it; empty where none is.
    """

    address: str
    driver: str = ""

    def __str__(self) -> str:
        return f"{self.address}, {self.driver or 'no driver'}"


@dataclass(frozen=True, slots=True)
class System:
    """GPUs and their driver, as files show them.

    Attributes:
        root: the folder in which ``dev``, ``proc`` and ``sys`` lie.
        nodes: device files of GPUs of the vendor.
        closed: those of them that this user may not open.
        displays: its display controllers on the bus.
        wsl: Linux runs inside Windows.
        container: this process runs in a container.
    """

    root: Path
    nodes: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    displays: tuple[Display, ...] = ()
    wsl: bool = False
    container: bool = False

    def judge(self) -> Verdict:
        """Accept where the vendor's libraries may find a GPU; say what is missing elsewhere."""
        if self.nodes and set(self.nodes) == set(self.closed):
            return Verdict.refuse(
                f"this user may not open {', '.join(self.closed)}. Join the group that owns it, "
                "usually render: sudo usermod -aG render $USER, then log in anew"
            )
        if self.nodes:
            return Verdict.accept(", ".join(self.nodes))
        if self.wsl:
            return Verdict.refuse(
                "this is WSL without /dev/dxg, through which Windows hands on its GPUs. It needs "
                "WSL 2 and Intel's graphics driver for Windows"
            )
        seen = "; ".join(map(str, self.displays))
        if not self.displays:
            return Verdict.refuse("no GPU of Intel: no device file, and none on the bus")
        bound = [display for display in self.displays if display.driver in _DRIVERS]
        if bound and self.container:
            return Verdict.refuse(
                f"a GPU of Intel is on the PCI bus ({seen}), but this container was given none: "
                "start it with --device /dev/dri, or ask Kubernetes for gpu.intel.com/xe"
            )
        if bound:
            return Verdict.refuse(
                f"a GPU of Intel is on the PCI bus ({seen}), but it has no file "
                "/dev/dri/renderD*: its driver failed to start. Look at: dmesg | grep -E 'xe|i915'"
            )
        return Verdict.refuse(
            f"a GPU of Intel is on the PCI bus ({seen}), but neither i915 nor xe drives it. "
            "Newer GPUs want a newer kernel: Linux 6.12 for Battlemage and Lunar Lake"
        )


def look(root: Path = ROOT) -> System:
    """Return what the files below ``root`` show."""
    if sys.platform != "linux":
        return System(root)
    wsl = "microsoft" in _text(root / "proc/sys/kernel/osrelease").lower()
    nodes = sorted(_nodes(root))
    shown = [f"/dev/dri/{name}" for name in nodes]
    closed = [f"/dev/dri/{name}" for name in nodes if not _opens(root / "dev/dri" / name)]
    if wsl and (root / "dev/dxg").exists():
        shown.append("/dev/dxg")
    return System(
        root,
        tuple(shown),
        tuple(closed),
        tuple(sorted(_displays(root), key=lambda display: display.address)),
        wsl,
        _in_container(root),
    )


def _nodes(root: Path) -> Iterator[str]:
    """Yield the names of render nodes whose device is the vendor's."""
    for path in _entries(root / "dev/dri"):
        vendor = _text(root / "sys/class/drm" / path.name / "device/vendor").strip()
        if _NODE.fullmatch(path.name) and vendor == _VENDOR:
            yield path.name


def _displays(root: Path) -> Iterator[Display]:
    for path in _entries(root / "sys/bus/pci/devices"):
        if _text(path / "vendor").strip() != _VENDOR:
            continue
        if _text(path / "class").startswith(_DISPLAY):
            driver = path / "driver"
            yield Display(path.name, driver.resolve().name if driver.exists() else "")


def _opens(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def _in_container(root: Path) -> bool:
    marks = (root / ".dockerenv", root / "run/.containerenv")
    return any(mark.exists() for mark in marks) or bool(
        _CONTAINER.search(_text(root / "proc/1/cgroup"))
    )


def _entries(folder: Path) -> Iterable[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
