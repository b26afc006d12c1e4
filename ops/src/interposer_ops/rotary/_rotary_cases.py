"""Cases of the rotary embedding, by one position or three, and of the tables of its angles.

Dimensions: T tokens, N heads, K kv heads, D head size, R rotated size.
"""

from __future__ import annotations

from dataclasses import replace

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
_SECTIONS = {  # D, sections
    "of Qwen2-VL": (128, [16, 24, 24]),
    "of Qwen3-VL": (128, [24, 20, 20]),
    "small": (16, [4, 2, 2]),
    "three unlike": (48, [13, 8, 3]),
    "no height": (20, [7, 0, 3]),
    "time alone": (16, [8, 0, 0]),
    "partial": (64, [7, 5, 4]),
    "as many to each": (36, [6, 6, 6]),
}
_ROUNDED_POSITIONS = 4096
_POSITIONS = {
    "first positions": (0, 64),
    "up to 4096": (64, _ROUNDED_POSITIONS),
    "beyond 65536": (65_536, 70_000),
    "up to a million": (500_000, 1 << 20),
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
    # YaRN and LongRoPE scale both tables, so that their squares don't add to 1.
    Axis("factor", {"": 1.0, "scaled tables": 1.4}),
    strided=_STRIDED,
    special={
        "query": ("infinities", "NaN", "subnormals", "negative zeros"),
        "key": ("infinities", "NaN", "subnormals", "negative zeros"),
    },
    crossed={**_CROSSED, "size": ("", "partial", "head size 80"), "factor": ("",)},
    alone=_ALONE,
    # Sizes and heads are no different by a factor.
    valid=lambda point, _: not point.labels["factor"] or not point.labels["heads"],
)
"""Whole and partial rotation of several numbers of heads, also cut out of one projection."""

rotary_embedding_interleaved_cases = rotary_embedding_cases


def rotary_embedding_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return 16 heads and 4 kv heads cut out of one projection; the dims do not count them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, 16 + 4 + 4, int(dims["head_size"]))
    query, key, _ = normal_numbers(shape, dtype, generator).split((16, 4, 4), dim=1)
    half = int(dims["rotary_size"]) // 2
    angles = uniform((num_tokens, half), torch.float32, generator, 0, 100)
    return _rotary_case(query, key, angles, label=f"{num_tokens} tokens")


rotary_embedding_interleaved_sample = rotary_embedding_sample


def _multimodal(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    head_size, sections = point["sections"]
    query, key = _heads(point, head_size, dtype, generator)
    return _multimodal_case(query, key, sections, point["layout of sections"], generator)


multimodal_rotary_embedding_cases = CaseSpace(
    _multimodal,
    Axis("sections", _SECTIONS),
    Axis("tokens", _TOKENS),
    Axis("heads", _HEADS),
    Axis("layout of sections", {"": False, "interleaved": True}),
    strided=_STRIDED,
    special={"query": ("infinities", "NaN", "subnormals"), "key": ("negative zeros",)},
    crossed={**_CROSSED, "sections": ("small", "partial")},
    alone=_ALONE,
    # Interleaved, height and width have every third frequency at most. All of time is one layout.
    valid=lambda point, _: (
        not point["layout of sections"]
        or (point.labels["sections"] != "time alone" and _are_thirds(point["sections"][1]))
    ),
)
"""Sections of models and others, with other angles in each of the three positions."""


def multimodal_rotary_embedding_sample(
    dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int
) -> Case:
    """Return 16 heads and 4 kv heads cut out of one projection, and a bit more time than space."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, 16 + 4 + 4, int(dims["head_size"]))
    query, key, _ = normal(shape, dtype, generator).split((16, 4, 4), dim=1)
    half = int(dims["rotary_size"]) // 2
    space = half // 4 + half // 16
    sections = [half - 2 * space, space, space]
    case = _multimodal_case(query, key, sections, bool(dims["interleaved"]), generator)
    return replace(case, label=f"{num_tokens} tokens")


def _are_thirds(sections: list[int]) -> bool:
    return all(3 * count <= sum(sections) for count in sections[1:])


def _heads(
    point: Point, head_size: int, dtype: torch.dtype, generator: torch.Generator
) -> list[Tensor]:
    """Return query and key."""
    return [normal((point["tokens"], n, head_size), dtype, generator) for n in point["heads"]]


def _rotary_case(
    query: Tensor, key: Tensor, angles: Tensor, factor: float = 1.0, label: str = ""
) -> Case:
    """Return the case of tables of ``angles``, ``[..., R / 2]``."""
    largest = factor * max(peak(query), peak(key))
    return Case(
        label,
        {"query": query, "key": key, "cos": factor * angles.cos(), "sin": factor * angles.sin()},
        {"head_size": query.shape[-1], "rotary_size": 2 * angles.shape[-1]},
        reduction=2,
        magnitude=2 * largest,
        # The two products cancel where the result is small.
        rounded=largest,
    )


def _multimodal_case(
    query: Tensor, key: Tensor, sections: list[int], interleaved: bool, generator: torch.Generator
) -> Case:
    shape = (3, query.shape[0], sum(sections))
    case = _rotary_case(query, key, uniform(shape, torch.float32, generator, 0, 100))
    return replace(
        case,
        arguments={**case.arguments, "sections": sections, "interleaved": interleaved},
        dims={**case.dims, "interleaved": interleaved},
    )


def _tables(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    first, last = point["positions"]
    positions = torch.randint(first, last, (point["tokens"],), generator=generator)
    frequencies = _frequencies(point["size"] // 2, point["theta"])
    is_exact = last > _ROUNDED_POSITIONS
    if is_exact:
        # The product of 20 bits and 4 is a float32. The bound would allow anything otherwise.
        mantissa, exponent = torch.frexp(frequencies)
        frequencies = torch.ldexp((16 * mantissa).round() / 16, exponent)
    return _tables_case(positions, frequencies.to(dtype), point["factor"], is_exact)


rotary_tables_cases = CaseSpace(
    _tables,
    Axis("tokens", _TOKENS),
    Axis("size", {"": 64, "128": 128, "80": 80, "odd half": 6, "smallest": 2}),
    Axis("positions", _POSITIONS),
    Axis("theta", {"": 1e4, "theta of a million": 1e6}),
    Axis("factor", {"": 1.0, "scaled": 1.4, "below one": 0.5}),
    dtypes=(torch.float32,),
    strided={"positions": "offset", "inverse_frequencies": "offset"},
    crossed={"tokens": ("many tokens",), "theta": ("",), "factor": ("", "scaled")},
    alone=_ALONE,
)
"""Positions up to a million; beyond 4096, with frequencies by which angles are exact in float32."""


def rotary_tables_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return positions of a long context."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(_ROUNDED_POSITIONS, (num_tokens,), generator=generator)
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = _frequencies(int(dims["rotary_size"]) // 2, 1e4).to(wide)
    return _tables_case(positions, frequencies, 1.0, False, f"{num_tokens} tokens")


def _frequencies(half: int, theta: float) -> Tensor:
    return theta ** -(torch.arange(half, dtype=torch.float64) / half)


def _tables_case(
    positions: Tensor, frequencies: Tensor, factor: float, is_exact: bool, label: str = ""
) -> Case:
    largest = float(positions.max()) * float(frequencies.max()) if len(positions) else 0.0
    # An angle that is rounded is off by half a unit of its last place, and so are the tables.
    return Case(
        label,
        {"positions": positions, "inverse_frequencies": frequencies, "factor": factor},
        {"rotary_size": 2 * len(frequencies)},
        reduction=1,
        magnitude=factor * (1.0 if is_exact else 1.0 + largest),
    )
