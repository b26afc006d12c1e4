"""The builds ahead of time: for every kernel, calls of the sizes that models use.

A build is a call of the kernel's own function on tensors without memory, so that what is compiled
is what such a call would launch, tile and warps included. They stand as ``BUILDS`` beside the
kernels.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from interposer_ops._triton.build import Build

_PACKAGE = Path(__file__).parents[1]
# Not the modules that records name: these are read from declarations, as the builds are.
_MODULES = [
    import_module(f"{_PACKAGE.name}.{path.parent.name}.{path.stem}")
    for path in sorted(_PACKAGE.glob("*/_*_triton.py"))
]
_FOUND = [build for module in _MODULES for build in getattr(module, "BUILDS", ())]

BUILDS: tuple[Build, ...] = tuple(sorted(_FOUND, key=lambda build: build.kernel))
"""All builds, those of one kernel together and in their order."""
