"""Verdicts on optional packages by their installed version, and later by their functions.

Packages of compiled code may end the process that imports them in the wrong environment, so that
their metadata is read first, and nothing is imported that is not about to be taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature

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

    def confirm(self, module: str, passed: Mapping[str, set[str]]) -> Verdict:
        """Import a module, and refuse where that fails or a function of it is another.

        Args:
            passed: functions, and what each is given by name.
        """
        try:
            found = import_module(module)
        except (ImportError, OSError, RuntimeError) as error:
            return Verdict.refuse(
                f"{self.distribution} cannot be imported: {type(error).__name__}: {error}"
            )
        for name, wanted in passed.items():
            if not hasattr(found, name):
                return Verdict.refuse(f"{module} has no {name}. Try: {self.source}")
            missing = sorted(wanted - signature(getattr(found, name)).parameters.keys())
            if missing:
                return Verdict.refuse(
                    f"{module}.{name} takes no {', '.join(missing)}. Try: {self.source}"
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
# Its products and sums were read in one version only.
FLASHINFER_0_7 = Provider("flashinfer-python", ">=0.7.2,<0.8", "pip install flashinfer-python")
# It has been 1.0.0 since its first day, and is built from its repository alone.
FLASH_MLA = Provider(
    "flash-mla", ">=1.0,<1.1", "pip install git+https://github.com/deepseek-ai/FlashMLA"
)
HUB_KERNELS = Provider("kernels", ">=0.17,<0.19", "pip install 'kernels<0.19'")
