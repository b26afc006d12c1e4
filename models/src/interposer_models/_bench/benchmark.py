"""The rounds of a benchmark: every kind once in each, then once more for the time of the host."""

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
    """The runs of a kind: those that count, and one whose time within the model is known."""

    samples: list[Sample]
    watched: Sample


def measured_runs(
    lm: LanguageModel,
    kinds: Sequence[Kind],
    rounds: int,
    adapter: str | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Runs]:
    """Run every kind in every round; a round more warms up, and one watches the model.

    Args:
        adapter: folder of that of rows with one; layers are as without it for all others.
        progress: told the round and the row that come next.
    Returns: the runs by the name of the kind.
    """
    session = Session(lm)
    found: dict[str, list[Sample]] = {kind.name: [] for kind in kinds}
    for number in range(rounds + 2):
        is_watched = number == rounds + 1
        for kind in kinds:
            progress(f"round {number} of {rounds}: {kind.what}")
            watching = session.watched() if is_watched else nullcontext()
            with prepared(kind, session, adapter), watching:
                found[kind.name].append(kind.run(session))
                session.end()
    return {name: Runs(samples[1:-1], samples[-1]) for name, samples in found.items()}


def judged_rows(
    kinds: Sequence[Kind], runs: Mapping[str, Runs], work: ModelWork, roofs: Roofs
) -> tuple[Row, ...]:
    """Return the rows of what was run."""
    rows: dict[str, Row] = {}
    for kind in kinds:
        beside, own = rows.get(kind.beside or ""), runs[kind.name]
        least = kind.least(work)
        rows[kind.name] = Row.of(kind, own.samples, own.watched, least, roofs, beside)
    return tuple(rows.values())


def roofs_of(lm: LanguageModel, dtype: torch.dtype, tokens: int, read_bytes: int | None) -> Roofs:
    """Return the roofs of a model's device, where its own largest product is a way to multiply.

    Args:
        tokens: rows of that product.
        read_bytes: as ``measured_roofs`` takes it; a product of plain matrices is as small then.
    """
    side = None if read_bytes is None else 256
    products = _largest_product(lm.engine.model, dtype, tokens, lm.placement.device.torch_device)
    return measured_roofs(
        lm.placement, 5, dtype=dtype, read_bytes=read_bytes, side=side, products=products
    )


def _largest_product(
    model: nn.Module, dtype: torch.dtype, tokens: int, device: str
) -> Iterator[Timed]:
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    # Those of experts in one call have handed their weights on.
    held = [layer for layer in layers if layer.kernel is not None]
    if not held:
        return
    layer = max(held, key=lambda each: each.in_features * sum(each.parts.values()))
    outputs = sum(layer.parts.values())
    x = torch.randn(tokens, layer.in_features, device=device).to(dtype)
    name = f"the model's {' + '.join(layer.parts)}"
    yield Timed(name, 2.0 * tokens * layer.in_features * outputs, lambda: layer(x))
