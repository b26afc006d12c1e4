"""Cases of the norms."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from interposer import Case

__all__ = ["fused_add_rms_norm_cases", "rms_norm_cases"]

_SHAPES = {
    "one row": (1, 64),
    "many rows": (33, 256),
    "odd width": (5, 127),
    "one element": (1, 1),
    "no rows": (0, 64),
    "three dimensions": (2, 3, 96),
    "wide": (2, 4096),
}


def rms_norm_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield rows of several shapes, rows of zeros and rows of large values."""
    generator = torch.Generator().manual_seed(seed)
    for label, shape in _SHAPES.items():
        yield _case(label, torch.randn(shape, generator=generator), dtype, generator)
    yield _case("zeros", torch.zeros(3, 64), dtype, generator)
    yield _case("large", torch.randn(3, 64, generator=generator) * 1e4, dtype, generator)
    strided = torch.randn(4, 192, generator=generator)[:, 32:160]
    yield _case("strided rows", strided, dtype, generator)


def fused_add_rms_norm_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield the cases of ``rms_norm`` with a residual."""
    generator = torch.Generator().manual_seed(seed + 1)
    for case in rms_norm_cases(dtype, seed):
        x, weight, eps = case.arguments.values()
        residual = torch.randn(x.shape, generator=generator).to(dtype)
        arguments = {"x": x, "residual": residual, "weight": weight, "eps": eps}
        magnitude = max(case.magnitude, float((x.abs() + residual.abs()).max()) if x.numel() else 1.0)
        yield Case(case.label, arguments, case.dims, case.reduction, magnitude)


def _case(label: str, x: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> Case:
    width = x.shape[-1]
    weight = (1 + 0.1 * torch.randn(width, generator=generator)).to(dtype)
    arguments = {"x": x.to(dtype), "weight": weight, "eps": 1e-5}
    return Case(label, arguments, {"hidden_size": width}, reduction=width, magnitude=1.0)
