"""Test cases of the rotary embedding.

T tokens, N heads, K kv heads, D head size, R rotated size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_testing.cases import Axis, CaseSpace, Point, Strides, normal, peak, uniform

_TOKENS = {"many tokens": 33, "one token": 1, "no tokens": 0}
_HEADS = {"": (4, 2), "one kv head": (8, 1), "odd head counts": (5, 3), "one head": (1, 1)}  # N, K
_SIZES = {  # D, R
    "": (64, 64),
    "head size 80": (80, 80),
    "head size 128": (128, 128),
    "head size 256": (256, 256),
    "smallest": (2, 2),
    "partial": (64, 16),
    "partial of head size 80": (80, 32),
    "partial, odd half": (20, 6),
}
_STRIDED: dict[str, Strides] = {"query": "outer", "key": "outer", "cos": "offset", "sin": "offset"}
_CROSSED = {"tokens": ("many tokens",), "heads": ("", "odd head counts")}
_ALONE = {"tokens": ("no tokens",)}


def _rotary(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    query, key = _heads(point, point["size"][0], dtype, generator)
    shape = (point["tokens"], point["size"][1] // 2)
    angles = uniform(shape, torch.float32, generator, 0, 100)
    return _rotary_case(query, key, angles, point["factor"])


rotary_embedding_cases = CaseSpace(
    _rotary,
    Axis("tokens", _TOKENS),
    Axis("heads", _HEADS),
    Axis("size", _SIZES),
    # YaRN and LongRoPE scale both tables, so that cos^2 + sin^2 is not 1.
    Axis("factor", {"": 1.0, "scaled tables": 1.4}),
    strided=_STRIDED,
    special={
        "query": ("infinities", "NaN", "subnormals", "negative zeros"),
        "key": ("infinities", "NaN", "subnormals", "negative zeros"),
    },
    crossed={**_CROSSED, "size": ("", "partial", "head size 80"), "factor": ("",)},
    alone=_ALONE,
    # The factor does not depend on the number of heads.
    valid=lambda point, _: not point.labels["factor"] or not point.labels["heads"],
)
"""Full and partial rotation of several numbers of heads, also as slices of one projection."""

rotary_embedding_interleaved_cases = rotary_embedding_cases


def rotary_embedding_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make 16 heads and 4 kv heads as slices of one projection; dims do not state head counts."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, 16 + 4 + 4, int(dims["head_size"]))
    query, key, _ = normal_numbers(shape, dtype, generator).split((16, 4, 4), dim=1)
    half = int(dims["rotary_size"]) // 2
    angles = uniform((num_tokens, half), torch.float32, generator, 0, 100)
    return _rotary_case(query, key, angles, label=f"{num_tokens} tokens")


rotary_embedding_interleaved_sample = rotary_embedding_sample


def _heads(
    point: Point, head_size: int, dtype: torch.dtype, generator: torch.Generator
) -> list[Tensor]:
    return [normal((point["tokens"], n, head_size), dtype, generator) for n in point["heads"]]


def _rotary_case(
    query: Tensor, key: Tensor, angles: Tensor, factor: float = 1.0, label: str = ""
) -> Case:
    """Build the rotary case of given ``angles``, ``[..., R / 2]``."""
    largest = factor * max(peak(query), peak(key))
    return Case(
        label,
        {"query": query, "key": key, "cos": factor * angles.cos(), "sin": factor * angles.sin()},
        {"head_size": query.shape[-1], "rotary_size": 2 * angles.shape[-1]},
        reduction=2,
        magnitude=2 * largest,
        # Both terms may cancel: rounding errors may then exceed the result.
        rounded=largest,
    )
