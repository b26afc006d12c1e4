"""Build configuration of the installed torch, read without initialising any device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Self

from interposer import Verdict

__all__ = ["WHEELS", "TorchBuild"]

WHEELS = "https://download.pytorch.org/whl/"
"""Index of torch's wheels, with one folder per toolkit."""
_TOOLKITS = ("cuda", "hip", "xpu")


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Version, toolkits and compiled architectures of one build of torch.

    A platform derives a class for its toolkit.

    Attributes:
        toolkit: toolkit that the platform's devices need, such as ``"HIP"``.
        wheels: folder of ``WHEELS`` with a build for the toolkit.
        foreign_note: text after the name of another toolkit that torch is built for.
        cuda, hip, xpu: version of each toolkit; empty if torch is built without it.
        targets: architectures that the kernels were compiled for; empty if unknown.
    """

    toolkit: ClassVar[str]
    wheels: ClassVar[str]
    foreign_note: ClassVar[str] = ""

    version: str
    cuda: str = ""
    hip: str = ""
    xpu: str = ""
    targets: Collection[str] = ()

    @classmethod
    def installed(cls) -> Self:
        """Return the build of the torch that this process imports."""
        import torch  # imported here, because tests that pass a build need no torch

        versions = {name: getattr(torch.version, name, None) or "" for name in _TOOLKITS}
        return cls(torch.__version__, **versions, targets=cls.read_targets())

    @classmethod
    def read_targets(cls) -> Collection[str]:
        """Return the architectures that torch's kernels were compiled for, none if unknown."""
        return ()

    def judge(self, gpus_text: str) -> Verdict:
        """Refuse a torch build without the toolkit; the reason starts with ``gpus_text``."""
        if getattr(self, self.toolkit.lower()):
            return Verdict.accept()
        versions = {name.upper(): getattr(self, name) for name in _TOOLKITS}
        others = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        build_text = f"for {others}{self.foreign_note}" if others else f"without {self.toolkit}"
        return Verdict.refuse(
            f"{gpus_text}, but torch {self.version} is built {build_text}. Try: "
            f"pip install --force-reinstall torch --index-url {WHEELS}{self.wheels}"
        )
