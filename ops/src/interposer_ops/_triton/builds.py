"""All ahead-of-time builds: for every kernel, calls with the sizes of common models.

A build calls the launcher of the kernel on meta tensors. So the launch that is compiled has the
tile and the number of warps of a real call. Each ``_*_triton`` module lists its builds as
``BUILDS``.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from interposer_ops._triton.build import Build

_PACKAGE = Path(__file__).parents[1]
# Found by file name, not from the records: importing these modules generates the records.
_MODULES = [
    import_module(f"{_PACKAGE.name}.{path.parent.name}.{path.stem}")
    for path in sorted(_PACKAGE.glob("*/_*_triton.py"))
]
_UNSORTED = [build for module in _MODULES for build in getattr(module, "BUILDS", ())]

BUILDS: tuple[Build, ...] = tuple(sorted(_UNSORTED, key=lambda build: build.kernel))
"""All builds, grouped by kernel, in the order of declaration within a kernel."""
