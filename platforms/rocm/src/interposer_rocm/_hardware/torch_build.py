"""The vendor that the installed torch was built for, read without initialising a GPU.

A torch for HIP says ``cuda`` for GPUs of AMD, and the other way round a torch for CUDA knows
nothing of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from interposer import Verdict

_INSTALL = (
    "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/rocm7.0"
)

_GRAPHS = (7, 0)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """One build of torch.

    Attributes:
        hip: version of HIP that it was built with; empty without.
        cuda: the same of CUDA.
        targets: the architectures that its kernels were compiled for; empty where not known.
    """

    version: str
    hip: str = ""
    cuda: str = ""
    targets: Collection[str] = ()

    @classmethod
    def installed(cls) -> TorchBuild:
        """Return the build of the torch that is imported, or would be."""
        import torch  # whoever describes a build himself does without

        hip, cuda = torch.version.hip or "", torch.version.cuda or ""
        # What torch.cuda.get_arch_list() returns, which asks for devices before.
        flags = torch._C._cuda_getArchFlags() if hip else ""
        targets = {flag.partition(":")[0] for flag in (flags or "").split()}
        return cls(torch.__version__, hip, cuda, frozenset(targets))

    def judge(self, seen: str) -> Verdict:
        """Refuse a build without support for the GPUs that were ``seen``."""
        if self.hip:
            return Verdict.accept()
        built = f"for CUDA {self.cuda}, that is GPUs of NVIDIA" if self.cuda else "without HIP"
        return Verdict.refuse(
            f"there is {seen}, but torch {self.version} is built {built}. Try: {_INSTALL}"
        )

    def judge_graphs(self) -> Verdict:
        """Refuse a HIP whose captured graphs fail silently when they are replayed.

        A build without HIP only plans for others, and is accepted.

        Source: pytorch/pytorch, issue 155684; HIP 7.0 made it an error.
        """
        found = re.match(r"(\d+)\.(\d+)", self.hip)
        if found is None or tuple(map(int, found.groups())) >= _GRAPHS:
            return Verdict.accept()
        least = ".".join(map(str, _GRAPHS))
        return Verdict.refuse(
            f"HIP {self.hip}, which torch {self.version} is built for, captures a step that waits "
            f"for the host without an error and replays what it read then. Graphs need HIP {least} "
            "or newer"
        )

    def judge_architecture(self, architecture: str) -> Verdict:
        """Refuse an architecture that no kernel of this build was compiled for."""
        if not self.targets or architecture in self.targets:
            return Verdict.accept()
        return Verdict.refuse(
            f"torch {self.version} has kernels for {', '.join(sorted(self.targets))} only, not for "
            f"{architecture}. HSA_OVERRIDE_GFX_VERSION makes a GPU pass for a relative of it"
        )
