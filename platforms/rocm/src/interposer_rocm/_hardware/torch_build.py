"""Build configuration of the installed torch, read without initialising a GPU.

torch calls AMD GPUs ``cuda`` if built for HIP; a torch built for CUDA does not support AMD GPUs.
"""

from __future__ import annotations

import re

from interposer import Verdict
from interposer_ops.devices import torch_build

_OLDEST_HIP_FOR_GRAPHS = (7, 0)


class TorchBuild(torch_build.TorchBuild):
    """A build of torch, which must support HIP to use AMD GPUs."""

    toolkit = "HIP"
    wheels = "rocm7.0"
    foreign_note = ", that is GPUs of NVIDIA"

    @classmethod
    def read_targets(cls) -> frozenset[str]:
        """Extend ``TorchBuild.read_targets``: read the architectures in torch's HIP flags."""
        import torch

        # torch.cuda.get_arch_list() returns these flags too, but queries the devices first.
        flags = torch._C._cuda_getArchFlags() if torch.version.hip else ""
        return frozenset(flag.partition(":")[0] for flag in (flags or "").split())

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
