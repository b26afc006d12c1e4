"""The op: its definition, cases and sampler. T tokens, S size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from interposer import Case, Tolerance, custom_op


def _case(label: str, dtype: torch.dtype, num_tokens: int, size: int, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, size, generator=generator).to(dtype)
    offset = torch.randn(size, generator=generator).to(dtype)
    magnitude = float(x.abs().amax() if x.numel() else 0.0) + float(offset.abs().amax())
    arguments = {"x": x, "offset": offset, "places": 3}
    return Case(label, arguments, {"size": size}, reduction=1, magnitude=magnitude)


def cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield no rows, one row and many."""
    for label, num_tokens, size in (("none", 0, 8), ("one", 1, 8), ("many", 17, 16)):
        yield _case(label, dtype, num_tokens, size, seed)


def sample(
    dtype: torch.dtype,
    dims: Mapping[str, int | float | str | bool],
    num_tokens: int,
    seed: int,
) -> Case:
    """Return what a layer of these dimensions passes."""
    return _case("sample", dtype, num_tokens, int(dims["size"]), seed)


@custom_op(
    "acme_shift",
    cases=cases,
    constants=("offset",),
    tolerance=Tolerance(roundings=2),
    sample=sample,
)
def acme_shift(x: torch.Tensor, offset: torch.Tensor, places: int) -> torch.Tensor:
    """Rotate each row by ``places`` and add ``offset``.

    y[t, i] = x[t, (i - places) mod S] + offset[i]

    Args:
        x: ``[T, S]``, any float dtype.
        offset: ``[S]``, dtype of ``x``.
    Returns: ``[T, S]``, dtype of ``x``.
    """
    size = x.shape[-1]
    index = (torch.arange(size, device=x.device) - places) % size
    return x[:, index] + offset
