"""The image processor of Llama 4; the class of transformers needs torchvision.

A picture is scaled onto a canvas of square tiles. The encoder sees each tile, and behind several
tiles also the whole picture in one tile. C channels, S side of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad
from transformers import BatchFeature
from transformers.image_processing_base import ImageProcessingMixin
from transformers.processing_utils import ImagesKwargs


class Llama4ImageProcessor(ImageProcessingMixin):
    """Computes the same pixels as the class of this name in transformers, by the same settings."""

    valid_kwargs = ImagesKwargs
    size: Mapping[str, int] = MappingProxyType({"height": 336, "width": 336})
    max_patches: int = 16
    resize_to_max_canvas: bool = False
    rescale_factor: float = 1 / 255
    image_mean: Sequence[float] = (0.5, 0.5, 0.5)
    image_std: Sequence[float] = (0.5, 0.5, 0.5)

    def __call__(self, images: Sequence[Any], **_: Any) -> BatchFeature:
        """Return the tiles of pictures, ``[tiles, C, S, S]`` bfloat16, and their rows and columns.

        Args:
            images: RGB pictures of Pillow.
        """
        tiles, grids = zip(*map(self._tiles, images), strict=True)
        return BatchFeature({"pixel_values": torch.cat(tiles), "aspect_ratios": list(grids)})

    def _tiles(self, image: Any) -> tuple[Tensor, tuple[int, int]]:
        side = self.size["height"]
        # [1, C, height, width]
        rows_of_pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = rows_of_pixels.view(image.height, image.width, 3).permute(2, 0, 1)[None]
        height, width = pixels.shape[-2:]
        rows, columns = self._best_grid(height, width)
        # Tensors divide in float32, and integers in float64: both as in transformers, because the
        # last bit can decide about a row of pixels.
        limits: Any = (torch.tensor(rows * side), torch.tensor(columns * side))
        if not self.resize_to_max_canvas:
            # A small picture is not magnified beyond one tile.
            limits = (min(max(height, side), limits[0]), min(max(width, side), limits[1]))
        scaled = _resize(pixels, _fitted(height, width, *limits))
        missing = (columns * side - scaled.shape[-1], rows * side - scaled.shape[-2])
        canvas = self._normalized(pad(scaled, (0, missing[0], 0, missing[1])))[0]
        grid = canvas.unflatten(2, (columns, side)).unflatten(1, (rows, side))
        tiles = grid.permute(1, 3, 0, 2, 4).flatten(0, 1)
        if len(tiles) > 1:
            overview = self._normalized(_resize(pixels, (side, side)))
            tiles = torch.cat([tiles, overview])
        return tiles.contiguous(), (rows, columns)

    def _best_grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the canvas that changes the picture's size least.

        A canvas that holds the whole picture comes first, then the one with the fewest tiles.
        """
        side = self.size["height"]
        grids = torch.tensor(list(_grids(self.max_patches)))
        # In float32, as in transformers, so that scales which compare equal there do here.
        scales = torch.minimum(grids[:, 0] * side / height, grids[:, 1] * side / width)
        larger = scales[scales >= 1]
        if not len(larger):
            best = scales.max()
        else:
            best = larger.max() if self.resize_to_max_canvas else larger.min()
        rows, columns = min(grids[scales == best].tolist(), key=math.prod)
        return rows, columns

    def _normalized(self, pixels: Tensor) -> Tensor:
        # The published model was trained with pixels of bfloat16.
        scaled = pixels.to(torch.bfloat16) * self.rescale_factor
        mean, std = (
            torch.tensor(values, dtype=torch.bfloat16)[:, None, None]
            for values in (self.image_mean, self.image_std)
        )
        normalized: Tensor = (scaled - mean) / std
        return normalized


def _grids(max_tiles: int) -> Iterator[tuple[int, int]]:
    for rows in range(1, max_tiles + 1):
        for columns in range(1, max_tiles // rows + 1):
            yield rows, columns


def _fitted(height: int, width: int, max_height: Any, max_width: Any) -> tuple[int, int]:
    """Return the largest size with the picture's proportions within limits."""
    scale_height, scale_width = max_height / height, max_width / width
    if scale_width < scale_height:
        return max(min(int(height * scale_width), int(max_height)), 1), int(max_width)
    return int(max_height), max(min(int(width * scale_height), int(max_width)), 1)


def _resize(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    return interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)
