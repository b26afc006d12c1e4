"""intel-extension-for-pytorch, an older provider of kernels, where a fitting one is installed.

Each of its releases is for one minor version of torch, and ends the interpreter below another one,
so that its metadata is read first and it is then imported in a process of its own. There is none
for the versions of torch that this platform declares; it is looked for because builds of it are
kept by users.

Source: its installation guide (versions that belong together); its documentation of
``ipex.llm.functional.rms_norm``.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path

import torch

from interposer import Request, Verdict
from interposer_xpu._packages import extension_inquiry
from interposer_xpu._packages.optional_packages import Package, numbers, torch_version

PACKAGE = Package("intel-extension-for-pytorch", str(Path(extension_inquiry.__file__)))


def judge_installed() -> Verdict:
    """Accept the release for XPU that belongs to this torch, by its metadata."""
    found = PACKAGE.version
    if not found:
        return Verdict.refuse(
            "needs the package intel-extension-for-pytorch, which is not installed"
        )
    if numbers(found)[:2] != numbers(torch_version())[:2]:
        return Verdict.refuse(
            f"intel-extension-for-pytorch {found} is for torch {found.rpartition('.')[0]}, "
            f"installed is {torch_version()}; it is not imported, for it would end the process"
        )
    if "xpu" not in found.partition("+")[2]:
        return Verdict.refuse(f"intel-extension-for-pytorch {found} is a build for processors")
    return Verdict.accept()


def judge(_request: Request) -> Verdict:
    """Accept where the package can be imported and has the function."""
    verdict = judge_installed()
    if not verdict:
        return verdict
    facts, verdict = _asked()
    if verdict and facts["fault"]:
        return Verdict.refuse(f"intel-extension-for-pytorch {PACKAGE.version} {facts['fault']}")
    return verdict


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``rms_norm``."""
    functional = import_module("intel_extension_for_pytorch").llm.functional
    out: torch.Tensor = functional.rms_norm(x.contiguous(), weight, eps)
    return out


@cache
def _asked() -> tuple[dict[str, str], Verdict]:
    return PACKAGE.ask()
