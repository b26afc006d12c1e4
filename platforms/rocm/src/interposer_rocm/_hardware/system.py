"""Detection of AMD's GPUs in system files.

Source: AMD's ROCm installation guide, chapters "prerequisites" (groups render and video) and
"containers" (``--device=/dev/kfd --device=/dev/dri``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from interposer import Verdict
from interposer_ops.devices.gpu_files import GPUFiles, GPUVendor, read_gpu_files
from interposer_ops.devices.system_files import list_folder, read_text
from interposer_rocm._hardware.topology import Topology, read_topology


def _read_driver(root: Path) -> str:
    """Return the version of amdgpu, or of the kernel if amdgpu is built in."""
    module = root / "sys/module/amdgpu"
    if not module.exists():
        return ""
    release = read_text(root / "proc/sys/kernel/osrelease").strip()
    return read_text(module / "version").strip() or (f"of Linux {release}" if release else "loaded")


_AMD = GPUVendor(
    pci_id="0x1002",
    # Display controllers, and processing accelerators.
    pci_classes=["0x03", "0x12"],
    folder="dev",
    file_names="kfd",
    read_driver=_read_driver,
    in_wsl=False,
    refusals={
        ("closed",): "/dev/kfd exists, but this user may not open it. Add the user to its group: "
        "usermod -a -G render,video USER; then log in again",
        ("wsl",): "this is WSL, where /dev/kfd and its list of GPUs do not exist. Run Linux itself",
        ("driver", "on_bus"): "amdgpu {driver} drives a GPU ({addresses}), but /dev/kfd is "
        "missing. In a container: --device=/dev/kfd --device=/dev/dri. Elsewhere this kernel was "
        "built without HSA_AMD",
        ("on_bus",): "a GPU of AMD is on the PCI bus ({addresses}), but no driver for it is "
        "loaded. Load it: modprobe amdgpu",
        (): "no GPU of AMD: no /dev/kfd and none on the bus",
    },
)


@dataclass(frozen=True, slots=True)
class System:
    """AMD GPUs and the driver, read from system files.

    Attributes:
        topology: the GPUs that the driver shows to this process.
        render_files: numbers of the files ``/dev/dri/renderD*``.
    """

    files: GPUFiles
    topology: Topology
    render_files: frozenset[int] = frozenset()

    def judge(self) -> Verdict:
        """Accept if the driver shows a GPU to this process; otherwise name the missing part."""
        verdict = self.files.judge()
        if not verdict:
            return verdict
        if not self.topology.gpus:
            unreadable = self.topology.unreadable
            note = f"; {unreadable} nodes cannot be read, as of GPUs that a container was not given"
            return Verdict.refuse(
                f"/dev/kfd exists, but the driver shows no GPU{note if unreadable else ''}"
            )
        missing = [g for g in self.topology.gpus if g.render_node not in self.render_files]
        if len(missing) == len(self.topology.gpus):
            names = ", ".join(f"/dev/dri/renderD{gpu.render_node}" for gpu in missing)
            return Verdict.refuse(
                f"/dev/kfd exists, but not {names}, through which GPUs get their memory. In a "
                "container: --device=/dev/dri"
            )
        return Verdict.accept()


def read_system(root: Path = Path("/")) -> System:
    """Read the system's GPU files below ``root``."""
    numbers = (path.name.removeprefix("renderD") for path in list_folder(root / "dev/dri"))
    render_files = frozenset(int(number) for number in numbers if number.isdecimal())
    return System(read_gpu_files(_AMD, root), read_topology(root), render_files)
