"""Build configuration of the installed torch, read without initialising a GPU.

torch calls AMD GPUs ``cuda`` if built for HIP; a torch built for CUDA does not support AMD GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from interposer import Verdict

_INSTALL = (
    "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/rocm7.0"
)

_OLDEST_HIP_FOR_GRAPHS = (7, 0)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Version, HIP or CUDA, and compiled architectures of one build of torch.

    Attributes:
        hip: HIP version of the build; empty without HIP.
        cuda: CUDA version of the build; empty without CUDA.
        targets: architectures that the kernels were compiled for; empty if unknown.
    """

    version: str
    hip: str = ""
    cuda: str = ""
    targets: Collection[str] = ()

    @classmethod
    def installed(cls) -> TorchBuild:
        """Return the build of the torch that this process imports."""
        import torch  # imported here, because tests that pass a build need no torch

        hip, cuda = torch.version.hip or "", torch.version.cuda or ""
        # torch.cuda.get_arch_list() returns these flags too, but queries the devices first.
        flags = torch._C._cuda_getArchFlags() if hip else ""
        targets = {flag.partition(":")[0] for flag in (flags or "").split()}
        return cls(torch.__version__, hip, cuda, frozenset(targets))

    def judge(self, gpus_text: str) -> Verdict:
        """Refuse a build without HIP; ``gpus_text`` describes the GPUs of the machine."""
        if self.hip:
            return Verdict.accept()
        build_text = f"for CUDA {self.cuda}, that is GPUs of NVIDIA" if self.cuda else "without HIP"
        return Verdict.refuse(
            f"there is {gpus_text}, but torch {self.version} is built {build_text}. Try: {_INSTALL}"
        )

    def judge_graphs(self) -> Verdict:
        """Refuse a HIP version whose captured graphs can replay wrong results silently.

        A build without HIP is accepted, as planning for described devices needs no HIP.

        Source: pytorch/pytorch, issue 155684; since HIP 7.0 such a capture is an error.
        """
        version_match = re.match(r"(\d+)\.(\d+)", self.hip)
        if (
            version_match is None
            or tuple(map(int, version_match.groups())) >= _OLDEST_HIP_FOR_GRAPHS
        ):
            return Verdict.accept()
        oldest_hip = ".".join(map(str, _OLDEST_HIP_FOR_GRAPHS))
        return Verdict.refuse(
            f"HIP {self.hip}, which torch {self.version} is built for, captures a step that waits "
            "for the host without an error and replays what it read then. Graphs need HIP "
            f"{oldest_hip} or newer"
        )

    def judge_architecture(self, architecture: str) -> Verdict:
        """Refuse an architecture that no kernel of this build was compiled for."""
        if not self.targets or architecture in self.targets:
            return Verdict.accept()
        return Verdict.refuse(
            f"torch {self.version} has kernels for {', '.join(sorted(self.targets))} only, not for "
            f"{architecture}. HSA_OVERRIDE_GFX_VERSION makes a GPU pass for a relative of it"
        )
