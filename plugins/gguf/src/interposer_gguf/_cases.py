"""Cases of projections by blocks. I input features, O output features."""

from __future__ import annotations

import torch

from interposer import Case, Dims
from interposer_gguf._block_formats import FORMATS, BlockFormat, format_named
from interposer_ops.cases import bias_of, linear_case, sampled_case
from interposer_testing.cases import Axis, CaseSpace, Point, Strides, normal

# Shape of x, O.
_SHAPES = {
    "one block": ((7, 256), 40),
    "one row": ((1, 1024), 64),
    "odd outputs": ((5, 512), 37),
    "a row and an output after 128": ((129, 256), 129),
    "one output": ((2, 256), 1),
    "three dimensions": ((2, 3, 768), 32),
    "long sum": ((3, 4096), 24),
    "no rows": ((0, 256), 16),
}
# As many as the short blocks have, which the long ones cannot.
_SHORT_SHAPES = {"one short block": ((3, 32), 8), "three short blocks": ((2, 96), 11)}
_LONGEST_BLOCK = 256
_STRIDED: dict[str, Strides] = {"x": "leading", "weight": "offset", "bias": "offset"}
# Two roundings of a weight: of the product, and of the sum with the offset.
_SCALINGS = 2


def random_rows(
    layout: BlockFormat,
    num_rows: int,
    in_features: int,
    generator: torch.Generator,
    size: float = 1.0,
) -> torch.Tensor:
    """Return rows ``[O, row]`` uint8 of blocks that hold any integers, and scales of either sign.

    Args:
        size: what the numbers' magnitudes are about.
    """
    shape = (num_rows, in_features // layout.size)
    blocks = torch.randint(
        0, 256, (*shape, layout.num_bytes), dtype=torch.uint8, generator=generator
    )
    # The factors of long blocks have six bits, or eight with a sign.
    factor = 1.0 if layout.group_size == layout.size else 32.0
    step = size / (factor * max(-layout.lowest, layout.highest))
    for start in layout.halves:
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        numbers = signs * step * (0.5 + torch.rand(shape, generator=generator))
        bits = numbers.to(torch.float16).view(torch.int16)
        blocks[..., start] = bits & 255
        blocks[..., start + 1] = bits >> 8 & 255
    return blocks.flatten(1)


def _case(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    shape, out_features = point["shape"]
    layout: BlockFormat = point["format"]
    in_features = shape[-1]
    weight = random_rows(layout, out_features, in_features, generator, in_features**-0.5)
    x = normal(shape, dtype, generator)
    bias = bias_of(out_features, dtype, generator, point["bias"])
    arguments = {"x": x, "weight": weight, "bias": bias, "stored_as": layout.name}
    dims = {
        "in_features": in_features,
        "out_features": out_features,
        "stored_as": layout.name,
    }
    numbers = layout.dequantized(weight, torch.float64)
    return linear_case(
        arguments,
        dims,
        x.double(),
        numbers,
        bias,
        _SCALINGS,
        _beside(x, layout, weight),
        stored_product=True,
    )


def _beside(x: torch.Tensor, layout: BlockFormat, weight: torch.Tensor) -> float:
    """Return a bound of the sums with codes and with offsets, which a kernel may add apart."""
    if not x.numel():
        return 0.0
    scale, offset = layout.scales(weight, torch.float64)
    codes = layout.codes(weight).double().abs()
    parts = codes * scale.abs().repeat_interleave(layout.group_size, 1)
    if offset is not None:
        parts = parts + offset.abs().repeat_interleave(layout.group_size, 1)
    return float((x.double().abs() @ parts.T).max())


gguf_linear_cases = CaseSpace(
    _case,
    Axis("shape", {**_SHAPES, **_SHORT_SHAPES}),
    Axis("format", FORMATS),
    Axis("bias", {"": False, "bias": True}),
    strided=_STRIDED,
    crossed={"shape": ("odd outputs", "three dimensions"), "bias": ("bias",)},
    alone={"shape": ("no rows",)},
    valid=lambda point, _: point["shape"][0][-1] % point["format"].size == 0,
)
"""Every block format, with and without bias."""


def gguf_linear_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states and a weight, with the bias that the dims state."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    layout = format_named(str(dims["stored_as"]))
    weight = random_rows(layout, out_features, in_features, generator, in_features**-0.5)
    bias = bias_of(out_features, dtype, generator, bool(dims.get("biased")))
    x = normal((num_tokens, in_features), dtype, generator)
    arguments = {"x": x, "weight": weight, "bias": bias, "stored_as": layout.name}
    numbers = layout.dequantized(weight, torch.float32)
    bounds = _SCALINGS, _longest_sums(x, layout, weight)
    return sampled_case(arguments, dims, x, numbers, *bounds, stored_product=True)


def _longest_sums(x: torch.Tensor, layout: BlockFormat, weight: torch.Tensor) -> float:
    """Return the bound of ``_beside`` by lengths of rows, which costs no product."""
    scale, offset = layout.scales(weight, torch.float32)
    largest = scale.abs() * max(-layout.lowest, layout.highest)
    if offset is not None:
        largest = largest + offset.abs()
    rows = (largest.square() * layout.group_size).sum(-1).sqrt()
    return float(rows.max() * x.float().norm(dim=-1).max()) if x.numel() else 0.0
