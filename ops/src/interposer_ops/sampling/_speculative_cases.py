"""Test cases of the verification of draft tokens.

Tokens are compared exactly: no uniform number is near the acceptance threshold, and the score of
each draw's winner exceeds the second one clearly. Elements that kernels must not read are NaN or a
token that does not exist.

B sequences, S maximum draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_ops.sampling._logits_cases import clearly_won, num_rows
from interposer_ops.sampling._noise import gumbel_noise, uniform_noise
from interposer_testing.cases import Axis, CaseSpace, Point

# B, S, V.
_SHAPES = {
    "many rows": (9, 4, 65),
    "one row": (1, 3, 64),
    "one draft": (5, 1, 33),
    "many drafts": (3, 9, 40),
    "one token": (2, 2, 1),
    "wide": (2, 2, 8000),
    "no rows": (0, 2, 16),
}
_NUM_DRAFT = {"": "any", "all drafted": "all", "none drafted": "none"}
_MARGIN = 1e-5  # of probabilities, which float32 rounds by 6e-8
_INVALID_TOKEN = 2**40


def _greedy(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    rows, drafts, vocab_size = point["shape"]
    logits = torch.randint(-40, 40, (rows, drafts + 1, vocab_size), generator=generator) / 8
    if point["logits"] == "tied":
        logits = logits.round().clamp(-1, 1)
    logits = logits.to(dtype)
    best = logits[:, :-1].argmax(-1)
    if point["logits"] == "tied":
        # Some drafts are the last of several equal tokens; greedy decoding takes the first one.
        last = vocab_size - 1 - logits[:, :-1].flip(-1).argmax(-1)
        best = torch.where(torch.rand(best.shape, generator=generator) < 0.3, last, best)
    drafted = _draft_tokens(best, point["quality"], vocab_size, generator)
    num_draft = _counts(point["drafted"], rows, drafts, generator)
    return _greedy_case(drafted, logits, num_draft)


_QUALITY = {"": 0.6, "right drafts": 1.0, "wrong drafts": 0.0}

greedy_verify_cases = CaseSpace(
    _greedy,
    Axis("shape", {**_SHAPES, "wide": (2, 3, 8000)}),
    Axis("drafted", _NUM_DRAFT),
    Axis("quality", _QUALITY),
    Axis("logits", {"": "any", "tied": "tied"}),
    strided={"draft_tokens": "rows", "target_logits": "rows", "num_draft": "offset"},
    crossed={
        "shape": ("many rows", "many drafts"),
        "drafted": ("", "all drafted"),
        "quality": ("", "right drafts"),
        "logits": ("",),
    },
    alone={"shape": ("no rows", "one token")},
    valid=lambda point, _: point["drafted"] != "none" or not point.labels["quality"],
)
"""Drafts that are right, wrong, or right up to a position; ties; rows with fewer than S drafts."""


def _rejection(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    return _clear_case(
        point["shape"], point["drafted"], point["drafts"], point["target"], dtype, generator
    )


rejection_sample_cases = CaseSpace(
    _rejection,
    Axis("shape", _SHAPES),
    Axis("drafted", _NUM_DRAFT),
    Axis(
        "drafts",
        {
            "": "likely",
            "certain drafts": "certain",
            "poor drafts": "poor",
            "drafts from the target": "same",
        },
    ),
    Axis("target", {"": "dense", "truncated": "truncated"}),
    strided={
        "draft_tokens": "rows",
        "draft_probs": "rows",
        "target_probs": "rows",
        **dict.fromkeys(("num_draft", "seeds", "steps"), "offset"),
    },
    crossed={
        "shape": ("many rows",),
        "drafted": ("", "all drafted"),
        "drafts": ("", "certain drafts"),
        "target": ("",),
    },
    alone={"shape": ("no rows", "one token")},
    valid=lambda point, _: point["drafted"] != "none" or point["drafts"] in ("likely", "certain"),
)
"""Drafts from a distribution near the target, far from the target, equal, and certain drafts."""


def greedy_verify_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make rows in which six of ten draft tokens are right."""
    generator = torch.Generator().manual_seed(seed)
    rows, drafts = num_rows(num_tokens), int(dims["num_draft_tokens"])
    vocab_size = int(dims["vocab_size"])
    logits = torch.randn(rows, drafts + 1, vocab_size, generator=generator).to(dtype)
    drafted = _draft_tokens(logits[:, :-1].argmax(-1), 0.6, vocab_size, generator)
    num_draft = torch.full((rows,), drafts)
    return _greedy_case(drafted, logits, num_draft, f"{num_tokens} tokens")


def rejection_sample_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make rows whose draft distribution is near the target distribution."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows(num_tokens), int(dims["num_draft_tokens"]), int(dims["vocab_size"]))
    kind = "certain" if dims["certain_drafts"] else "likely"
    label = f"{num_tokens} tokens"
    return _clear_case(shape, "all", kind, "dense", dtype, generator, label)


def _counts(kind: str, rows: int, drafts: int, generator: torch.Generator) -> Tensor:
    match kind:
        case "all":
            return torch.full((rows,), drafts)
        case "none":
            return torch.zeros(rows, dtype=torch.int64)
    return torch.randint(drafts + 1, (rows,), generator=generator)


def _draft_tokens(
    best: Tensor, quality: float, vocab_size: int, generator: torch.Generator
) -> Tensor:
    """Draw draft tokens: keep each of ``best`` with probability ``quality``, replace the rest."""
    is_right = torch.rand(best.shape, generator=generator) < quality
    return torch.where(is_right, best, (best + 1) % vocab_size)


def _greedy_case(drafted: Tensor, logits: Tensor, num_draft: Tensor, label: str = "") -> Case:
    is_unread = torch.arange(drafted.shape[1]) >= num_draft[:, None]
    arguments = {
        "draft_tokens": drafted.masked_fill(is_unread, _INVALID_TOKEN),
        "target_logits": logits,
        "num_draft": num_draft,
    }
    dims = {"vocab_size": logits.shape[2], "num_draft_tokens": drafted.shape[1]}
    return Case(label, arguments, dims, reduction=0)


def _clear_case(
    shape: tuple[int, int, int], counts: str, kind: str, target_kind: str, dtype: torch.dtype,
    generator: torch.Generator, label: str = "",
) -> Case:  # fmt: skip
    rows, drafts, vocab_size = shape
    num_draft = _counts(counts, rows, drafts, generator)
    draw = partial(_row, (drafts, vocab_size), kind, target_kind, dtype, generator)
    row_arguments = [_clear_row(draw, num_draft[row : row + 1]) for row in range(rows)]
    row_arguments = row_arguments or [draw(num_draft)]
    arguments: dict[str, Any] = {
        name: None if part is None else torch.cat([row[name] for row in row_arguments])
        for name, part in row_arguments[0].items()
    }
    is_unread = torch.arange(drafts) >= num_draft[:, None]
    arguments["draft_tokens"] = arguments["draft_tokens"].masked_fill(is_unread, _INVALID_TOKEN)
    if arguments["draft_probs"] is not None:
        probs = arguments["draft_probs"]
        arguments["draft_probs"] = probs.masked_fill(is_unread[..., None], torch.nan)
    dims = {
        "vocab_size": vocab_size,
        "num_draft_tokens": drafts,
        "certain_drafts": kind == "certain",
    }
    return Case(label, arguments, dims, reduction=0)


def _clear_row(draw: Callable[[Tensor], dict[str, Any]], num_draft: Tensor) -> dict[str, Any]:
    while True:
        row = draw(num_draft)
        if _is_clear(**row):
            return row


def _row(
    shape: tuple[int, int], kind: str, target_kind: str, dtype: torch.dtype,
    generator: torch.Generator, num_draft: Tensor,
) -> dict[str, Any]:  # fmt: skip
    rows = len(num_draft)
    drafts, vocab_size = shape
    logits = 2 * torch.randn(rows, drafts + 1, vocab_size, generator=generator)
    perturbation = 0.3 * torch.randn(rows, drafts, vocab_size, generator=generator)
    match kind:
        case "poor":
            draft_logits = -logits[:, :-1]
        case "same":
            draft_logits = logits[:, :-1]
        case _:
            draft_logits = logits[:, :-1] + perturbation
    if target_kind == "truncated":
        middle = logits.median(-1, keepdim=True).values
        logits = logits.masked_fill(logits < middle, float("-inf"))
    target_probs = logits.softmax(-1).to(dtype)
    if kind == "same":
        draft_probs = target_probs[:, :-1].clone()
    else:
        draft_probs = draft_logits.softmax(-1).to(dtype)
    tokens = torch.zeros(rows, drafts, dtype=torch.int64)
    if rows:
        flat = draft_probs.float().flatten(0, 1)
        tokens = torch.multinomial(flat, 1, generator=generator).view(rows, drafts)
    return {
        "draft_tokens": tokens,
        "draft_probs": None if kind == "certain" else draft_probs,
        "target_probs": target_probs,
        "num_draft": num_draft,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        "steps": torch.randint(10_000, (rows,), generator=generator),
    }


def _is_clear(
    draft_tokens: Tensor, draft_probs: Tensor | None, target_probs: Tensor, num_draft: Tensor,
    seeds: Tensor, steps: Tensor,
) -> bool:  # fmt: skip
    """Return whether each row's acceptances and draw withstand small errors."""
    target = target_probs[0].double()
    num_positions, vocab_size = target.shape
    count = int(num_draft)
    stream = seeds.expand(num_positions), steps + torch.arange(num_positions)
    uniform = uniform_noise(*stream, vocab_size + 1)[:, vocab_size].double()
    noise = gumbel_noise(*stream, vocab_size, torch.float64)
    for position in range(count):
        token = int(draft_tokens[0, position])
        chance = 1.0 if draft_probs is None else float(draft_probs[0, position, token])
        excess = float(uniform[position]) * chance - float(target[position, token])
        if abs(excess) < _MARGIN * max(chance, 1e-3):
            return False
        if excess < 0:
            continue
        residual = target[position].clone()
        if draft_probs is None:
            residual[token] = 0
        else:
            residual = (residual - draft_probs[0, position].double()).clamp(min=0)
        return bool(clearly_won((residual.log() + noise[position])[None]))
    return bool(clearly_won((target[count].log() + noise[count])[None]))
