"""Test cases of the penalties and of the ops that sample tokens.

Tokens are compared exactly, so that random rows must be clear: no token is near the truncation
threshold, and the winner's score exceeds the second one clearly.

B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops._case_numbers import dtype_name
from interposer_ops.sampling._logits_cases import (
    LOGIT_SHAPES,
    LOGITS,
    clear_rows,
    clearly_truncated,
    clearly_won,
    num_rows,
    random_logits,
)
from interposer_ops.sampling._noise import gumbel_noise
from interposer_ops.sampling._truncation import temper
from interposer_testing.cases import Axis, CaseSpace, Point, normal, peak, uniform

# Parameters of all rows; a parameter that a setting lacks is None in the case. "mixed" makes every
# second row greedy.
_Setting = Mapping[str, float]
_SETTINGS: dict[str, _Setting] = {
    "greedy": {},
    "random": {"temperature": 0.7},
    "truncated": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-k above the vocabulary": {"temperature": 1.0, "top_k": 10**6},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "top-p of zero": {"temperature": 0.9, "top_p": 0.0},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "neutral truncations": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "tiny temperature": {"temperature": 1e-30, "top_p": 0.9},
    "greedy and random rows": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "mixed": 1.0},
}
_TEMPERATURES: dict[str, _Setting] = {
    "": {"temperature": 0.7},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 5.0},
    "greedy": {"temperature": 0.0},
    "greedy and random rows": {"temperature": 1.3, "mixed": 1.0},
    "tiny temperature": {"temperature": 1e-30},
}
_ALONE = {"shape": ("no rows", "one token")}
_PENALTIES = {
    "": ("repetition", "presence", "frequency"),
    "repetition": ("repetition",),
    "presence": ("presence",),
    "frequency": ("frequency",),
    "no penalties": (),
}
_ROWS = {"repetition": "offset", "presence": "offset", "frequency": "offset"}


def _penalties(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    logits = normal(point["shape"], dtype, generator, point["scale"])
    return _penalties_case(logits, point["penalties"], point["counts"], generator)


apply_penalties_cases = CaseSpace(
    _penalties,
    Axis("shape", {k: v for k, v in LOGIT_SHAPES.items() if k != "a word and one"}),
    Axis("penalties", _PENALTIES),
    Axis("scale", {"": 4.0, "zeros": 0.0, "large": 1e3}),
    Axis("counts", {"": torch.int32, "long counts": torch.int64}),
    strided={"logits": "rows", "prompt_mask": "rows", "output_counts": "rows", **_ROWS},  # type: ignore[dict-item]
    special={"logits": ("infinities", "NaN", "negative zeros")},
    crossed={
        "shape": ("many rows", "odd vocabulary"),
        "penalties": ("",),
        "scale": ("",),
        "counts": ("",),
    },
    alone=_ALONE,
    valid=lambda point, _: point["shape"] != (2, 32000) or not any(list(point.labels.values())[1:]),
)
"""Each penalty alone and all together; logits of both signs, zeros, used and unused tokens."""


def _sampling(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    arguments = _arguments(
        point["logits"], point["shape"], point["setting"], dtype, generator, truncating=True
    )
    vocab_size = point["shape"][1]
    return Case("", arguments, {"vocab_size": vocab_size}, reduction=vocab_size)


sample_tokens_cases = CaseSpace(
    _sampling,
    Axis("shape", LOGIT_SHAPES),
    Axis("setting", _SETTINGS),
    Axis("logits", LOGITS),
    strided={"logits": "rows", "seeds": "offset", "steps": "offset"},
    # Whether a batch has these parameters is known only at run time.
    varying=dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), ("absent",)),
    crossed={
        "shape": ("many rows",),
        "setting": ("greedy", "random", "truncated"),
        "logits": ("",),
    },
    alone={"shape": ("no rows",)},
    valid=lambda point, _: (
        point["shape"] not in ((2, 32000), (2, 1))
        or (not point.labels["logits"] and point.labels["setting"] in ("greedy", "truncated"))
    ),
)
"""Every way to sample, several shapes, greedy and random rows, ties and masked tokens."""


def _gumbel(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    arguments = _arguments(
        point["logits"], point["shape"], point["setting"], dtype, generator, truncating=False
    )
    return Case("", arguments, {"vocab_size": point["shape"][1]}, reduction=0)


gumbel_argmax_cases = CaseSpace(
    _gumbel,
    Axis("shape", LOGIT_SHAPES),
    Axis("setting", _TEMPERATURES),
    Axis("logits", LOGITS),
    strided={"logits": "rows", "temperature": "offset", "seeds": "offset", "steps": "offset"},
    crossed={"shape": ("many rows", "odd vocabulary"), "logits": ("",)},
    alone={"shape": ("no rows", "one token")},
    valid=lambda point, _: point["shape"] != (2, 32000) or not point.labels["logits"],
)
"""Temperatures from 0 to high, ties and masked tokens."""


def apply_penalties_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make one row of logits for every sequence of a typical step; two rows are penalised."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows(num_tokens), int(dims["vocab_size"]))
    logits = normal(shape, dtype, generator, 4.0)
    counts_dtype = getattr(torch, str(dims.get("counts_dtype", "int32")))
    return _penalties_case(
        logits, _PENALTIES[""], counts_dtype, generator, label=f"{num_tokens} tokens"
    )


def sample_tokens_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make one row of logits for every sequence of a typical step; all rows are truncated."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows(num_tokens), int(dims["vocab_size"]))
    setting = _SETTINGS["truncated"]
    arguments = _arguments("random", shape, setting, dtype, generator, truncating=True)
    return Case(f"{num_tokens} tokens", arguments, dims, reduction=shape[1])


def gumbel_argmax_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make one row of logits for every sequence of a typical step; no row is greedy."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows(num_tokens), int(dims["vocab_size"]))
    setting = _TEMPERATURES[""]
    arguments = _arguments("random", shape, setting, dtype, generator, truncating=False)
    return Case(f"{num_tokens} tokens", arguments, dims, reduction=0)


def _penalties_case(
    logits: Tensor,
    names: tuple[str, ...],
    counts_dtype: torch.dtype,
    generator: torch.Generator,
    label: str = "",
) -> Case:
    batch_size, vocab_size = logits.shape
    counts = torch.randint(-3, 4, logits.shape, generator=generator).clamp(min=0)
    penalties: dict[str, Tensor] = {}
    for name, low, neutral in (("repetition", 0.5, 1.0), ("presence", -2, 0), ("frequency", -2, 0)):
        penalties[name] = uniform((batch_size,), torch.float32, generator, low, 2.0)
        # Only the first two rows are penalised; the penalty of other rows is neutral.
        penalties[name][2 if name in names else 0 :] = neutral
    arguments = {
        "logits": logits,
        "prompt_mask": torch.rand(logits.shape, generator=generator) < 0.3,
        "output_counts": counts.to(counts_dtype),
        **penalties,
    }
    magnitude = 2 * peak(logits) + 2 * 3 + 2
    dims: Dims = {"vocab_size": vocab_size, "counts_dtype": dtype_name(counts_dtype)}
    return Case(label, arguments, dims, magnitude=magnitude)


def _arguments(
    kind: str, shape: tuple[int, int], setting: _Setting, dtype: torch.dtype,
    generator: torch.Generator, *, truncating: bool,
) -> dict[str, Any]:  # fmt: skip
    """Draw clear logits and arguments of ``sample_tokens``, or of ``gumbel_argmax`` only."""
    rows, vocab_size = shape
    columns: dict[str, Tensor | None] = {}
    for name in ("temperature", "top_k", "top_p", "min_p"):
        numbers = torch.int64 if name == "top_k" else torch.float32
        columns[name] = (
            torch.full((rows,), setting[name], dtype=numbers) if name in setting else None
        )
    temperature = columns["temperature"]
    if temperature is not None and "mixed" in setting:
        temperature[::2] = 0
    noise_arguments = {
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        "steps": torch.randint(10_000, (rows,), generator=generator),
    }
    # Drawn row by row, since every row has its own temperature and noise.
    logits = torch.empty(shape, dtype=dtype)
    for row in range(rows):
        at = slice(row, row + 1)
        row_parameters = {n: None if c is None else c[at] for n, c in columns.items()}
        gumbel = gumbel_noise(
            noise_arguments["seeds"][at], noise_arguments["steps"][at], vocab_size, _WIDE
        )

        def is_clear(
            logits: Tensor,
            parameters: dict[str, Tensor | None] = row_parameters,
            gumbel: Tensor = gumbel,
        ) -> Tensor:
            temperature = parameters["temperature"]
            if temperature is None or not temperature.all():
                return torch.ones(1, dtype=torch.bool)  # greedy: an exact comparison
            scaled = temper(logits.double(), temperature)
            limits = (parameters["top_k"], parameters["top_p"], parameters["min_p"])
            is_kept, is_clear = clearly_truncated(scaled, *limits)
            return is_clear & clearly_won(torch.where(is_kept, scaled + gumbel, float("-inf")))

        def draw(count: int) -> Tensor:
            return random_logits(kind, (count, vocab_size), dtype, generator)

        logits[at] = clear_rows(draw, is_clear, 1)
    if not truncating:
        columns = {"temperature": temperature}
    return {"logits": logits, **columns, **noise_arguments}


_WIDE = torch.float64
