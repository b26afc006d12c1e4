"""The op ``rms_norm`` by intel-extension-for-pytorch (IPEX), if a matching release is installed.

Each IPEX release works with one minor version of torch and crashes the interpreter with any other.
The metadata is therefore read first, and then a child process imports IPEX. No official release
matches the torch versions of this platform; the check serves users with builds of their own.

Source: IPEX's installation guide (matching versions) and its documentation of
``ipex.llm.functional.rms_norm``.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path

import torch

from interposer import Request, Verdict
from interposer_xpu._packages import extension_inquiry
from interposer_xpu._packages.optional_packages import Package, torch_version, version_numbers

PACKAGE = Package("intel-extension-for-pytorch", str(Path(extension_inquiry.__file__)))


def judge_installed() -> Verdict:
    """Accept an XPU release of IPEX that matches the installed torch, from metadata alone."""
    installed = PACKAGE.version
    if not installed:
        return Verdict.refuse(
            "needs the package intel-extension-for-pytorch, which is not installed"
        )
    if version_numbers(installed)[:2] != version_numbers(torch_version())[:2]:
        return Verdict.refuse(
            f"intel-extension-for-pytorch {installed} is for torch {installed.rpartition('.')[0]}, "
            f"installed is {torch_version()}; it is not imported, for it would end the process"
        )
    if "xpu" not in installed.partition("+")[2]:
        return Verdict.refuse(f"intel-extension-for-pytorch {installed} is a build for processors")
    return Verdict.accept()


def judge(_request: Request) -> Verdict:
    """Accept if a child process can import IPEX and IPEX has the function."""
    verdict = judge_installed()
    if not verdict:
        return verdict
    facts, verdict = _run_inquiry()
    if verdict and facts["fault"]:
        return Verdict.refuse(f"intel-extension-for-pytorch {PACKAGE.version} {facts['fault']}")
    return verdict


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the op ``rms_norm``."""
    functional = import_module("intel_extension_for_pytorch").llm.functional
    out: torch.Tensor = functional.rms_norm(x.contiguous(), weight, eps)
    return out


@cache
def _run_inquiry() -> tuple[dict[str, str], Verdict]:
    return PACKAGE.ask()
