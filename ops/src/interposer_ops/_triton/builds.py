"""What is compiled ahead of time: for every kernel, calls of the sizes that models use.

A build is a call of the kernel's own function on tensors without memory, so that what is compiled
is what such a call would launch, tile and warps included. They stand as ``BUILDS`` beside the
kernels.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from interposer_ops._records import triton_kernels
from interposer_ops._triton.build import Build

_MODULES = sorted({kernel.target.partition(":")[0] for kernel in triton_kernels()})
_PACKAGE = Path(__file__).parents[1]
_MODULES += [
    f"{_PACKAGE.name}.{path.parent.name}.{path.stem}"
    for path in sorted(_PACKAGE.glob("*/_*_builds.py"))
]

BUILDS: tuple[Build, ...] = tuple(
    build for module in _MODULES for build in getattr(import_module(module), "BUILDS", ())
)
"""All builds, those of one kernel together."""
