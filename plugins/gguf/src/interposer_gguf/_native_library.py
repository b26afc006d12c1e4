"""Loader of the native kernel library.

The library is C++ without torch and Python, called through ctypes. The library contains each kernel
for every instruction level, and reports the highest level that this processor supports. Kernels run
on torch's threads: this module passes torch's OpenMP function to the library, so that no second
OpenMP runtime is loaded.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from interposer import Request, Verdict

LEVELS = ("portable", "avx2", "avx512", "avx512_bf16")
"""The instruction levels, in the order of their numbers in the library."""

_ABSENT = (
    "this installation holds no native library: no C++ compiler was found when it was built, "
    "or too old a one; install g++ 11 or newer and reinstall"
)
_SIZE, _POINTER = ctypes.c_ssize_t, ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded native kernel library.

    Attributes:
        linear: ``interposer_gguf_linear`` of native/call.cpp.
        dequantize: ``interposer_gguf_dequantize``.
        level: the highest level that this processor supports.
        parallel: address of a function that runs a function in several threads, or None.
    """

    linear: Any
    dequantize: Any
    level: int
    parallel: int | None


def path() -> Path | None:
    """Return the path of the library, or None if the installation lacks the file."""
    paths = sorted(Path(__file__).with_name("_native").glob("libinterposer_gguf.*"))
    return paths[0] if paths else None


def check_library(request: Request) -> Verdict:
    """Accept the request if the library is installed, without loading the library."""
    return Verdict.refuse(_ABSENT) if path() is None else Verdict.accept()


@cache
def library() -> Library:
    """Return the library, which is loaded once per process.

    Raises: OSError: the installation lacks the library, or the library is for another system.
    """
    library_path = path()
    if library_path is None:
        raise OSError(_ABSENT)
    loaded = ctypes.CDLL(str(library_path))
    linear, dequantize = loaded.interposer_gguf_linear, loaded.interposer_gguf_dequantize
    threads = (_POINTER, ctypes.c_int)
    linear.argtypes = (
        *(ctypes.c_int,) * 3,
        *(_POINTER, _SIZE, _SIZE),
        *(_POINTER, _SIZE, _SIZE, _SIZE),
        *(_POINTER, _POINTER),
        *threads,
    )
    dequantize.restype = None
    dequantize.argtypes = (
        *(ctypes.c_int,) * 2,
        *(_POINTER, _SIZE, _SIZE, _SIZE),
        _POINTER,
        *threads,
    )
    return Library(linear, dequantize, loaded.interposer_gguf_highest_level(), _parallel())


def _parallel() -> int | None:
    """Return the address of ``GOMP_parallel`` in the OpenMP that torch is linked with, or None.

    Every OpenMP that torch may be built with exports the function: GNU's, LLVM's and Intel's.
    """
    # Imported here, because ``check_library`` must not import torch.
    import torch

    # This library is loaded already. A symbol lookup in this library also searches its
    # dependencies, but no other OpenMP of the process.
    loaded = ctypes.CDLL(torch._C.__file__)
    if not hasattr(loaded, "GOMP_parallel"):
        return None
    return ctypes.cast(loaded.GOMP_parallel, _POINTER).value
