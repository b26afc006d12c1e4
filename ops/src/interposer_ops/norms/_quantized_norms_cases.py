"""Cases of the norms that quantize. T tokens, H hidden size.

A number of 8 bits is compared exactly, so no element may lie where float32 could round it either
way. There are no ties: a reciprocal root is not exact, so that no kernel can be held to one.
"""

from __future__ import annotations

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.norms._norms_cases import norm_weight
from interposer_testing.cases import Axis, CaseSpace, Point, normal

_EPS = 1e-5
_SHAPES = {
    "many rows": (33, 256),
    "one row": (1, 64),
    "odd width": (5, 127),
    "one element": (1, 1),
    "no rows": (0, 64),
    "three dimensions": (2, 3, 96),
    "wide": (2, 4096),
    "width after a power of two": (3, 1025),
}
_FORMATS = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
# Deviation of x, and the quantized size of a normalised 1: a share of the largest number, or so
# many of the smallest normal one.
_VALUES = {
    "": (1.0, 0.2, 0.0),
    "saturating": (1.0, 1.1, 0.0),
    "subnormal": (1.0, 0.0, 0.9),
    "smaller than eps": (1e-3, 0.2, 0.0),
    "large": (5e3, 0.2, 0.0),
    "zeros": (0.0, 0.2, 0.0),
}


def _quantize(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    deviation, share, count = point["values"]
    facts = torch.finfo(point["format"])
    x = normal(point["shape"], dtype, generator, deviation)
    weight = norm_weight(x.shape[-1], dtype, generator)
    scale = torch.tensor([1 / (share * facts.max + count * facts.smallest_normal)])
    return _case(x, weight, scale, point["format"])


rms_norm_quantize_fp8_cases = CaseSpace(
    _quantize,
    Axis("shape", _SHAPES),
    Axis("format", _FORMATS),
    Axis("values", _VALUES),
    strided={"x": "rows", "weight": "offset", "scale": "offset"},
    crossed={
        "shape": ("many rows", "odd width", "three dimensions"),
        "format": ("e4m3",),
        "values": ("",),
    },
    alone={"shape": ("no rows",)},
)
"""Rows of several shapes whose results are spread over, beyond and below each format's range."""


def rms_norm_quantize_fp8_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Return T rows of the hidden states and a scale at which hardly any saturate."""
    generator = torch.Generator().manual_seed(seed)
    width = int(dims["hidden_size"])
    weight = norm_weight(width, dtype, generator)
    x = normal_numbers((num_tokens, width), dtype, generator)
    out_dtype = getattr(torch, str(dims.get("out_dtype", "float8_e4m3fn")))
    scale = torch.tensor([5 / torch.finfo(out_dtype).max])
    return _case(x, weight, scale, out_dtype, f"{num_tokens} tokens")


def _case(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    out_dtype: torch.dtype,
    label: str = "",
) -> Case:
    """Return the case of ``x`` after what might be rounded either way was moved."""
    rows = _cleared(x, weight, scale, out_dtype)
    options = {"eps": _EPS, "out_dtype": out_dtype}
    arguments = {"x": rows, "weight": weight, "scale": scale, **options}
    dims: Dims = {"hidden_size": x.shape[-1], "out_dtype": str(out_dtype).removeprefix("torch.")}
    return Case(label, arguments, dims, reduction=0, magnitude=0.0)


def _cleared(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return ``x`` with those elements moved that float32 could round either way.

    The squares are all positive, so that the error of the result is relative: that of the sum,
    (H - 1) roundings halved by the root, and some eight operations. Twice that is the margin.
    What moves changes the statistic of its row, so the others are looked at again. An element
    moves in one direction only, every second one upwards, so that the statistic stays about the
    same; at the latest they come to an end beyond the format's range or at zero.
    """
    x = x.clone()
    margin = (x.shape[-1] + 16) * torch.finfo(torch.float32).eps / 2
    factor = weight.double() / scale.double()
    step = torch.where(torch.arange(x.shape[-1]) % 2 == 0, 1.02, 1 / 1.02)
    while True:
        wide = x.double()
        y = wide * (wide.square().mean(-1, keepdim=True) + _EPS).rsqrt() * factor
        below, above = (_rounded(y * (1 + side), out_dtype) for side in (-margin, margin))
        unclear = below != above
        if not unclear.any():
            return x
        moved = (wide * step).to(x.dtype)
        moved = torch.where(moved == x, 0.0, moved)  # too small for a step
        x = torch.where(unclear, moved, x)


def _rounded(y: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(out_dtype).max
    return y.clamp(-largest, largest).to(out_dtype).double()
