"""What is compiled ahead of time: for every kernel, calls of the sizes that models use.

A build is a call of the kernel's own function on tensors without memory, so that what is compiled
is what such a call would launch, tile and warps included.
"""

from __future__ import annotations

from interposer_ops.triton.builds import elementwise

__all__ = ["BUILDS"]

BUILDS = (*elementwise.BUILDS,)
"""All builds, those of one kernel together."""
