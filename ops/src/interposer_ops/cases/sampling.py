"""Cases of the sampling ops. Dimensions: B sequences, V vocabulary.

Tokens are compared exactly, so ``sample_tokens`` gets rows only where rounding cannot change them:
no token stands near the edge of what is kept, and the winner stands clear of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from interposer import Case
from interposer.op import Dims
from interposer.tuning.workload import typical_sequences
from interposer_ops.noise import gumbel_noise
from interposer_ops.truncation import temper, truncation_threshold

__all__ = [
    "apply_penalties_cases",
    "apply_penalties_sample",
    "sample_tokens_cases",
    "sample_tokens_sample",
]

_SHAPES = {
    "one row": (1, 64),
    "many rows": (9, 257),
    "one token": (2, 1),
    "no rows": (0, 64),
    "wide": (2, 32000),
}
_MARGIN = 1e-3  # of scaled logits with noise, which float32 rounds by about 1e-6
_MASS_MARGIN = 1e-5  # of probabilities summed over the vocabulary

# Values of every row; what a setting leaves out is None in its case.
_KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "random": {"temperature": 0.7},
    "truncated": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}
_SETTINGS: dict[str, dict[str, float]] = {
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-k above the vocabulary": {"temperature": 1.0, "top_k": 10**6},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "top-p of zero": {"temperature": 0.9, "top_p": 0.0},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "neutral truncations": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "tiny temperature": {"temperature": 1e-30, "top_p": 0.9},
}

Draw = Callable[[int], torch.Tensor]


def apply_penalties_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield logits of both signs with used and unused tokens, strided rows and zeros."""
    generator = torch.Generator().manual_seed(seed)
    for label, shape in _SHAPES.items():
        yield _penalties_case(label, 4 * torch.randn(shape, generator=generator), dtype, generator)
    strided = torch.randn(3, 192, generator=generator).to(dtype)[:, 32:160]
    yield _penalties_case("strided rows", strided, dtype, generator)
    yield _penalties_case("zeros", torch.zeros(3, 64), dtype, generator)


def sample_tokens_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield every way to sample, several shapes, rows of both kinds, ties, strides and -inf."""
    generator = torch.Generator().manual_seed(seed)

    def normal(vocab_size: int) -> Draw:
        return lambda rows: (4 * torch.randn(rows, vocab_size, generator=generator)).to(dtype)

    def tied(rows: int) -> torch.Tensor:
        return torch.randint(-4, 4, (rows, 64), generator=generator).to(dtype)

    def masked(rows: int) -> torch.Tensor:
        dropped = torch.rand(rows, 64, generator=generator) < 0.9
        dropped[:, 7] = False
        return normal(64)(rows).masked_fill(dropped, float("-inf"))

    def strided(rows: int) -> torch.Tensor:
        return normal(192)(rows)[:, 32:160]

    for label, setting in _SETTINGS.items():
        yield _sampling_case(label, normal(257), 9, setting, generator)
    for kind, setting in _KINDS.items():
        for label, (batch_size, vocab_size) in _SHAPES.items():
            name = f"{label}, {kind}"
            yield _sampling_case(name, normal(vocab_size), batch_size, setting, generator)
        for draw in (tied, masked, strided):
            yield _sampling_case(f"{draw.__name__}, {kind}", draw, 5, setting, generator)
    mixed = _sampling_case("greedy and random rows", normal(257), 6, _KINDS["truncated"], generator)
    mixed.arguments["temperature"][::2] = 0
    yield mixed


def apply_penalties_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return one row of logits for every sequence of a typical step, two of them penalised."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(typical_sequences(num_tokens)), int(dims["vocab_size"]))
    logits = 4 * torch.randn(shape, generator=generator)
    return _penalties_case(f"{num_tokens} tokens", logits, dtype, generator)


def sample_tokens_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return one row of logits for every sequence of a typical step, all of them truncated."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = int(dims["vocab_size"])

    def draw(rows: int) -> torch.Tensor:
        return (4 * torch.randn(rows, vocab_size, generator=generator)).to(dtype)

    # Row by row: many long rows are hardly ever clear all at once.
    rows = [
        _clear_arguments(draw, 1, _KINDS["truncated"], generator)
        for _ in typical_sequences(num_tokens)
    ]
    arguments = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    return Case(f"{num_tokens} tokens", arguments, dims, reduction=vocab_size)


def _penalties_case(
    label: str, logits: torch.Tensor, dtype: torch.dtype, generator: torch.Generator
) -> Case:
    batch_size, vocab_size = logits.shape
    counts = torch.randint(-3, 4, logits.shape, generator=generator).clamp(min=0)
    repetition, presence, frequency = (
        low + (high - low) * torch.rand(batch_size, generator=generator)
        for low, high in ((0.5, 2), (-2, 2), (-2, 2))
    )
    for penalty, neutral in ((repetition, 1), (presence, 0), (frequency, 0)):
        penalty[2:] = neutral  # the first rows have all penalties, the others none
    arguments = {
        "logits": logits.to(dtype),
        "prompt_mask": torch.rand(logits.shape, generator=generator) < 0.3,
        "output_counts": counts.to(torch.int32),
        "repetition": repetition,
        "presence": presence,
        "frequency": frequency,
    }
    largest = float(logits.abs().max()) if logits.numel() else 0.0
    magnitude = 2 * largest + 2 * 3 + 2
    return Case(label, arguments, {"vocab_size": vocab_size}, magnitude=magnitude)


def _sampling_case(
    label: str, draw: Draw, batch_size: int, setting: dict[str, float], generator: torch.Generator
) -> Case:
    arguments = _clear_arguments(draw, batch_size, setting, generator)
    vocab_size = arguments["logits"].shape[1]
    return Case(label, arguments, {"vocab_size": vocab_size}, reduction=vocab_size)


def _clear_arguments(
    draw: Draw, batch_size: int, setting: dict[str, float], generator: torch.Generator
) -> dict[str, Any]:
    while True:
        arguments = _sampling_arguments(draw(batch_size), setting, generator)
        if _is_clear(**arguments):
            return arguments


def _sampling_arguments(
    logits: torch.Tensor, setting: dict[str, float], generator: torch.Generator
) -> dict[str, Any]:
    rows = (logits.shape[0],)
    arguments: dict[str, Any] = {"logits": logits}
    for name in ("temperature", "top_k", "top_p", "min_p"):
        dtype = torch.int64 if name == "top_k" else torch.float32
        arguments[name] = torch.full(rows, setting[name], dtype=dtype) if name in setting else None
    arguments["seeds"] = torch.randint(-(2**63), 2**63 - 1, rows, generator=generator)
    arguments["steps"] = torch.randint(10_000, rows, generator=generator)
    return arguments


def _is_clear(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> bool:
    """Say whether small errors change neither what is kept nor the winner of any row."""
    if temperature is None or logits.numel() == 0:
        return True  # the largest logit is found by comparison alone
    scaled = temper(logits.double(), temperature)
    kept, kept_loosely = (
        scaled >= truncation_threshold(scaled, top_k, _nudged(top_p, p), _nudged(min_p, m)) - slack
        for p, m, slack in ((-_MASS_MARGIN, _MARGIN, 0), (_MASS_MARGIN, -_MARGIN, _MARGIN))
    )
    noise = gumbel_noise(seeds, steps, logits.shape[1], torch.float64)
    best = torch.where(kept, scaled + noise, float("-inf")).topk(min(2, logits.shape[1])).values
    ahead = best[:, 0] - best[:, -1] > _MARGIN
    return torch.equal(kept, kept_loosely) and (logits.shape[1] == 1 or bool(ahead.all()))


def _nudged(bound: torch.Tensor | None, change: float) -> torch.Tensor | None:
    """Return ``bound`` changed where it lies inside (0, 1); 0 and 1 are exact."""
    if bound is None:
        return None
    return torch.where((bound > 0) & (bound < 1), bound + change, bound)
