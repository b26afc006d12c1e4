"""Cases of the layer norm. T tokens, H hidden size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.norms._norms_cases import norm_weight
from interposer_testing.cases import Axis, CaseSpace, Point, normal, peak

_SHAPES = {
    "one row": (1, 64),
    "many rows": (33, 256),
    "odd width": (5, 127),
    "one element": (1, 1),
    "no rows": (0, 64),
    "three dimensions": (2, 3, 96),
    "wide": (2, 4096),
    "width after a power of two": (3, 1025),
}
_EPS = 1e-5
# Deviation and mean; all but the first are where a kernel divides by eps, or loses digits: equal
# elements, a variance below eps, squares beyond float16, a mean of several deviations.
_ROWS = {
    "": (1.0, 0.5),
    "equal elements": (0.0, 3.0),
    "smaller than eps": (1e-3, 0.0),
    "large": (5e3, 0.0),
    "far mean": (1.0, 6.0),
}
_AFFINE = {"": (True, True), "no bias": (True, False), "no weight": (False, False)}


def _layer_norm(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    deviation, mean = point["rows"]
    weighted, biased = point["affine"]
    x = (mean + normal(point["shape"], torch.float32, generator, deviation)).to(dtype)
    width = x.shape[-1]
    weight = norm_weight(width, dtype, generator) if weighted else None
    bias = normal((width,), dtype, generator) if biased else None
    return _case({"x": x, "weight": weight, "bias": bias, "eps": _EPS}, x, weight, bias)


layer_norm_cases = CaseSpace(
    _layer_norm,
    Axis("shape", _SHAPES),
    Axis("rows", _ROWS),
    Axis("affine", _AFFINE),
    strided={"x": "rows", "weight": "offset", "bias": "offset"},
    special={
        "x": ("infinities", "NaN", "subnormals", "negative zeros"),
        "bias": ("negative zeros", "subnormals"),
    },
    crossed={
        "shape": ("many rows", "odd width", "three dimensions"),
        "rows": ("",),
        "affine": ("", "no weight"),
    },
    alone={"shape": ("no rows",)},
    # One element is its own mean, whatever it is.
    valid=lambda point, _: point.labels["shape"] != "one element" or not point.labels["rows"],
)
"""Rows of several shapes, means and deviations, with and without weight and bias."""


def layer_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of the hidden states; weight and bias unless the dims deny them."""
    generator = torch.Generator().manual_seed(seed)
    width = int(dims["hidden_size"])
    weight = norm_weight(width, dtype, generator) if dims.get("weighted", True) else None
    bias = normal((width,), dtype, generator, 0.1) if dims.get("biased", True) else None
    x = normal_numbers((num_tokens, width), dtype, generator)
    arguments = {"x": x, "weight": weight, "bias": bias, "eps": _EPS}
    return _case(arguments, x, weight, bias, f"{num_tokens} tokens")


def _case(
    arguments: Mapping[str, object],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    label: str = "",
) -> Case:
    """Return the case of ``x``.

    The error of the sum of H elements is H u sum|x|, that of the mean H u mean|x|, which the row's
    deviation divides. The squares are all positive, so that the error of their sum shows as a
    relative one of the result.
    """
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1) + _EPS).rsqrt()
    largest = (wide.abs().mean(-1) + centred.abs().amax(-1)) * scale
    magnitude = peak(largest) * (1.0 if weight is None else peak(weight))
    magnitude += 0.0 if bias is None else peak(bias)
    dims = {
        "hidden_size": x.shape[-1],
        "weighted": weight is not None,
        "biased": bias is not None,
    }
    return Case(label, arguments, dims, reduction=x.shape[-1], magnitude=magnitude)
