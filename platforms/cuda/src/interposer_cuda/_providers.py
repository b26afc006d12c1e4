"""Verdicts on optional packages by their installed version, without importing them.

Packages of compiled code may end the process that imports them in the wrong environment, so that
their metadata is read first.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from interposer import Verdict


@dataclass(frozen=True, slots=True)
class Provider:
    """A package that may be there.

    Attributes:
        distribution: the name that it is installed by.
        versions: those whose functions were read.
        source: where to get it.
    """

    distribution: str
    versions: str
    source: str

    def judge(self) -> Verdict:
        """Refuse where it is missing, or of another version."""
        try:
            found = version(self.distribution)
        except PackageNotFoundError:
            return Verdict.refuse(
                f"needs the package {self.distribution}, which is not installed: {self.source}"
            )
        if not SpecifierSet(self.versions).contains(found, prereleases=True):
            return Verdict.refuse(
                f"needs {self.distribution} {self.versions}, found {found}: {self.source}"
            )
        return Verdict.accept()


FLASHINFER = Provider("flashinfer-python", ">=0.6,<0.8", "pip install flashinfer-python")
FLASH_ATTENTION_2 = Provider(
    "flash-attn", ">=2.6,<2.9", "pip install flash-attn --no-build-isolation"
)
FLASH_ATTENTION_3 = Provider(
    "flash-attn-3",
    ">=3.0.0b1,<3.1",
    "build it from the folder hopper of github.com/Dao-AILab/flash-attention",
)
# Its products were read in one version only.
FLASHINFER_PRODUCTS = Provider("flashinfer-python", ">=0.7.2,<0.8", "pip install flashinfer-python")
# It has been 1.0.0 since its first day, and is built from its repository alone.
FLASH_MLA = Provider(
    "flash-mla", ">=1.0,<1.1", "pip install git+https://github.com/deepseek-ai/FlashMLA"
)
HUB_KERNELS = Provider("kernels", ">=0.17,<0.19", "pip install 'kernels<0.19'")
