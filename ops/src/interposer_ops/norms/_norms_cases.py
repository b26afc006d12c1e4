"""Cases of the RMS norms over the hidden states. T tokens, H hidden size."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
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
_EPS = {"": 1e-5, "large eps": 0.25}
_CROSSED = {"shape": ("many rows", "odd width", "three dimensions"), "scale": ("",)}
_ALONE = {"shape": ("no rows",)}


def norm_weight(
    width: int, dtype: torch.dtype, generator: torch.Generator, centre: float = 1.0
) -> torch.Tensor:
    """Return weights ``[width]`` around ``centre``."""
    return (centre + 0.1 * torch.randn(width, generator=generator)).to(dtype)


def rms_peak(rows: torch.Tensor) -> float:
    """Return a bound of what is left of the rows after they were normalised.

    The squares are all positive, so the error of their sum is relative, and shows as one of the
    result: a bound of the result is the magnitude of a case.
    """
    wide = rows.double()
    ratio = wide.abs().amax(-1) / wide.square().mean(-1).sqrt()
    return peak(ratio.nan_to_num())


def _rms_norm(
    point: Point, dtype: torch.dtype, generator: torch.Generator, *, added: float
) -> Case:
    x = normal(point["shape"], dtype, generator, point["scale"])
    weight = norm_weight(x.shape[-1], dtype, generator, 1 - added)
    return _case({"x": x, "weight": weight, "eps": point["eps"]}, x, added)


def _fused_add_rms_norm(
    point: Point, dtype: torch.dtype, generator: torch.Generator, *, added: float
) -> Case:
    x = normal(point["shape"], dtype, generator, point["scale"])
    residual = normal(point["shape"], point["stream"] or dtype, generator, point["scale"])
    weight = norm_weight(x.shape[-1], dtype, generator, 1 - added)
    arguments = {"x": x, "residual": residual, "weight": weight, "eps": point["eps"]}
    return _case(arguments, x.float() + residual.float(), added)


def _space(added: float) -> CaseSpace:
    return CaseSpace(
        partial(_rms_norm, added=added),
        Axis("shape", _SHAPES),
        Axis("scale", _SCALES),
        Axis("eps", _EPS),
        strided={"x": "rows", "weight": "offset"},
        special={"x": ("infinities", "NaN", "subnormals", "negative zeros")},
        crossed=_CROSSED,
        alone=_ALONE,
    )


def _fused_add_space(added: float) -> CaseSpace:
    return CaseSpace(
        partial(_fused_add_rms_norm, added=added),
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


rms_norm_cases = _space(added=0.0)
"""Rows of several shapes and magnitudes: zero, below the root of eps, large."""

gemma_rms_norm_cases = _space(added=1.0)
"""The rows of ``rms_norm`` with weights around zero, to which one is added."""

fused_add_rms_norm_cases = _fused_add_space(added=0.0)
"""The rows of ``rms_norm`` with a residual of the same magnitude, in its dtype or in float32."""

fused_add_gemma_rms_norm_cases = _fused_add_space(added=1.0)
"""The rows of ``fused_add_rms_norm`` with weights around zero, to which one is added."""


def rms_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of the hidden states."""
    return _sample(dtype, dims, num_tokens, seed, added=0.0)


def gemma_rms_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of the hidden states, and weights to which one is added."""
    return _sample(dtype, dims, num_tokens, seed, added=1.0)


def fused_add_rms_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows with a residual stream in float32 or wider, as the layer keeps it."""
    return _fused_add_sample(dtype, dims, num_tokens, seed, added=0.0)


def fused_add_gemma_rms_norm_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Return the sample of ``fused_add_rms_norm`` with weights to which one is added."""
    return _fused_add_sample(dtype, dims, num_tokens, seed, added=1.0)


def _sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int, *, added: float) -> Case:
    x, weight, _ = _sampled(dtype, dims, num_tokens, seed, added)
    return _case({"x": x, "weight": weight, "eps": 1e-5}, x, added, f"{num_tokens} tokens")


def _fused_add_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int, *, added: float
) -> Case:
    x, weight, generator = _sampled(dtype, dims, num_tokens, seed, added)
    wide = torch.promote_types(dtype, torch.float32)
    residual = normal_numbers((num_tokens, x.shape[1]), wide, generator)
    arguments = {"x": x, "residual": residual, "weight": weight, "eps": 1e-5}
    return _case(arguments, x + residual, added, f"{num_tokens} tokens")


def _sampled(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int, added: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    """Return ``x`` ``[T, H]``, the weight and the generator that drew them, the weight first."""
    generator = torch.Generator().manual_seed(seed)
    hidden_size = int(dims["hidden_size"])
    weight = norm_weight(hidden_size, dtype, generator, 1 - added)
    return normal_numbers((num_tokens, hidden_size), dtype, generator), weight, generator


def _case(
    arguments: dict[str, Any], normalised: torch.Tensor, added: float, label: str = ""
) -> Case:
    """Return the case of the rows ``normalised``, by the weight with ``added`` added to it."""
    width = normalised.shape[-1]
    magnitude = rms_peak(normalised) * peak(arguments["weight"].double() + added)
    return Case(label, arguments, {"hidden_size": width}, reduction=width, magnitude=magnitude)
