"""The build of the installed torch, read without initialising any device.

Source: NVIDIA's CUDA compatibility guide: within a major version of CUDA, whatever driver serves
one minor version serves all; the table "minimum required driver version" for Linux.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from interposer import Verdict

# The oldest driver for Linux, by the major version of CUDA.
_LEAST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
# In the flags that nvcc was given: "-gencode;arch=compute_90,code=sm_90".
_TARGET = re.compile(r"\bcode=((?:sm|compute)_\d+[af]?)\b")
_WHEELS = "https://download.pytorch.org/whl/"


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """One build of torch.

    Attributes:
        cuda: version of CUDA that it was built with, such as ``"12.8"``; empty without.
        hip: the same of HIP.
        targets: what its kernels were compiled for, such as ``"sm_90"`` and ``"compute_120"``;
            empty where it is not known.
    """

    version: str
    cuda: str = ""
    hip: str = ""
    targets: tuple[str, ...] = ()

    @classmethod
    def installed(cls) -> TorchBuild:
        """Return the build of the torch that is imported, or would be."""
        import torch  # here, so that whoever brings a build of his own need not wait for it

        # Whatever torch has to say of its targets either starts CUDA in this process
        # (torch.__config__.show()) or forbids it to all forks (torch.cuda.get_arch_list()).
        header = Path(torch.__file__).with_name("include") / "ATen/cuda/CUDAConfig.h"
        flags = header.read_text("utf-8", "replace") if header.is_file() else ""
        targets = dict.fromkeys(_TARGET.findall(flags))
        return cls(
            torch.__version__, torch.version.cuda or "", torch.version.hip or "", (*targets,)
        )

    def judge_vendor(self) -> Verdict:
        """Refuse a build for GPUs of another vendor, which takes the same names in torch."""
        if self.hip:
            return Verdict.refuse(
                f"torch {self.version} is built for HIP {self.hip}, so that what it calls cuda are "
                "GPUs of AMD. Try: a plugin for these"
            )
        return Verdict.accept()

    def judge_cuda(self, seen: str) -> Verdict:
        """Refuse a build without support for the GPUs that were ``seen``."""
        if self.cuda:
            return Verdict.accept()
        return Verdict.refuse(
            f"there is {seen}, but torch {self.version} is built without CUDA. Try: "
            f"pip install --force-reinstall torch --index-url {_WHEELS}cu128"
        )

    def judge_driver(self, driver: str, serves: tuple[int, int]) -> Verdict:
        """Refuse a driver that is too old for this build.

        Args:
            driver: its version; empty where it is not known.
            serves: the newest CUDA that it serves. A package of CUDA that makes older drivers
                compatible counts, for the driver's library is then that package's.
        """
        wanted = int(self.cuda.partition(".")[0])
        if serves[0] >= wanted:
            return Verdict.accept()
        least = _LEAST_DRIVER.get(wanted)
        newer = f"{least} or newer" if least else "a newer one"
        found = f"driver {driver}" if driver else "the driver"
        return Verdict.refuse(
            f"torch {self.version} is built for CUDA {self.cuda}, but {found} serves CUDA up to "
            f"{serves[0]}.{serves[1]}. Update NVIDIA's driver to {newer}, or install a torch for "
            f"CUDA {serves[0]}: {_WHEELS}"
        )

    def judge_architecture(self, name: str, major: int, minor: int) -> Verdict:
        """Refuse a GPU that no kernel of this build was compiled for.

        Machine code of ``sm_XY`` runs on the same major version from that minor one on;
        intermediate code ``compute_XY`` on everything from there on. Letters behind the number
        tie both to that architecture.
        """
        if not self.targets or any(_runs(target, major, minor) for target in self.targets):
            return Verdict.accept()
        return Verdict.refuse(
            f"{name} is an sm_{major}{minor}, and torch {self.version} has kernels for "
            f"{', '.join(self.targets)} only. Install a torch for it: {_WHEELS}"
        )


def _runs(target: str, major: int, minor: int) -> bool:
    kind, _, number = target.partition("_")
    if number.endswith("a"):
        return number == f"{major}{minor}a"
    digits = number.rstrip("f")
    if not digits.isdecimal():
        return False
    built = divmod(int(digits), 10)
    if kind == "compute" and digits == number:
        return built <= (major, minor)
    return built[0] == major and built[1] <= minor
