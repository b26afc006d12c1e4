"""Cases of joining attention to parts of the keys. T tokens, N heads, E size of a value."""

from __future__ import annotations

import torch

from interposer import Case, Dims
from interposer_testing.cases import Axis, CaseSpace, Point, uniform

_SHAPES = {
    "": (5, 4, 32),
    "one token": (1, 4, 64),
    "one element": (1, 1, 1),
    "odd": (7, 3, 20),
    "size 80": (3, 2, 80),
    "size 128": (33, 4, 128),
    "size 512": (2, 2, 512),
    "no tokens": (0, 4, 32),
}
# Ends of the range of the lse of either side.
_RANGES = {
    "": ((-2.0, 2.0), (-2.0, 2.0)),
    "a outweighs b": ((50.0, 60.0), (-60.0, -50.0)),
    "b outweighs a": ((-60.0, -50.0), (50.0, 60.0)),
    "equal": ((3.0, 3.0), (3.0, 3.0)),
    "beyond the exponential": ((95.0, 100.0), (95.0, 100.0)),
    "below the exponential": ((-120.0, -115.0), (-120.0, -115.0)),
}
# Which of two neighbouring rows have no keys on a side.
_EMPTY = {
    "": ("", ""),
    "a empty": ("every", ""),
    "b empty": ("", "every"),
    "both empty": ("every", "every"),
    "some empty": ("even", "odd"),
    "some empty on both sides": ("even", "even"),
}


def _merge(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    return _case(point["shape"], point["range"], point["empty"], dtype, generator)


merge_attention_states_cases = CaseSpace(
    _merge,
    Axis("shape", _SHAPES),
    Axis("range", _RANGES),
    Axis("empty", _EMPTY),
    strided=dict.fromkeys(("out_a", "lse_a", "out_b", "lse_b"), "outer"),
    crossed={
        "shape": ("", "size 80"),
        "range": ("", "beyond the exponential"),
        "empty": ("", "some empty"),
    },
    alone={"shape": ("no tokens", "one element"), "empty": ("both empty", "a empty", "b empty")},
)
"""Sides of like and unlike weight, out of the range of the exponential, and without keys."""


def merge_attention_states_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Return two sides of like weight."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, int(dims["num_heads"]), int(dims["value_size"]))
    label = f"{num_tokens} tokens"
    return _case(shape, _RANGES[""], ("", ""), dtype, generator, label)


def _case(
    shape: tuple[int, int, int],
    ranges: tuple[tuple[float, float], tuple[float, float]],
    empty: tuple[str, str],
    dtype: torch.dtype,
    generator: torch.Generator,
    label: str = "",
) -> Case:
    arguments = dict[str, torch.Tensor]()
    for side, (low, high), rows in zip("ab", ranges, empty, strict=True):
        out = uniform(shape, dtype, generator)
        lse = uniform(shape[:2], torch.float32, generator, low, high)
        if rows:
            chosen = slice(1 if rows == "odd" else 0, None, 1 if rows == "every" else 2)
            lse[chosen] = -torch.inf
            out[chosen] = 0
        arguments |= {f"out_{side}": out, f"lse_{side}": lse}
    # Outputs are at most 1, and an error of an lse of size M, in single precision, is one of a
    # weight. What is done to each: subtract, exponentiate (a few roundings), add, divide, multiply.
    largest = max(abs(end) for low_high in ranges for end in low_high)
    dims = {"num_heads": shape[1], "value_size": shape[2]}
    return Case(label, arguments, dims, reduction=6, magnitude=1 + largest, rounded=1.0)
