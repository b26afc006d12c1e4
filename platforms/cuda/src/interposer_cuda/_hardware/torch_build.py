"""Build configuration of the installed torch, read without initialising any device.

Source: NVIDIA's CUDA compatibility guide: within a major version of CUDA, a driver that supports
one minor version supports all; the table "minimum required driver version" for Linux.
"""

from __future__ import annotations

import re
from pathlib import Path

from interposer import Verdict
from interposer.errors import install_command
from interposer_ops.devices import torch_build
from interposer_ops.devices.torch_build import WHEELS

# Oldest Linux driver by CUDA major version.
_OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
# In the flags that nvcc was given: "-gencode;arch=compute_90,code=sm_90".
_TARGET = re.compile(r"\bcode=((?:sm|compute)_\d+[af]?)\b")


class TorchBuild(torch_build.TorchBuild):
    """A build of torch, which must support CUDA to use NVIDIA GPUs.

    ``targets`` are architectures such as ``"sm_90"`` and ``"compute_120"``.
    """

    toolkit = "CUDA"
    wheels = "cu128"

    @classmethod
    def read_targets(cls) -> tuple[str, ...]:
        """Extend ``TorchBuild.read_targets``: read nvcc's flags from a header of torch."""
        import torch

        # torch's own functions have side effects: torch.__config__.show() starts CUDA in this
        # process, and torch.cuda.get_arch_list() makes CUDA unusable in forks. Hence the header.
        header = Path(torch.__file__).with_name("include") / "ATen/cuda/CUDAConfig.h"
        flags = header.read_text("utf-8", "replace") if header.is_file() else ""
        return (*dict.fromkeys(_TARGET.findall(flags)),)

    def judge_vendor(self) -> Verdict:
        """Refuse a build for AMD GPUs, which torch also calls ``cuda``."""
        if self.hip:
            return Verdict.refuse(
                f"torch {self.version} is built for HIP {self.hip}: its cuda devices are AMD GPUs. "
                f"Try: {install_command('interposer-rocm')}"
            )
        return Verdict.accept()

    def judge_driver(self, driver: str, serves: tuple[int, int]) -> Verdict:
        """Refuse a driver that is too old for this build.

        Args:
            driver: driver version; empty if unknown.
            serves: newest CUDA that the driver supports. With an installed cuda-compat package,
                this is the package's version, because its library replaces the driver's.
        """
        required_major = int(self.cuda.partition(".")[0])
        if serves[0] >= required_major:
            return Verdict.accept()
        oldest = _OLDEST_DRIVER.get(required_major)
        required = f"{oldest} or newer" if oldest else "a newer one"
        driver_name = f"driver {driver}" if driver else "the driver"
        return Verdict.refuse(
            f"torch {self.version} is built for CUDA {self.cuda}, but {driver_name} serves CUDA up "
            f"to {serves[0]}.{serves[1]}. Update NVIDIA's driver to {required}, or install a torch "
            f"for CUDA {serves[0]}: {WHEELS}"
        )

    def judge_architecture(self, name: str, major: int, minor: int) -> Verdict:
        """Refuse a GPU for which this build has no compiled kernel.

        Machine code ``sm_XY`` runs on the same major version with that minor version or a newer
        one; intermediate code (PTX) ``compute_XY`` runs on every newer device. With the suffix
        ``a`` either runs on that architecture only, with ``f`` on that major version only.
        """
        if not self.targets or any(_runs_on(target, major, minor) for target in self.targets):
            return Verdict.accept()
        return Verdict.refuse(
            f"{name} is an sm_{major}{minor}, and torch {self.version} has kernels for "
            f"{', '.join(self.targets)} only. Install a torch for it: {WHEELS}"
        )


def _runs_on(target: str, major: int, minor: int) -> bool:
    kind, _, number = target.partition("_")
    if number.endswith("a"):
        return number == f"{major}{minor}a"
    digits = number.rstrip("f")
    if not digits.isdecimal():
        return False
    target_version = divmod(int(digits), 10)
    if kind == "compute" and digits == number:
        return target_version <= (major, minor)
    return target_version[0] == major and target_version[1] <= minor
