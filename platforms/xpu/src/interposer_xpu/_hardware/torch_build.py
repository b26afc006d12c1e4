"""Build configuration of the installed torch, read without initialising any device."""

from __future__ import annotations

from dataclasses import dataclass

from interposer import Verdict

_WHEELS = "https://download.pytorch.org/whl/xpu"


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Version of one build of torch, and the vendor of the GPUs that the build is for.

    Attributes:
        xpu: SYCL version of the build, such as ``"20250301"``; empty without XPU support.
        other: CUDA or HIP version of the build, such as ``"CUDA 12.8"``; empty without both.
    """

    version: str
    xpu: str = ""
    other: str = ""

    @classmethod
    def installed(cls) -> TorchBuild:
        """Return the build of the torch that this process imports."""
        import torch  # imported here, because tests that pass a build need no torch

        other_builds = {"CUDA": torch.version.cuda, "HIP": torch.version.hip}
        built_for = [f"{name} {version}" for name, version in other_builds.items() if version]
        return cls(
            torch.__version__, getattr(torch.version, "xpu", None) or "", ", ".join(built_for)
        )

    def judge(self, gpus_text: str) -> Verdict:
        """Refuse a build without XPU support; ``gpus_text`` begins the reason with the GPUs."""
        if self.xpu:
            return Verdict.accept()
        build_text = f"is built for {self.other}" if self.other else "is built without XPU"
        return Verdict.refuse(
            f"{gpus_text}, but torch {self.version} {build_text}. Try: "
            f"pip install --force-reinstall torch --index-url {_WHEELS}"
        )
