"""Embeddings of a foreign model, and heads that share their table.

Dimensions: V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_models._adapt.adaptation import Adaptation, kernel_name
from interposer_models._adapt.forwards import lookup, one_input, own_forward
from interposer_models._adapt.packed_weight import PackedWeight, Restore
from interposer_models._adapt.projections import (
    fill,
    judge_projection,
    restore_of,
    same_bits,
)
from interposer_ops.layers.embedding import Embedding, PlainEmbedding

Named = tuple[str, nn.Module]

_ROWS_AT_A_TIME = 4096


def bind_table(
    adaptation: Adaptation,
    name: str,
    embeddings: list[Named],
    heads: list[Named],
    holders: list[tuple[nn.Module, str]],
) -> None:
    """Bind modules that share one table: those that look rows up, and heads.

    Args:
        name: of the embedding whose table it is.
        holders: all modules that have the parameter, others included, with its name there.
    """
    verdict = Verdict.accept()
    for _, module in (*embeddings, *heads):
        verdict = adaptation.judge(module)
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            verdict = Verdict.refuse("it renormalises the rows that it looks up")
        if not verdict:
            break
    for place, module in (*embeddings, *heads):
        if not verdict:
            adaptation.leave(module, place, verdict.reason)
    if not verdict:
        return
    first, module = (*embeddings, *heads)[0]

    def bind() -> str | Verdict:
        return _bind(adaptation, name, embeddings, heads, holders)

    if adaptation.attempt(module, first, bind):
        kernels = _kernels_of(adaptation, first)
        for place, shared in embeddings:
            adaptation.hold(shared, place, kernels[0])
        for place, shared in heads:
            adaptation.hold(shared, place, kernels[1])
    else:
        for place, shared in (*embeddings, *heads):
            adaptation.leave(shared, place, adaptation.places[first].reason)


def _kernels_of(adaptation: Adaptation, name: str) -> tuple[str, str]:
    looked_up, _, multiplied = adaptation.places[name].kernel.partition(" ")
    return looked_up, multiplied


def _bind(
    adaptation: Adaptation,
    name: str,
    embeddings: list[Named],
    heads: list[Named],
    holders: list[tuple[nn.Module, str]],
) -> str | Verdict:
    """Return the names of both kernels, separated by a blank."""
    weight: Any = holders[0][0]._parameters[holders[0][1]]
    dtype = weight.dtype
    site = adaptation.site(name, dtype)
    head = adaptation.site(heads[0][0], dtype) if heads else None
    with torch.device("meta"):
        layer = Embedding(site, weight.shape[0], weight.shape[1], head)
    fill(layer, weight=weight.data)
    plain = isinstance(layer.method, PlainEmbedding)
    assert layer.lookup is not None
    find = layer.lookup, layer.constants
    for place, module in embeddings:
        forward = lookup(*find, own_forward(module), weight.shape[0], adaptation.device)
        if plain and not _same_rows(module, forward, weight):
            return Verdict.refuse("its kernel looks other rows up")
        adaptation.bind_forward(module, place, forward)
    for place, module in heads:
        assert layer.product is not None
        kernel, operands = layer.product
        bias = module._parameters.get("bias")
        if bias is not None:
            kernel, operands = _biased(kernel), (bias.data, *operands)
        forward = one_input(kernel, operands, own_forward(module), dtype, adaptation.device)
        if plain:
            verdict = judge_projection(module, forward, weight, weight.data, bias)
            if not verdict:
                return verdict
        adaptation.bind_forward(module, place, forward)
    if layer.product is not None:
        verdict = _give_up(adaptation, layer, holders, weight, name)
        if not verdict:
            return verdict
    if not isinstance(layer.method, PlainEmbedding):
        kind = f"{type(layer.method).__module__.partition('.')[0]}/{type(layer.method).__name__}"
        return f"{kind} {kind}"
    product = layer.method.product
    multiplied = "" if product is None else kernel_name(product.choice)
    return f"{kernel_name(layer.method.lookup.choice)} {multiplied}"


def _give_up(
    adaptation: Adaptation,
    layer: Embedding,
    holders: list[tuple[nn.Module, str]],
    weight: Tensor,
    name: str,
) -> Verdict:
    """Let the packed table be the only one, if it can be given back or was quantized."""
    assert layer.product is not None
    assert layer.lookup is not None
    kernel, constants = layer.lookup, layer.constants

    def rows(ids: Tensor) -> Tensor:
        found = kernel(ids.reshape(-1).long(), *constants)
        return found.view(*ids.shape, found.shape[-1])

    restore: Restore | None = None
    if isinstance(layer.method, PlainEmbedding):
        if restore_of(layer.method.product, layer.product[1]) is None:
            return Verdict.accept()
        # By lookups, which can be checked a part at a time: tables are the largest weights.
        for part in _parts(weight.shape[0]):
            ids = torch.arange(part.start, part.stop, device=weight.device)
            if not same_bits(rows(ids), weight.data[part]):
                return Verdict.refuse("what its kernel packed cannot be given back bit for bit")
        restore = partial(_restore_by_rows, rows)
    adaptation.changes.pack(holders, PackedWeight(weight, restore, f"{name}.weight", rows))
    return Verdict.accept()


def _restore_by_rows(rows: Callable[[Tensor], Tensor], into: Tensor) -> None:
    for part in _parts(into.shape[0]):
        into[part] = rows(torch.arange(part.start, part.stop, device=into.device))


def _parts(num_rows: int) -> Iterator[slice]:
    for first in range(0, num_rows, _ROWS_AT_A_TIME):
        yield slice(first, min(first + _ROWS_AT_A_TIME, num_rows))


def _biased(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``kernel`` with a bias added to what it returns."""

    def product(x: Tensor, bias: Tensor, *operands: Any) -> Tensor:
        return kernel(x, *operands).add_(bias)

    return product


def _same_rows(module: nn.Module, forward: Callable[..., Tensor], weight: Tensor) -> bool:
    num_rows = weight.shape[0]
    ids = torch.tensor([[0, num_rows // 2, num_rows - 1]], device=weight.device)
    with torch.no_grad():
        return torch.equal(forward(ids), own_forward(module)(ids))
