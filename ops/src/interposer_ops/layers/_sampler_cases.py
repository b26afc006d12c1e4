"""Test cases of the sampler, derived from the cases of its ops. B sequences, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from interposer import Case, PluggableLayer
from interposer_ops.layers._cases import few_cases
from interposer_ops.layers.sampler import Penalties, SamplingBatch
from interposer_ops.sampling._logits_cases import clearly_won
from interposer_ops.sampling._sampling import apply_penalties, sample_tokens
from interposer_testing.cases import LayerCase, OfLayer

_COLUMNS = tuple(field.name for field in fields(SamplingBatch) if field.name != "penalties")


def sampler_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield every sampling mode without penalties, and penalties with greedy sampling."""
    for case in few_cases(sample_tokens, dtype, seed):
        columns = {name: case.arguments[name] for name in _COLUMNS}
        yield _layer(case.label, case, columns)
    for case in few_cases(apply_penalties, dtype, seed):
        logits, *penalty_arguments = case.arguments.values()
        if not clearly_won(apply_penalties(logits.double(), *penalty_arguments)).all():
            continue  # rounding would decide, so no single token is right
        unread = torch.zeros(len(logits), dtype=torch.int64)
        columns = {**dict.fromkeys(_COLUMNS), "seeds": unread, "steps": unread}
        penalties = {n: value for n, value in case.arguments.items() if n != "logits"}
        yield _layer(f"penalties, {case.label}", case, columns, penalties)


def _layer(
    label: str,
    case: Case,
    columns: Mapping[str, Tensor | None],
    penalties: Mapping[str, Tensor] | None = None,
) -> LayerCase:
    logits = case.arguments["logits"]
    vocab_size = logits.shape[1]
    return LayerCase(
        label,
        {"vocab_size": vocab_size},
        (logits, OfLayer(partial(_batch, columns, penalties))),
        facts=Case("", {}, reduction=vocab_size + 4, magnitude=case.magnitude),
        tolerance=sample_tokens.tolerance,
    )


def _batch(
    columns: Mapping[str, Tensor | None],
    penalties: Mapping[str, Tensor] | None,
    layer: PluggableLayer,
    device: str,
) -> SamplingBatch:
    del layer

    def moved(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
        return {n: None if value is None else value.to(device) for n, value in tensors.items()}

    moved_penalties = None if penalties is None else Penalties(**moved(penalties))
    return SamplingBatch(**moved(columns), penalties=moved_penalties)
