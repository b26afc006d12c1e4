"""Verdicts on optional packages: first by installed version, later by function parameters.

In the wrong environment, importing a package of compiled code may crash the process. The metadata
is therefore read first, and a package is imported only just before a kernel of the package runs.
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
    """An optional package: its name, supported versions and installation advice.

    Attributes:
        distribution: name of the distribution.
        versions: version specifier of the releases that the plugin's calls were checked against.
        source: how to get the package, for error texts.
    """

    distribution: str
    versions: str
    source: str

    def judge(self) -> Verdict:
        """Refuse a missing package or an unsupported version, from metadata alone."""
        try:
            installed = version(self.distribution)
        except PackageNotFoundError:
            return Verdict.refuse(
                f"needs the package {self.distribution}, which is not installed: {self.source}"
            )
        if not SpecifierSet(self.versions).contains(installed, prereleases=True):
            return Verdict.refuse(
                f"needs {self.distribution} {self.versions}, found {installed}: {self.source}"
            )
        return Verdict.accept()

    def confirm(self, module: str, keywords: Mapping[str, set[str]]) -> Verdict:
        """Import a module; refuse if the import fails or a function lacks a parameter.

        Args:
            keywords: by function name, the keyword arguments that the plugin passes.
        """
        try:
            imported = import_module(module)
        except (ImportError, OSError, RuntimeError) as error:
            return Verdict.refuse(
                f"{self.distribution} cannot be imported: {type(error).__name__}: {error}"
            )
        for name, arguments in keywords.items():
            if not hasattr(imported, name):
                return Verdict.refuse(f"{module} has no {name}. Try: {self.source}")
            missing = sorted(arguments - signature(getattr(imported, name)).parameters.keys())
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
# GEMM and all-reduce of FlashInfer were checked in one version only.
FLASHINFER_0_7 = Provider("flashinfer-python", ">=0.7.2,<0.8", "pip install flashinfer-python")
# All releases are numbered 1.0.0, and the package is not on PyPI.
FLASH_MLA = Provider(
    "flash-mla", ">=1.0,<1.1", "pip install git+https://github.com/deepseek-ai/FlashMLA"
)
HUB_KERNELS = Provider("kernels", ">=0.17,<0.19", "pip install 'kernels<0.19'")
