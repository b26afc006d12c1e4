"""Fast imports of many modules, for the commands of a program.

This module imports only the standard library, because the command imports it first.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frozen_imports"]


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Pause the garbage collector while a ``with`` block imports modules, and freeze the objects.

    Importing torch creates hundreds of thousands of objects that live as long as the process.
    Collections visit them again and again, during the imports, later, and several times when the
    process ends: a quarter of the time of ``interposer run`` to its first token.

    Use this in commands only, never in a library: every object of the process that is alive at the
    end of the block is exempt from later collections.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
