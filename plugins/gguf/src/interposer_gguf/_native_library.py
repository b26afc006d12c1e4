"""The library of native kernels: its place, its requirements and its users.

It is C++ that knows neither torch nor Python, called by way of ctypes. It holds each kernel once
for every level of vector instructions and says itself which of them this processor has. Threads
are those of torch: the functions of its OpenMP are looked up in torch's own library and handed
over, so that no second one is loaded.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from interposer import Request, Verdict

LEVELS = ("portable", "avx2", "avx512", "avx512_bf16")
"""Names of the levels, by their numbers in the library."""

_ABSENT = (
    "this installation holds no native library: no C++ compiler was found when it was built, "
    "or too old a one; install g++ 11 or newer and reinstall"
)
_SIZE, _POINTER = ctypes.c_ssize_t, ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library.

    Attributes:
        linear: ``interposer_gguf_linear`` of native/call.cpp.
        dequantize: ``interposer_gguf_dequantize``.
        level: the highest that this processor has.
        parallel: address of what runs a function in several threads, or None.
    """

    linear: Any
    dequantize: Any
    level: int
    parallel: int | None


def path() -> Path | None:
    """Return the path of the library, or None where the installation has none."""
    found = sorted(Path(__file__).with_name("_native").glob("libinterposer_gguf.*"))
    return found[0] if found else None


def judge(request: Request) -> Verdict:
    """Say whether the installation has the library; it is not loaded for that."""
    return Verdict.refuse(_ABSENT) if path() is None else Verdict.accept()


@cache
def library() -> Library:
    """Return the library, which is loaded once.

    Raises: OSError: the installation has none, or it is not for this system.
    """
    found = path()
    if found is None:
        raise OSError(_ABSENT)
    loaded = ctypes.CDLL(str(found))
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
    """Return the address of ``GOMP_parallel`` in what torch is linked with, or None.

    Any OpenMP that torch may be built with has it: GNU's own, LLVM's and Intel's.
    """
    # Imported here, as the predicate needs no torch.
    import torch

    # It is loaded already; a look-up there includes all that it depends on, and nothing else.
    loaded = ctypes.CDLL(torch._C.__file__)
    if not hasattr(loaded, "GOMP_parallel"):
        return None
    return ctypes.cast(loaded.GOMP_parallel, _POINTER).value
