"""Test cases of ``gguf_linear``. I input features, O output features."""

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
# Inputs that are a multiple of 32 but not of 256: for the formats of short blocks only.
_SHORT_SHAPES = {"one short block": ((3, 32), 8), "three short blocks": ((2, 96), 11)}
_STRIDED: dict[str, Strides] = {"x": "leading", "weight": "offset", "bias": "offset"}
# A weight is rounded twice: after the multiplication by the scale, and after adding the offset.
_SCALINGS = 2


def random_rows(
    layout: BlockFormat,
    num_rows: int,
    in_features: int,
    generator: torch.Generator,
    size: float = 1.0,
) -> torch.Tensor:
    """Return random rows ``[O, row]`` uint8 of blocks, with finite scales of either sign.

    Args:
        size: approximate magnitude of the dequantized values.
    """
    shape = (num_rows, in_features // layout.size)
    # Any bytes are valid quantized values. The float16 scales are overwritten below.
    blocks = torch.randint(
        0, 256, (*shape, layout.num_bytes), dtype=torch.uint8, generator=generator
    )
    # Long blocks multiply their float16 scale by a factor of six bits, or of eight with a sign.
    factor = 1.0 if layout.group_size == layout.size else 32.0
    step = size / (factor * max(-layout.lowest, layout.highest))
    for start in layout.halves:
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        scales = signs * step * (0.5 + torch.rand(shape, generator=generator))
        bits = scales.to(torch.float16).view(torch.int16)
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
        _partial_sum_bound(x, layout, weight),
        stored_product=True,
    )


def _partial_sum_bound(x: torch.Tensor, layout: BlockFormat, weight: torch.Tensor) -> float:
    """Bound the two partial sums of each row, with scales and with offsets.

    A kernel may accumulate the two sums separately, and each may be larger than the result.
    """
    if not x.numel():
        return 0.0
    scale, offset = layout.scales(weight, torch.float64)
    quantized = layout.quantized(weight).double().abs()
    parts = quantized * scale.abs().repeat_interleave(layout.group_size, 1)
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
    """Return inputs of T tokens and a random weight, with a bias if the dims state one."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = int(dims["in_features"]), int(dims["out_features"])
    layout = format_named(str(dims["stored_as"]))
    weight = random_rows(layout, out_features, in_features, generator, in_features**-0.5)
    bias = bias_of(out_features, dtype, generator, bool(dims.get("biased")))
    x = normal((num_tokens, in_features), dtype, generator)
    arguments = {"x": x, "weight": weight, "bias": bias, "stored_as": layout.name}
    numbers = layout.dequantized(weight, torch.float32)
    bounds = _SCALINGS, _row_norm_bound(x, layout, weight)
    return sampled_case(arguments, dims, x, numbers, *bounds, stored_product=True)


def _row_norm_bound(x: torch.Tensor, layout: BlockFormat, weight: torch.Tensor) -> float:
    """Return a bound of the partial sums of rows from the norms of rows, without a matmul."""
    scale, offset = layout.scales(weight, torch.float32)
    largest = scale.abs() * max(-layout.lowest, layout.highest)
    if offset is not None:
        largest = largest + offset.abs()
    rows = (largest.square() * layout.group_size).sum(-1).sqrt()
    return float(rows.max() * x.float().norm(dim=-1).max()) if x.numel() else 0.0
