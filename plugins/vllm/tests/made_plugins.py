"""Distributions of third parties, as wheels: for vLLM and for interposer, sound and broken ones."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

__all__ = ["install_plugins"]

REPLACES_A_LAYER = """
def register():
    from vllm.model_executor.custom_op import PluggableLayer
    from vllm.model_executor.layers.linear import RowParallelLinear

    class AcmeRowParallelLinear(RowParallelLinear):
        pass

    PluggableLayer.register_oot(AcmeRowParallelLinear, name="RowParallelLinear")
"""
OFFERS_A_KERNEL = """
from interposer.hookspecs import hookimpl
from interposer.records import Kernel

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records():
    return [Kernel("linear", "linear_{name}", "{name}_kernels:linear", "cpu", score={score})]
"""
KERNEL = """
import torch


def linear(x, weight, bias):
    return torch.nn.functional.linear(x, weight, bias)
"""
ENDS_THE_PROCESS = """
import os


def linear(x, weight, bias):
    os.abort()
"""
RAISES = "raise OSError('libacme.so: no such library')\n"


def _wheel(folder: Path, name: str, points: str, modules: dict[str, str]) -> Path:
    stem = f"{name.replace('-', '_')}-1.0"
    info = f"{stem}.dist-info"
    files = {
        **{f"{module}.py": code for module, code in modules.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": points,
        f"{info}/RECORD": "",
    }
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for inner, text in files.items():
            file.writestr(inner, text)
    return path


def _kernels(folder: Path, name: str, score: float, code: str) -> Path:
    return _wheel(
        folder,
        f"{name}-kernels",
        f"[interposer.plugins]\n{name} = {name}_plugin\n",
        {
            f"{name}_plugin": OFFERS_A_KERNEL.format(name=name, score=score),
            f"{name}_kernels": code,
        },
    )


def install_plugins(folder: Path) -> Path:
    """Return a folder for ``sys.path`` into which pip has installed all of them."""
    folder.mkdir()
    wheels = [
        _wheel(
            folder,
            "acme-vllm",
            "[vllm.general_plugins]\nacme = acme_vllm:register\n",
            {"acme_vllm": REPLACES_A_LAYER},
        ),
        _kernels(folder, "acme", 0.5, KERNEL),
        _kernels(folder, "fatal", 99.0, ENDS_THE_PROCESS),
        _wheel(
            folder,
            "broken-kernels",
            "[interposer.plugins]\nbroken = broken_plugin\n",
            {"broken_plugin": RAISES},
        ),
    ]
    site = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
    subprocess.run([*command, "--target", str(site), *map(str, wheels)], check=True, timeout=300)
    return site
