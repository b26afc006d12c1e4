"""Cases of the tables of rotary angles. T tokens, R rotated size."""

from __future__ import annotations

import torch

from interposer import Case, Dims
from interposer_testing.cases import Axis, CaseSpace, Point

_ROUNDED_POSITIONS = 4096


def _rotary_tables(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    first, last = point["positions"]
    positions = torch.randint(first, last, (point["tokens"],), generator=generator)
    half = point["size"] // 2
    frequencies = _frequencies(half, point["theta"])
    if last > _ROUNDED_POSITIONS:
        # The product of 20 bits and 4 is a float32. The bound would allow anything otherwise.
        frequencies = _with_few_bits(frequencies)
    return _case(positions, frequencies.to(dtype), point["factor"], last > _ROUNDED_POSITIONS)


rotary_tables_cases = CaseSpace(
    _rotary_tables,
    Axis("tokens", {"many tokens": 33, "one token": 1, "no tokens": 0}),
    Axis("size", {"": 64, "128": 128, "80": 80, "odd half": 6, "smallest": 2}),
    Axis(
        "positions",
        {
            "first positions": (0, 64),
            "up to 4096": (64, _ROUNDED_POSITIONS),
            "beyond 65536": (65_536, 70_000),
            "up to a million": (500_000, 1 << 20),
        },
    ),
    Axis("theta", {"": 1e4, "theta of a million": 1e6}),
    Axis("factor", {"": 1.0, "scaled": 1.4, "below one": 0.5}),
    dtypes=(torch.float32,),
    strided={"positions": "offset", "inverse_frequencies": "offset"},
    crossed={"tokens": ("many tokens",), "theta": ("",), "factor": ("", "scaled")},
    alone={"tokens": ("no tokens",)},
)
"""Positions up to a million; beyond 4096, with frequencies by which angles are exact in float32."""


def rotary_tables_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return positions of a long context."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(_ROUNDED_POSITIONS, (num_tokens,), generator=generator)
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = _frequencies(int(dims["rotary_size"]) // 2, 1e4).to(wide)
    case = _case(positions, frequencies, 1.0, exact=False)
    return Case(
        f"{num_tokens} tokens",
        case.arguments,
        dims,
        reduction=case.reduction,
        magnitude=case.magnitude,
    )


def _frequencies(half: int, theta: float) -> torch.Tensor:
    return theta ** -(torch.arange(half, dtype=torch.float64) / half)


def _with_few_bits(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers of 4 significant bits."""
    mantissa, exponent = torch.frexp(numbers)
    return torch.ldexp((16 * mantissa).round() / 16, exponent)


def _case(positions: torch.Tensor, frequencies: torch.Tensor, factor: float, exact: bool) -> Case:
    largest = float(positions.max()) * float(frequencies.max()) if len(positions) else 0.0
    # An angle that is rounded is off by half a unit of its last place, and so are the tables.
    return Case(
        "",
        {"positions": positions, "inverse_frequencies": frequencies, "factor": factor},
        {"rotary_size": 2 * len(frequencies)},
        reduction=1,
        magnitude=factor * (1.0 if exact else 1.0 + largest),
    )
