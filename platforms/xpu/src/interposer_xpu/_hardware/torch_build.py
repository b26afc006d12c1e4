"""The build of the installed torch, read without initialising any device."""

from __future__ import annotations

from dataclasses import dataclass

from interposer import Verdict

_WHEELS = "https://download.pytorch.org/whl/xpu"


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """One build of torch.

    Attributes:
        xpu: version of SYCL that it was built with, such as ``"20250301"``; empty without.
        other: what it was built for instead, such as ``"CUDA 12.8"``; empty where for none.
    """

    version: str
    xpu: str = ""
    other: str = ""

    @classmethod
    def installed(cls) -> TorchBuild:
        """Return the build of the torch that is imported, or would be."""
        import torch  # here, so that whoever brings a build of his own need not wait for it

        others = {"CUDA": torch.version.cuda, "HIP": torch.version.hip}
        named = [f"{name} {version}" for name, version in others.items() if version]
        return cls(torch.__version__, getattr(torch.version, "xpu", None) or "", ", ".join(named))

    def judge(self, seen: str) -> Verdict:
        """Refuse a build without support for GPUs; ``seen`` describes these in a sentence."""
        if self.xpu:
            return Verdict.accept()
        what = f"is built for {self.other}" if self.other else "is built without XPU"
        return Verdict.refuse(
            f"{seen}, but torch {self.version} {what}. Try: "
            f"pip install --force-reinstall torch --index-url {_WHEELS}"
        )
