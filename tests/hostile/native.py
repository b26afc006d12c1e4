"""Shared libraries that crash, compiled from C; without a compiler there are none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["LOADED", "NEEDS", "compile_library", "has_compiler"]

NEEDS = "needs a C compiler that goes by the name cc. On Debian: apt-get install gcc libc6-dev"

SOURCE = """
#include <signal.h>

void crash(void) { *(volatile int *)0 = 1; }

void illegal(void) {
#if defined(__x86_64__) || defined(__i386__)
    __asm__ volatile("ud2");
#elif defined(__aarch64__)
    __asm__ volatile(".inst 0x00000000");
#else
    raise(SIGILL);
#endif
}

void spin(void) { for (volatile int turns = 0;; turns = turns + 1) {} }

#ifdef ON_LOAD
__attribute__((constructor)) static void loaded(void) { ON_LOAD(); }
#endif
"""

# Loads the library that lies beside the module. PyDLL keeps the interpreter's lock in a call, so
# that no other thread of its process can interrupt it. Without the library it crashes as well.
LOADED = """
import ctypes, pathlib

library = pathlib.Path(__file__).with_name("native.so")
native = ctypes.PyDLL(str(library)) if library.exists() else ctypes.string_at(0)
"""


def has_compiler() -> bool:
    return shutil.which("cc") is not None


def compile_library(on_load: str, folder: Path) -> bytes:
    """Return a library that calls the function ``on_load`` of ``SOURCE`` when it is loaded."""
    source, library = folder / f"{on_load}.c", folder / f"{on_load}.so"
    source.write_text(SOURCE, encoding="utf-8")
    options = ["-shared", "-fPIC", *([f"-DON_LOAD={on_load}"] if on_load != "nothing" else [])]
    subprocess.run(["cc", *options, "-o", library, source], check=True, timeout=60)
    return library.read_bytes()
