"""Check functions of a repository of the hub in the cases of their ops; prints JSON.

Called with a build and how many cases of each op, by ``test_hub_kernels``. It checks the Triton
kernels, on the processor, with ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from kernels import get_local_kernel

from interposer import CustomOp, current_registry
from interposer_ops.triton import triton_kernels
from interposer_testing import check_kernel


def functions(folder: Path, *, compiled: bool) -> dict[str, Callable[..., Any]]:
    """Return the functions by op; the Triton ones even on a processor, if ``compiled``."""
    module = get_local_kernel(folder)
    names = [name for name in module.__all__ if name != "layers"]
    if not compiled:
        return {name: getattr(module, name) for name in names}
    own = module.functions
    return {name: own._load(*own._COMPILED[name]) for name in names}


def main() -> None:
    folder, most = Path(sys.argv[1]), int(sys.argv[2])
    compiled = bool(os.environ.get("TRITON_INTERPRET"))
    if compiled:
        # Triton's own interpreter does not round to bfloat16 as hardware does.
        from interposer import Config, place

        place(Config(platform="interpreter"))
    accepts = {kernel.op: kernel for kernel in triton_kernels()}
    registry = current_registry()
    faults: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for name, function in functions(folder, compiled=compiled).items():
        module, _, attribute = registry.ops[name].target.partition(":")
        op: CustomOp[..., Any] = getattr(importlib.import_module(module), attribute)
        counts[name] = 0
        dtypes = [getattr(torch, dtype) for dtype in accepts[name].requires.dtypes]
        for dtype in dtypes[: 1 if compiled else None]:
            for case in islice(op.cases(dtype, 0), most):
                counts[name] += 1
                found = check_kernel(op, function, case)
                faults.setdefault(name, []).extend(f"{case.label}: {fault}" for fault in found)
    print(json.dumps({"counts": counts, "faults": {n: f for n, f in faults.items() if f}}))


if __name__ == "__main__":
    main()
