"""Test cases of the norms over the hidden states. T tokens, H hidden size.

Quantized results are compared exactly. So no element lies close to a rounding boundary, where
float32 errors would decide the result. No element lies on a tie either: a reciprocal root is not
exact, and kernels need not round ties correctly here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import dtype_name, normal_numbers
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
# The square of 1e-3 is a tenth of the larger eps; the squares of 5e3 are beyond float16.
_SCALES = {"": 1.0, "zeros": 0.0, "smaller than eps": 1e-3, "large": 5e3}
_EPS = 1e-5
# Deviation and mean. All but the first make a kernel divide by about eps or lose digits: equal
# elements, a variance below eps, squares beyond float16, a mean of several deviations.
_DEVIATIONS = {
    "": (1.0, 0.5),
    "equal elements": (0.0, 3.0),
    "smaller than eps": (1e-3, 0.0),
    "large": (5e3, 0.0),
    "far mean": (1.0, 6.0),
}
_AFFINE = {"": (True, True), "no bias": (True, False), "no weight": (False, False)}
_CROSSED = {"shape": ("many rows", "odd width", "three dimensions")}
_ALONE = {"shape": ("no rows",)}
_FORMATS = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
# Deviation of x, and the quantized value of a normalised 1: a fraction of the format's largest
# number plus a multiple of the format's smallest normal number.
_VALUES = {
    "": (1.0, 0.2, 0.0),
    "saturating": (1.0, 1.1, 0.0),
    "subnormal": (1.0, 0.0, 0.9),
    "smaller than eps": (1e-3, 0.2, 0.0),
    "large": (5e3, 0.2, 0.0),
    "zeros": (0.0, 0.2, 0.0),
}


def norm_weight(
    width: int, dtype: torch.dtype, generator: torch.Generator, centre: float = 1.0
) -> Tensor:
    """Draw weights ``[width]`` around ``centre``."""
    return (centre + 0.1 * torch.randn(width, generator=generator)).to(dtype)


def rms_peak(rows: Tensor) -> float:
    """Return the largest magnitude of the normalised rows.

    All squares are positive, so the error of the sum is a relative error of the result, and the
    largest result is the magnitude of a case.
    """
    wide = rows.double()
    ratio = wide.abs().amax(-1) / wide.square().mean(-1).sqrt()
    return peak(ratio.nan_to_num())


def _rms_norm(
    point: Point, dtype: torch.dtype, generator: torch.Generator, *, added: float, fused: bool
) -> Case:
    x = normal(point["shape"], dtype, generator, point["scale"])
    residual = None
    if fused:
        residual = normal(point["shape"], point["stream"] or dtype, generator, point["scale"])
    weight = norm_weight(x.shape[-1], dtype, generator, 1 - added)
    return _rms_case(x, residual, weight, point["eps"], added)


def _sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int, *, added: float = 0.0,
    fused: bool = False,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    width = int(dims["hidden_size"])
    weight = norm_weight(width, dtype, generator, 1 - added)
    x, residual = normal_numbers((num_tokens, width), dtype, generator), None
    if fused:
        wide = dtype_name(torch.promote_types(dtype, torch.float32))
        stream = getattr(torch, str(dims.get("residual_dtype", wide)))
        residual = normal_numbers((num_tokens, width), stream, generator)
    return _rms_case(x, residual, weight, _EPS, added, f"{num_tokens} tokens")


def _rms_case(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, added: float, label: str = ""
) -> Case:
    """Build the case of an RMS norm of ``x``, or of ``x + residual``, with ``weight + added``."""
    arguments = {"x": x} if residual is None else {"x": x, "residual": residual}
    normalised = x if residual is None else x.float() + residual.float()
    magnitude = rms_peak(normalised) * peak(weight.double() + added)
    width = x.shape[-1]
    dims: Dims = {"hidden_size": width}
    if residual is not None:
        dims = {**dims, "residual_dtype": dtype_name(residual.dtype)}
    arguments |= {"weight": weight}
    return Case(label, {**arguments, "eps": eps}, dims, reduction=width, magnitude=magnitude)


def _space(added: float = 0.0, fused: bool = False) -> CaseSpace:
    stream = Axis("stream", {"": None, "float32 stream": torch.float32})
    x: tuple[Any, ...] = ("infinities", "NaN", "subnormals", "negative zeros")
    return CaseSpace(
        partial(_rms_norm, added=added, fused=fused),
        Axis("shape", _SHAPES),
        Axis("scale", _SCALES),
        Axis("eps", {"": _EPS, "large eps": 0.25}),
        *([stream] if fused else []),
        strided={"x": "leading", **({"residual": "leading"} if fused else {}), "weight": "offset"},
        special={"x": x} if not fused else {"x": (*x[:2], x[3]), "residual": (x[2],)},
        crossed={**_CROSSED, "scale": ("",)},
        alone=_ALONE,
        valid=lambda point, dtype: point.values.get("stream") != dtype,
    )


rms_norm_cases = _space()
"""Rows of several shapes and magnitudes: zero, below the root of eps, large."""

gemma_rms_norm_cases = _space(added=1.0)
"""The rows of ``rms_norm`` with weights around zero, to which one is added."""

fused_add_rms_norm_cases = _space(fused=True)
"""The rows of ``rms_norm`` with a residual of the same magnitude, in its dtype or in float32."""

fused_add_gemma_rms_norm_cases = _space(added=1.0, fused=True)
"""The rows of ``fused_add_rms_norm`` with weights around zero, to which one is added."""

rms_norm_sample = _sample
"""T rows of the hidden states."""

gemma_rms_norm_sample = partial(_sample, added=1.0)
"""T rows of the hidden states, and weights to which one is added."""

fused_add_rms_norm_sample = partial(_sample, fused=True)
"""T rows with a residual stream in the dims' ``residual_dtype``; by default float32 or wider."""

fused_add_gemma_rms_norm_sample = partial(_sample, added=1.0, fused=True)
"""The sample of ``fused_add_rms_norm`` with weights to which one is added."""


def _layer_norm(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    deviation, mean = point["rows"]
    weighted, biased = point["affine"]
    x = (mean + normal(point["shape"], torch.float32, generator, deviation)).to(dtype)
    weight = norm_weight(x.shape[-1], dtype, generator) if weighted else None
    bias = normal((x.shape[-1],), dtype, generator) if biased else None
    return _layer_case(x, weight, bias)


layer_norm_cases = CaseSpace(
    _layer_norm,
    Axis("shape", _SHAPES),
    Axis("rows", _DEVIATIONS),
    Axis("affine", _AFFINE),
    strided={"x": "leading", "weight": "offset", "bias": "offset"},
    special={
        "x": ("infinities", "NaN", "subnormals", "negative zeros"),
        "bias": ("negative zeros", "subnormals"),
    },
    crossed={**_CROSSED, "rows": ("",), "affine": ("", "no weight")},
    alone=_ALONE,
    # A row of one element equals its mean: the magnitude has no effect.
    valid=lambda point, _: point.labels["shape"] != "one element" or not point.labels["rows"],
)
"""Rows of several shapes, means and deviations, with and without weight and bias."""


def layer_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make T rows of the hidden states, with weight and bias unless the dims exclude them."""
    generator = torch.Generator().manual_seed(seed)
    width = int(dims["hidden_size"])
    weight = norm_weight(width, dtype, generator) if dims.get("weighted", True) else None
    bias = normal((width,), dtype, generator, 0.1) if dims.get("biased", True) else None
    x = normal_numbers((num_tokens, width), dtype, generator)
    return _layer_case(x, weight, bias, f"{num_tokens} tokens")


def _layer_case(x: Tensor, weight: Tensor | None, bias: Tensor | None, label: str = "") -> Case:
    """Build the test case of ``layer_norm`` for the input ``x``.

    With unit roundoff u, the error of the sum of H elements is H u sum|x|, and the error of the
    mean is H u mean|x|, divided by the row's deviation. All squares are positive, so that the error
    of their sum is a relative error of the result.
    """
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1) + _EPS).rsqrt()
    largest = (wide.abs().mean(-1) + centred.abs().amax(-1)) * scale
    magnitude = peak(largest) * (1.0 if weight is None else peak(weight))
    magnitude += 0.0 if bias is None else peak(bias)
    width = x.shape[-1]
    dims = {"hidden_size": width, "weighted": weight is not None, "biased": bias is not None}
    arguments = {"x": x, "weight": weight, "bias": bias, "eps": _EPS}
    return Case(label, arguments, dims, reduction=width, magnitude=magnitude)


def _quantize(
    point: Point, dtype: torch.dtype, generator: torch.Generator, *, fused: bool = False
) -> Case:
    deviation, max_factor, normal_factor = point["values"]
    facts = torch.finfo(point["format"])
    x = normal(point["shape"], dtype, generator, deviation)
    weight = norm_weight(x.shape[-1], dtype, generator)
    scale = torch.tensor([1 / (max_factor * facts.max + normal_factor * facts.smallest_normal)])
    stream = normal(point["shape"], torch.float32, generator, deviation) if fused else None
    return _quantized_case(x, stream, weight, scale, point["format"])


def _quantizing_space(fused: bool = False) -> CaseSpace:
    return CaseSpace(
        partial(_quantize, fused=fused),
        Axis("shape", {"many rows": _SHAPES["many rows"], **_SHAPES}),
        Axis("format", _FORMATS),
        Axis("values", _VALUES),
        strided={
            "x": "leading",
            **({"residual": "leading"} if fused else {}),
            "weight": "offset",
            "scale": "offset",
        },
        crossed={**_CROSSED, "format": ("e4m3",), "values": ("",)},
        alone=_ALONE,
    )


rms_norm_quantize_fp8_cases = _quantizing_space()
"""Rows of several shapes with results within, above and below each format's normal range."""

fused_add_rms_norm_quantize_fp8_cases = _quantizing_space(fused=True)
"""The rows of ``rms_norm_quantize_fp8`` plus a float32 residual; the sums are exact."""


def _quantizing_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int, *, fused: bool = False
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    width = int(dims["hidden_size"])
    weight = norm_weight(width, dtype, generator)
    x = normal_numbers((num_tokens, width), dtype, generator)
    out_dtype = getattr(torch, str(dims.get("out_dtype", "float8_e4m3fn")))
    scale = torch.tensor([5 / torch.finfo(out_dtype).max])
    wide = torch.promote_types(dtype, torch.float32)
    stream = normal_numbers((num_tokens, width), wide, generator) if fused else None
    return _quantized_case(x, stream, weight, scale, out_dtype, f"{num_tokens} tokens")


rms_norm_quantize_fp8_sample = _quantizing_sample
"""T rows of the hidden states and a scale at which hardly any element saturates."""

fused_add_rms_norm_quantize_fp8_sample = partial(_quantizing_sample, fused=True)
"""The same with a residual stream of float32 or wider."""


def _quantized_case(
    x: Tensor,
    stream: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype,
    label: str = "",
) -> Case:
    """Build the case of a norm that quantizes; no element is near a rounding boundary.

    Both terms of a sum are integer multiples of one power of two, so that float32 sums are exact.
    """
    dims: Dims = {"hidden_size": x.shape[-1], "out_dtype": dtype_name(out_dtype)}
    terms = {"x": x}
    if stream is None:
        terms["x"] = _cleared(x, weight, scale, out_dtype, lambda rows: rows.to(x.dtype))
    else:
        unit = 2.0 ** (math.frexp(peak(x) + peak(stream) + 1e-9)[1] - 14)
        x_multiples = (x.double() / unit).round() * unit
        total = _cleared(
            x_multiples + stream,
            weight,
            scale,
            out_dtype,
            lambda rows: (rows / unit).round() * unit,
        )
        terms = {"x": x_multiples.to(x.dtype), "residual": (total - x_multiples).to(stream.dtype)}
        dims = {**dims, "residual_dtype": dtype_name(stream.dtype)}
    options = {"weight": weight, "scale": scale, "eps": _EPS, "out_dtype": out_dtype}
    return Case(label, {**terms, **options}, dims, reduction=0, magnitude=0.0)


def _cleared(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype,
    as_stored: Callable[[Tensor], Tensor],
) -> Tensor:
    """Move elements of ``x`` until no quantized result is near a rounding boundary.

    All squares are positive, so that the error of the result is relative: the error of the sum,
    (H - 1) roundings halved by the root, and some eight operations. The margin is twice that. A
    moved element changes the mean square of the row: check all elements again. Elements move in one
    direction only, every second one upwards, so that the mean square stays about the same. The loop
    ends because elements leave the format's range or reach zero.

    Args:
        as_stored: rounds float64 numbers to numbers that the arguments' dtypes hold.
    """
    x = as_stored(x.double())
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
        moved = as_stored(wide * step)
        moved = torch.where(moved == x, 0.0, moved)  # too small for a step
        x = torch.where(unclear, moved, x)


def _rounded(y: Tensor, out_dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(out_dtype).max
    return y.clamp(-largest, largest).to(out_dtype).double()
