"""Tiles of kernels that treat rows one by one: how many rows and columns a program takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from interposer_ops._triton.parameters import parameters_for, per_device


class RowTile(NamedTuple):
    """Rows and columns of one program, and how it is compiled.

    ``columns`` is a power of two, and either covers the row or is the step of a loop over it.
    """

    rows: int
    columns: int
    compiled: Mapping[str, int]

    def row_blocks(self, num_rows: int) -> int:
        """Return how many programs cover ``num_rows``."""
        return -(-num_rows // self.rows)

    def column_blocks(self, width: int) -> int:
        """Return how many programs cover a row."""
        return -(-width // self.columns)

    @property
    def options(self) -> dict[str, int]:
        """The launch options of a kernel that takes ``ROWS`` and ``COLUMNS``."""
        return {"ROWS": self.rows, "COLUMNS": self.columns, **self.compiled}


@per_device
def row_tile(kernel: str, device: torch.device, width: int) -> RowTile:
    """Return the tile of ``kernel`` for rows of ``width`` elements; it depends on nothing else.

    The blocks of such kernels: ``width``, the most columns; ``tile``, how many elements a program
    of short rows takes at least, with several rows then; ``warp``, the elements for each warp.

    Args:
        width: at least 1.
    """
    parameters = parameters_for(kernel, device)
    blocks = parameters.blocks
    columns = min(triton.next_power_of_2(width), blocks["width"])
    rows = max(1, blocks["tile"] // columns)
    num_warps = min(parameters.num_warps, max(1, rows * columns // blocks["warp"]))
    return RowTile(rows, columns, {**parameters.compiled, "num_warps": num_warps})


def as_rows(x: Tensor) -> Tensor:
    """Return ``x`` as ``[rows, H]`` whose elements follow each other; a copy only if need be."""
    if x.ndim != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
