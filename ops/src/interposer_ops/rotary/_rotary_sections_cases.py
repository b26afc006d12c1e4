"""Cases of the rotary embedding by three positions. T tokens, D head size, R rotated size."""

from __future__ import annotations

from dataclasses import replace

import torch

from interposer import Case, Dims
from interposer_ops.rotary._rotary_cases import HEADS, TOKENS, rotary_case
from interposer_testing.cases import Axis, CaseSpace, Point, normal, uniform

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


def _multimodal(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    (heads, kv_heads), (head_size, sections) = point["heads"], point["sections"]
    tokens = point["tokens"]
    query = normal((tokens, heads, head_size), dtype, generator)
    key = normal((tokens, kv_heads, head_size), dtype, generator)
    return _case(query, key, sections, point["layout of sections"], generator)


multimodal_rotary_embedding_cases = CaseSpace(
    _multimodal,
    Axis("sections", _SECTIONS),
    Axis("tokens", TOKENS),
    Axis("heads", HEADS),
    Axis("layout of sections", {"": False, "interleaved": True}),
    strided={"query": "outer", "key": "outer", "cos": "offset", "sin": "offset"},
    special={"query": ("infinities", "NaN", "subnormals"), "key": ("negative zeros",)},
    crossed={
        "sections": ("small", "partial"),
        "tokens": ("many tokens",),
        "heads": ("", "odd head counts"),
    },
    alone={"tokens": ("no tokens",)},
    # Interleaved, height and width have every third frequency at most. All of time is one layout.
    valid=lambda point, _: (
        not point["layout of sections"]
        or (point.labels["sections"] not in ("time alone",) and _is_third(point["sections"][1]))
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
    sections = [half - 2 * (half // 4 + half // 16), *[half // 4 + half // 16] * 2]
    case = _case(query, key, sections, bool(dims["interleaved"]), generator)
    return replace(case, label=f"{num_tokens} tokens")


def _is_third(sections: list[int]) -> bool:
    return all(3 * count <= sum(sections) for count in sections[1:])


def _case(
    query: torch.Tensor,
    key: torch.Tensor,
    sections: list[int],
    interleaved: bool,
    generator: torch.Generator,
) -> Case:
    shape = (3, query.shape[0], sum(sections))
    case = rotary_case(query, key, uniform(shape, torch.float32, generator, 0, 100))
    return replace(
        case,
        arguments={**case.arguments, "sections": sections, "interleaved": interleaved},
        dims={**case.dims, "interleaved": interleaved},
    )
