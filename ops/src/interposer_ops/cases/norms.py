"""Cases of the norms. T tokens, N heads, H hidden size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from interposer import Case
from interposer.op import Dims
from interposer_ops.cases.magnitude import peak
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
}


def rms_norm_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield rows of several shapes and magnitudes: zero, below the root of eps, large."""
    generator = torch.Generator().manual_seed(seed)
    for label, x in _inputs(dtype, generator):
        weight = _weight(x, generator)
        arguments = {"x": x, "weight": weight, "eps": 1e-5}
        yield _case(label, arguments, x, weight)


def fused_add_rms_norm_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield the inputs of ``rms_norm`` with a residual of the same magnitude, in both dtypes."""
    generator = torch.Generator().manual_seed(seed)
    for label, x in _inputs(dtype, generator):
        noise = torch.randn(x.shape, generator=generator)
        wide = noise * x.float().std() if x.numel() > 1 else noise
        weight = _weight(x, generator)
        for name, residual in {label: wide.to(dtype), f"{label}, float32 stream": wide}.items():
            arguments = {"x": x, "residual": residual, "weight": weight, "eps": 1e-5}
            yield _case(name, arguments, x.float() + residual.float(), weight)
            if dtype == torch.float32:
                break  # the two are one


def rms_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of the hidden states."""
    x, weight, _ = _sampled(dtype, dims, num_tokens, seed)
    return _case(f"{num_tokens} tokens", {"x": x, "weight": weight, "eps": 1e-5}, x, weight)


def fused_add_rms_norm_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows with a residual stream in float32 or wider, as the layer keeps it."""
    x, weight, generator = _sampled(dtype, dims, num_tokens, seed)
    wide = torch.promote_types(dtype, torch.float32)
    residual = normal_numbers((num_tokens, x.shape[1]), wide, generator)
    arguments = {"x": x, "residual": residual, "weight": weight, "eps": 1e-5}
    return _case(f"{num_tokens} tokens", arguments, x + residual, weight)


def _sampled(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    """Return ``x`` ``[T, H]``, the weight and the generator that drew them, the weight first."""
    generator = torch.Generator().manual_seed(seed)
    hidden_size = int(dims["hidden_size"])
    weight = (1 + 0.1 * torch.randn(hidden_size, generator=generator)).to(dtype)
    return normal_numbers((num_tokens, hidden_size), dtype, generator), weight, generator


def _inputs(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for label, shape in _SHAPES.items():
        yield label, rows(*shape).to(dtype)
    yield "zeros", torch.zeros(3, 64, dtype=dtype)
    # The square of 1e-3 is a tenth of eps.
    yield "smaller than eps", (1e-3 * rows(3, 64)).to(dtype)
    # The squares are beyond the range of float16.
    yield "large", (5e3 * rows(3, 64)).to(dtype)
    # Cut after the conversion, which would copy them into dense rows.
    yield "strided rows", rows(4, 192).to(dtype)[:, 32:160]
    yield "strided heads", rows(3, 6, 64).to(dtype)[:, :4]  # [T, N, H]


def _weight(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return (1 + 0.1 * torch.randn(x.shape[-1], generator=generator)).to(x.dtype)


def _case(
    label: str, arguments: dict[str, object], normalised: torch.Tensor, weight: torch.Tensor
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
