"""Detection of NVIDIA's GPUs in system files.

Source: NVIDIA's driver README, chapter "device files"; "CUDA on WSL" user guide.
"""

from __future__ import annotations

import re
from pathlib import Path

from interposer_ops.devices.gpu_files import GPUFiles, GPUVendor, read_gpu_files
from interposer_ops.devices.system_files import read_text

_VERSION = re.compile(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)")


def _read_driver(root: Path) -> str:
    version = _VERSION.search(read_text(root / "proc/driver/nvidia/version"))
    return version[1] if version else ""


_NVIDIA = GPUVendor(
    pci_id="0x10de",
    pci_classes=["0x03"],
    folder="dev",
    # nvhost-gpu and nvgpu are the integrated GPUs of Jetson boards.
    file_names=r"nvidia\d+|nvhost-gpu|nvgpu",
    read_driver=_read_driver,
    in_wsl=True,
    refusals={
        ("wsl",): "this is WSL without /dev/dxg, through which Windows shares its GPUs. It needs "
        "WSL 2 and NVIDIA's driver for Windows; none is to be installed in Linux",
        ("driver", "container"): "NVIDIA's driver {driver} is loaded, but this container was given "
        "no GPU: /dev/nvidia0 is missing. Start it with --gpus all, or ask Kubernetes for "
        "nvidia.com/gpu",
        ("driver",): "NVIDIA's driver {driver} is loaded, but /dev/nvidia0 is missing. Run "
        "nvidia-modprobe -u -c 0 as root, which makes the device files",
        ("on_bus",): "a GPU of NVIDIA is on the PCI bus ({addresses}), but no driver for it is "
        "loaded. Install NVIDIA's driver, then restart",
        (): "no GPU of NVIDIA: no device file, no driver and none on the bus",
    },
)


def read_system(root: Path = Path("/")) -> GPUFiles:
    """Read the system's GPU files below ``root``."""
    return read_gpu_files(_NVIDIA, root)


def libraries(files: GPUFiles, name: str) -> tuple[str, ...]:
    """Return the names or paths to try, in order, to load the library ``name``.

    In WSL, the libraries of the Windows driver come first: a Linux driver installed inside WSL
    finds no GPU.
    """
    windows_library = str(files.root / "usr/lib/wsl/lib" / name)
    return (windows_library, name) if files.wsl else (name,)
