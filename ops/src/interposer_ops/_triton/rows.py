"""Tile sizes of row-wise kernels: rows and columns per program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from interposer_ops._triton.parameters import parameters_for, per_device


class RowTile(NamedTuple):
    """Tile size of a row-wise kernel, and launch options.

    ``columns`` is a power of two that either covers the row or is the step of a loop over the row.
    """

    rows: int
    columns: int
    compiled: Mapping[str, int]

    def row_blocks(self, num_rows: int) -> int:
        """Return the number of programs that cover ``num_rows``."""
        return -(-num_rows // self.rows)

    def column_blocks(self, width: int) -> int:
        """Return the number of programs that cover a row of ``width`` elements."""
        return -(-width // self.columns)

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of a launch: ``ROWS``, ``COLUMNS``, and the options of triton."""
        return {"ROWS": self.rows, "COLUMNS": self.columns, **self.compiled}


@per_device
def row_tile(kernel: str, device: torch.device, width: int) -> RowTile:
    """Return the tile of ``kernel`` for rows of ``width`` elements, at least 1.

    The tile does not depend on the number of rows. Blocks in the tuning file: ``width``, the
    maximum of columns; ``tile``, the minimum of elements per program, reached by several rows if
    rows are short; ``warp``, the elements per warp.
    """
    parameters = parameters_for(kernel, device)
    blocks = parameters.blocks
    columns = min(triton.next_power_of_2(width), blocks["width"])
    rows = max(1, blocks["tile"] // columns)
    # More warps than one per ``warp`` elements would have nothing to load.
    num_warps = min(parameters.num_warps, max(1, rows * columns // blocks["warp"]))
    return RowTile(rows, columns, {**parameters.compiled, "num_warps": num_warps})


def as_rows(x: Tensor) -> Tensor:
    """View ``x`` as ``[rows, H]`` with contiguous rows; copy only if a view is impossible."""
    if x.ndim != 2:
        x = x.reshape(-1, x.shape[-1])
    # The stride of a dimension of size 1 has no effect.
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
