"""A program that loads libraries of vLLM and prints the fault of each op as JSON.

    python inquiry.py FOLDER SCHEMAS KEY

It runs in a process of its own: a library that was built for another torch may end it. ``FOLDER``
is vLLM's package, which is not imported; ``SCHEMAS`` are the known ones by op, as JSON; ``KEY`` is
the dispatch key that each op must have a kernel for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["fault", "is_registered", "libraries", "load"]

# On x86 a build for processors has one library for each level, and exactly one of them is loaded.
_LEVELS = ("_C", "_C_AVX512", "_C_AVX2")
_OTHERS = ("_C_stable_libtorch", "_C", "_rocm_C")


def libraries(folder: Path) -> list[Path]:
    """Return the libraries of ops that vLLM itself would load on this machine."""
    import torch

    def files(*names: str) -> list[Path]:
        paths = (folder / f"{name}.abi3.so" for name in names)
        return [path for path in paths if path.is_file()]

    if not files("_C_AVX2"):
        return files(*_OTHERS)
    best = 2
    if torch.cpu._is_avx512_supported():
        best = 0 if torch.cpu._is_avx512_bf16_supported() else 1
    return files(_LEVELS[best])


def load(folder: Path) -> None:
    """Load the libraries, which registers their ops in torch.

    Raises: OSError: one of them cannot be loaded.
    """
    import torch

    for library in libraries(folder):
        torch.ops.load_library(str(library))


def is_registered(name: str) -> bool:
    """Return True if torch knows the op in this process."""
    import torch

    return bool(torch._C._jit_get_schemas_for_operator(name))


def fault(name: str, known: Sequence[str], key: str) -> str:
    """Return why the op ``name`` cannot be called; empty where it can.

    Args:
        known: the schemas that calls were written for, without the name.
        key: the dispatch key of the device.
    """
    import torch

    found = [str(schema) for schema in torch._C._jit_get_schemas_for_operator(name)]
    if not found:
        return "does not exist"
    wanted = [str(torch._C.parse_schema(f"{name}{schema}")) for schema in known]
    if not {*found} & {*wanted}:
        return f"has the schema {'; '.join(found)}, but was {' or '.join(wanted)}"
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key):
        return f"has no kernel for {key}: this build of vLLM is for other devices"
    return ""


def faults(folder: Path, schemas: Mapping[str, Sequence[str]], key: str) -> dict[str, str]:
    """Return the fault of every op, after the libraries were loaded."""
    try:
        load(folder)
    except OSError as error:
        return dict.fromkeys(schemas, f"cannot be had: {error}")
    return {name: fault(name, known, key) for name, known in schemas.items()}


if __name__ == "__main__":
    told = faults(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
    sys.stdout.write("\n" + json.dumps(told) + "\n")
