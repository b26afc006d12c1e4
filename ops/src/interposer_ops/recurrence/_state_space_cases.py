"""Test cases of the state space scan, including lightning attention.

T tokens, N heads, P head size, G groups, S state size, B sequences, R rows of the state pool.
"""

from __future__ import annotations

from typing import Any

import torch

from interposer import Case, Dims
from interposer_ops._case_combinations import few_changes
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.recurrence._batches_cases import (
    BATCHES,
    Batch,
    batch_indices,
    recurrent_peak,
    sampled_batch,
    with_unused_rows,
)
from interposer_testing.cases import Axis, CaseSpace, Point, Strides, peak, uniform

_Sizes = tuple[int, int, int, int]  # N, P, G, S

_SIZES: dict[str, _Sizes] = {
    "": (4, 16, 2, 8),
    "one head": (1, 8, 1, 4),
    "odd": (3, 5, 1, 7),
    "one group": (4, 16, 1, 8),
    "a group for each head": (4, 16, 4, 8),
    "head size 64, state size 128": (2, 64, 1, 128),
    "head size 1": (6, 1, 2, 33),
    "state size 1": (2, 20, 2, 1),
}
# Range of the steps, range of the decays; None for the steps and slopes of lightning attention.
_FORMS: dict[str, tuple[float, float, float, float] | None] = {
    "": (0.01, 1.0, -2.0, -0.1),
    "strong decay": (0.5, 3.0, -16.0, -4.0),
    "hardly any decay": (0.001, 0.1, -0.01, -0.001),
    "lightning attention": None,
}
_AXES = (
    Axis("batch", BATCHES),
    Axis("sizes", _SIZES),
    Axis("form", _FORMS),
    Axis("skip", {"": True, "without a skip": False}),
)
_STRIDED: dict[str, Strides] = {
    **dict.fromkeys(("x", "steps", "b", "c", "states"), "outer"),
    **dict.fromkeys(("decay", "skip", "query_starts", "slots", "num_cached"), "offset"),
}


def _scan(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    skipped = point["skip"]
    return _case(point["batch"], point["sizes"], point["form"], skipped, dtype, generator, "")


state_space_scan_cases = CaseSpace(
    _scan,
    *_AXES,
    strided=_STRIDED,
    varying={"skip": ("absent",)},
    crossed={
        "batch": ("", "chunks after others"),
        "sizes": ("", "odd"),
        "form": ("",),
        "skip": ("",),
    },
    alone={"batch": ("no sequences",)},
    valid=few_changes(
        _AXES,
        {
            "batch": ("decode", "chunks after others", "padding", "long"),
            "sizes": ("odd", "head size 64, state size 128", "a group for each head"),
        },
    ),
)
"""Prefill, chunked prefill and decode; states that kernels must not read are NaN."""


def state_space_scan_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Make a typical step of a Mamba-2 layer."""
    generator, batch = torch.Generator().manual_seed(seed), sampled_batch(num_tokens)
    heads, size = int(dims["num_heads"]), int(dims["head_size"])
    groups, state = int(dims["num_groups"]), int(dims["state_size"])
    sizes, form = (heads, size, groups, state), (0.001, 0.1, -16.0, -1.0)
    return _case(batch, sizes, form, True, dtype, generator, f"{num_tokens} tokens")


def _case(
    batch: Batch,
    sizes: _Sizes,
    form: tuple[float, float, float, float] | None,
    skipped: bool,
    dtype: torch.dtype,
    generator: torch.Generator,
    label: str,
) -> Case:
    heads, size, groups, state = sizes
    tokens, wide = batch.num_tokens, torch.float32
    if form is None:
        decay = -(2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads))
    else:
        decay = uniform((heads,), wide, generator, *form[2:])
    skip = normal_numbers((heads,), wide, generator) if skipped else None
    indices = batch_indices(batch, generator)
    steps = (
        uniform((tokens, heads), wide, generator, *form[:2]) if form else torch.ones(tokens, heads)
    )
    x = normal_numbers((tokens, heads, size), dtype, generator)
    b, c = (
        normal_numbers((tokens, groups, state), dtype, generator, deviation=state**-0.5)
        for _ in range(2)
    )
    numbers = normal_numbers((batch.num_rows, heads, size, state), wide, generator)
    states = with_unused_rows(numbers, batch, indices["slots"])
    arguments = {
        **{"x": x, "steps": steps, "decay": decay, "b": b, "c": c, "skip": skip, "states": states},
        **indices,
    }
    dims: Dims = {
        "num_heads": heads,
        "num_groups": groups,
        "head_size": size,
        "state_size": state,
    }
    reduction = state + 4 * (batch.longest + 2)
    return Case(label, arguments, dims, reduction, _magnitude(batch, arguments))


def _magnitude(batch: Batch, arguments: dict[str, Any]) -> float:
    """Bound the sums of absolute terms in the states and results of ``state_space_scan``."""
    x, steps, states, skip = (arguments[name] for name in ("x", "steps", "states", "skip"))
    grouped = x.shape[1] // arguments["b"].shape[1]
    keys, queries = (
        torch.linalg.vector_norm(arguments[name].float(), dim=-1).repeat_interleave(grouped, 1)
        for name in ("b", "c")
    )  # [T, N]
    rows = torch.linalg.vector_norm(states, dim=-1).nan_to_num().amax(-1)  # [R, N]
    inputs = x.float().abs().amax(-1)  # [T, N]
    decays = torch.exp(steps * arguments["decay"])
    norms = recurrent_peak(batch, decays, steps * inputs * keys, rows, arguments["slots"])
    skip_term = 0.0 if skip is None else peak(skip) * peak(x)
    return 1.001 * (max(peak(norms), peak(norms * queries)) + skip_term)
