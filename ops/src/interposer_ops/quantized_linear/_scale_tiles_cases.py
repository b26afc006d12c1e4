"""Test cases of the op that reorders block scales into tiles.

M rows, C blocks per row, R rows per tile.
"""

from __future__ import annotations

import torch

from interposer import Case
from interposer_testing.cases import Axis, CaseSpace, Point

_SHAPES = {
    "several tiles": (256, 12),
    "one tile": (128, 4),
    "one row": (1, 16),
    "one scale": (1, 1),
    "odd": (37, 5),
    "one row beyond a tile": (129, 8),
    "one column beyond a tile": (64, 9),
    "no rows": (0, 8),
    "many columns": (9, 256),
    "one short of a tile": (127, 3),
}


def _tiles(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    # No code is a NaN of e4m3, and none is zero, which is the value of the padding.
    codes = torch.randint(1, 127, point["shape"], generator=generator, dtype=torch.uint8)
    scales = codes if dtype == torch.uint8 else codes.view(dtype)
    rows_per_tile = point["tile"]
    arguments = {"scales": scales, "rows_per_tile": rows_per_tile}
    return Case("", arguments, {"rows_per_tile": rows_per_tile}, reduction=0)


tile_scales_cases = CaseSpace(
    _tiles,
    Axis("shape", _SHAPES),
    Axis("tile", {"128x4": 128, "8x4": 8}),
    dtypes=(torch.uint8, torch.float8_e4m3fn),
    strided={"scales": "any"},
    crossed={"shape": tuple(label for label in _SHAPES if label != "no rows")},
)
"""Shapes with full and partial tiles in both dimensions."""
