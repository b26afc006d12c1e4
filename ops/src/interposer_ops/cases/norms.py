"""Cases of the norms. T tokens, N heads, H hidden size."""

from __future__ import annotations

import torch

from interposer import Case
from interposer.cases import Axis, CaseSpace, Point, normal, peak
from interposer.op import Dims
from interposer_ops.cases.numbers import normal_numbers

__all__ = [
    "fused_add_rms_norm_cases",
    "fused_add_rms_norm_sample",
    "rms_norm_cases",
    "rms_norm_sample",
]

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
_EPS = {"": 1e-5, "small eps": 1e-6}
_CROSSED = {"shape": ("many rows", "odd width", "three dimensions"), "scale": ("",)}
_ALONE = {"shape": ("no rows",)}


def _rms_norm(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    x = normal(point["shape"], dtype, generator, point["scale"])
    weight = _weight(x, generator)
    return _case({"x": x, "weight": weight, "eps": point["eps"]}, x, weight)


def _fused_add_rms_norm(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    x = normal(point["shape"], dtype, generator, point["scale"])
    residual = normal(point["shape"], point["stream"] or dtype, generator, point["scale"])
    weight = _weight(x, generator)
    arguments = {"x": x, "residual": residual, "weight": weight, "eps": point["eps"]}
    return _case(arguments, x.float() + residual.float(), weight)


rms_norm_cases = CaseSpace(
    _rms_norm,
    Axis("shape", _SHAPES),
    Axis("scale", _SCALES),
    Axis("eps", _EPS),
    strided={"x": "rows", "weight": "offset"},
    special={"x": ("infinities", "NaN", "subnormals", "negative zeros")},
    crossed=_CROSSED,
    alone=_ALONE,
)
"""Rows of several shapes and magnitudes: zero, below the root of eps, large."""

fused_add_rms_norm_cases = CaseSpace(
    _fused_add_rms_norm,
    Axis("shape", _SHAPES),
    Axis("scale", _SCALES),
    Axis("eps", _EPS),
    Axis("stream", {"": None, "float32 stream": torch.float32}),
    strided={"x": "rows", "residual": "rows", "weight": "offset"},
    special={"x": ("infinities", "NaN", "negative zeros"), "residual": ("subnormals",)},
    crossed=_CROSSED,
    alone=_ALONE,
    valid=lambda point, dtype: point["stream"] != dtype,
)
"""The rows of ``rms_norm`` with a residual of the same magnitude, in its dtype or in float32."""


def rms_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of the hidden states."""
    x, weight, _ = _sampled(dtype, dims, num_tokens, seed)
    return _case({"x": x, "weight": weight, "eps": 1e-5}, x, weight, f"{num_tokens} tokens")


def fused_add_rms_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows with a residual stream in float32 or wider, as the layer keeps it."""
    x, weight, generator = _sampled(dtype, dims, num_tokens, seed)
    wide = torch.promote_types(dtype, torch.float32)
    residual = normal_numbers((num_tokens, x.shape[1]), wide, generator)
    arguments = {"x": x, "residual": residual, "weight": weight, "eps": 1e-5}
    return _case(arguments, x + residual, weight, f"{num_tokens} tokens")


def _sampled(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    """Return ``x`` ``[T, H]``, the weight and the generator that drew them, the weight first."""
    generator = torch.Generator().manual_seed(seed)
    hidden_size = int(dims["hidden_size"])
    weight = (1 + 0.1 * torch.randn(hidden_size, generator=generator)).to(dtype)
    return normal_numbers((num_tokens, hidden_size), dtype, generator), weight, generator


def _weight(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return (1 + 0.1 * torch.randn(x.shape[-1], generator=generator)).to(x.dtype)


def _case(
    arguments: dict[str, object],
    normalised: torch.Tensor,
    weight: torch.Tensor,
    label: str = "",
) -> Case:
    """Return the case of the rows ``normalised``.

    The squares are all positive, so the sum's error is relative, and shows as one of the result:
    the magnitude is a bound of the result.
    """
    width = weight.shape[0]
    rows = normalised.double()
    ratio = rows.abs().amax(-1) / rows.square().mean(-1).sqrt()
    magnitude = peak(ratio.nan_to_num()) * peak(weight)
    return Case(label, arguments, {"hidden_size": width}, reduction=width, magnitude=magnitude)
