"""The whole pack: every case as a wheel, installed into one folder beside a healthy plugin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from packaging import tags
from tests.hostile import (
    effects,
    hooks,
    imports,
    interpreter,
    kernels,
    lies,
    metadata,
    native,
    parts,
)
from tests.hostile.case import Hostile, provides
from tests.hostile.wheel import Wheel

__all__ = ["CASES", "HEALTHY", "install", "wheel"]

CASES = (
    *imports.CASES,
    *effects.CASES,
    *interpreter.CASES,
    *metadata.CASES,
    *hooks.CASES,
    *kernels.CASES,
    *parts.CASES,
    *lies.CASES,
)
REQUIRES = ("interposer>=0.1,<0.2", "interposer-ops>=0.1,<0.2", "torch>=2.11")

HEALTHY = Wheel(
    "healthy-norm",
    "1.0",
    {
        "healthy_norm/__init__.py": b"",
        "healthy_norm/plugin.py": provides(
            'Kernel("rms_norm", "rms_norm_healthy", "healthy_norm.kernels:rms_norm", score=15.0)'
        ).encode(),
        "healthy_norm/kernels.py": b"import torch\n\n\ndef rms_norm(x, weight, eps):\n"
        b"    return torch.rms_norm(x, weight.shape, weight, eps)\n",
    },
    {"healthy-norm": "healthy_norm.plugin"},
    REQUIRES,
)


def wheel(case: Hostile, folder: Path) -> Wheel:
    """Return the wheel of a case; ``folder`` is where its library is compiled."""
    files = {f"{case.package}/__init__.py": b""}
    for name, text in case.files.items():
        files[f"{case.package}/{name}"] = case.filled(text).encode()
    tag = "py3-none-any"
    if case.native and native.has_compiler():
        files[f"{case.package}/native.so"] = native.compile_library(case.native, folder)
        tag = f"py3-none-{next(tags.platform_tags())}"
    plugins = {case.plugin_name: case.filled(case.value)}
    requires = (*REQUIRES, *case.requires)
    return Wheel(case.distribution, "1.0", files, plugins, requires, tag=tag)


def install(folder: Path) -> Path:
    """Return the folder into which pip has installed every case, with its alterations."""
    wheels, site = folder / "wheels", folder / "site"
    wheels.mkdir()
    paths = [HEALTHY.write(wheels), *(wheel(case, wheels).write(wheels) for case in CASES)]
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    options = ("--no-deps", "--no-index", "--no-compile", "--target", site)
    subprocess.run([*pip, *options, *paths], check=True, timeout=300)
    for case in CASES:
        for name, content in case.altered.items():
            path = site / case.filled(name)
            if content is None:
                path.unlink()
            else:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(case.filled(content).encode())
    return site
