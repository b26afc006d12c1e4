"""Reordering of block scales into the tiles that matrix instructions read.

A tile has R rows and 4 blocks; tiles are stored row by row. In a tile of 128 rows, the scale of row
r and block c is at 16 (r mod 32) + 4 floor(r / 32) + c; in a tile of 8 rows, at 4 r + c.

M rows, C blocks per row, R rows per tile.

Source: NVIDIA cuBLAS documentation, "1D Block Scaling Factors Layout" (128 rows); the layouts
128x4 and 8x4 of scaling factors of TensorRT-LLM and flashinfer.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import standard_op

_CASES = "interposer_ops.quantized_linear._scale_tiles_cases"

_COLUMNS = 4
_LANES = 32


@standard_op("tile_scales", cases=_CASES, sample=False, tolerance=Tolerance(roundings=0))
def tile_scales(scales: Tensor, rows_per_tile: int) -> Tensor:
    """Reorder block scales into tiles, padded with zeros.

    Args:
        scales: ``[M, C]``, any 1-byte dtype.
        rows_per_tile: R, 128 or 8.
    Returns: ``[ceil(M / R), ceil(C / 4), 4 R]``, dtype of ``scales``, contiguous.
    Dims: ``rows_per_tile``.
    """
    rows, columns = scales.shape
    num_rows, num_columns = -(-rows // rows_per_tile), -(-columns // _COLUMNS)
    missing = (0, num_columns * _COLUMNS - columns, 0, num_rows * rows_per_tile - rows)
    padded = functional.pad(scales, missing)
    lanes = min(rows_per_tile, _LANES)
    # [tile row, group of lanes, lane, tile column, column]
    parted = padded.view(num_rows, rows_per_tile // lanes, lanes, num_columns, _COLUMNS)
    ordered = parted.permute(0, 3, 2, 1, 4)
    return ordered.reshape(num_rows, num_columns, _COLUMNS * rows_per_tile)
