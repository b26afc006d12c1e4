"""Run the rounds of a benchmark: all kinds once per round, a warm-up first and profiling last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from interposer_models._bench.kinds import Kind, prepared
from interposer_models._bench.results import Row
from interposer_models._bench.roofs import Roofs, Timed, measured_roofs
from interposer_models._bench.session import Sample, Session
from interposer_models._bench.work import ModelWork
from interposer_models._language_model import LanguageModel
from interposer_ops.layers.linear import Linear

Progress = Callable[[str], object]


@dataclass(frozen=True)
class Runs:
    """The runs of a kind: the measured ones, and a profiled one with the time within the model."""

    samples: list[Sample]
    profiled: Sample


def measured_runs(
    lm: LanguageModel,
    kinds: Sequence[Kind],
    rounds: int,
    adapter: str | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Runs]:
    """Run every kind once in each round, after one round to warm up and before one to profile.

    Args:
        adapter: folder of the LoRA adapter, which is loaded only for kinds that use one.
        progress: called with the round and the row that come next.
    Returns: the runs by the name of the kind.
    """
    session = Session(lm)
    samples_by_kind: dict[str, list[Sample]] = {kind.name: [] for kind in kinds}
    # Rounds take turns among the kinds, so that a machine that slows down slows all rows.
    for number in range(rounds + 2):
        is_profiled = number == rounds + 1
        for kind in kinds:
            progress(f"round {number} of {rounds}: {kind.what}")
            profiling = session.profiled() if is_profiled else nullcontext()
            with prepared(kind, session, adapter), profiling:
                samples_by_kind[kind.name].append(kind.run(session))
                session.end()
    return {name: Runs(samples[1:-1], samples[-1]) for name, samples in samples_by_kind.items()}


def benchmark_rows(
    kinds: Sequence[Kind], runs: Mapping[str, Runs], work: ModelWork, roofs: Roofs
) -> tuple[Row, ...]:
    """Evaluate the runs of each kind against the roofline."""
    rows: dict[str, Row] = {}
    for kind in kinds:
        baseline = rows.get(kind.beside or "")
        samples, profiled = runs[kind.name].samples, runs[kind.name].profiled
        steps = kind.least_work(work)
        rows[kind.name] = Row.of(kind, samples, profiled, steps, roofs, baseline)
    return tuple(rows.values())


def roofs_of(lm: LanguageModel, dtype: torch.dtype, tokens: int, read_bytes: int | None) -> Roofs:
    """Measure the roofline of a model's device, with the model's largest matmul as one candidate.

    Args:
        tokens: rows of that matmul.
        read_bytes: as in ``measured_roofs``; if given, the plain matmul is kept small as well.
    """
    # A small buffer means a quick run, in tests for example.
    side = None if read_bytes is None else 256
    matmuls = _largest_matmul(lm.engine.model, dtype, tokens, lm.placement.device.torch_device)
    return measured_roofs(
        lm.placement, 5, dtype=dtype, read_bytes=read_bytes, side=side, products=matmuls
    )


def _largest_matmul(
    model: nn.Module, dtype: torch.dtype, tokens: int, device: str
) -> Iterator[Timed]:
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    # Linear layers that were merged into grouped experts have no kernel and no weights.
    callable_layers = [layer for layer in layers if layer.kernel is not None]
    if not callable_layers:
        return
    layer = max(callable_layers, key=lambda layer: layer.in_features * sum(layer.parts.values()))
    outputs = sum(layer.parts.values())
    x = torch.randn(tokens, layer.in_features, device=device).to(dtype)
    name = f"the model's {' + '.join(layer.parts)}"
    yield Timed(name, 2.0 * tokens * layer.in_features * outputs, lambda: layer(x))
