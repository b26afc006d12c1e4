"""Verdict on the installed triton for Intel GPUs, without importing triton."""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from interposer import Verdict

_BACKEND = "intel"


def judge() -> Verdict:
    """Accept if triton is installed with a backend for Intel GPUs.

    Source: triton's ``backends/__init__.py``: a backend is a folder in it, or an entry point of
    the group ``triton.backends``.
    """
    spec = find_spec("triton")
    if spec is None or not spec.origin:
        return Verdict.refuse("triton is not installed")
    folder = Path(spec.origin).parent / "backends"
    names = {path.parent.name for path in folder.glob("*/compiler.py")}
    names |= {point.name for point in entry_points(group="triton.backends")}
    if _BACKEND in names:
        return Verdict.accept()
    names_text = ", ".join(sorted(names)) or "none"
    return Verdict.refuse(
        f"the installed triton has no backend {_BACKEND!r}, it has {names_text}. Install that of "
        "torch's wheels for XPU: pytorch-triton-xpu"
    )
