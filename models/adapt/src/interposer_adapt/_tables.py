"""Embeddings of transformers models, and LM heads tied to an embedding's weight.

Dimensions: V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_adapt._adaptation import Adaptation, kernel_name
from interposer_adapt._forwards import class_forward, forward_lookup, forward_one_input
from interposer_adapt._packed_weight import PackedWeight, Restore
from interposer_adapt._projections import check_projection, find_restore, same_bits, set_weights
from interposer_ops.layers.embedding import Embedding, PlainEmbedding

NamedModule = tuple[str, nn.Module]

_ROWS_AT_A_TIME = 4096


def bind_table(
    adaptation: Adaptation,
    name: str,
    embeddings: list[NamedModule],
    heads: list[NamedModule],
    holders: list[tuple[nn.Module, str]],
) -> None:
    """Bind the embeddings and LM heads that share one weight to kernels.

    Args:
        name: the module name of the embedding that owns the weight.
        holders: all modules with the parameter, of any class, with the parameter's name there.
    """
    verdict = Verdict.accept()
    for _, module in (*embeddings, *heads):
        verdict = adaptation.check_module(module)
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            verdict = Verdict.refuse("it renormalises the rows that it looks up")
        if not verdict:
            break
    for module_name, module in (*embeddings, *heads):
        if not verdict:
            adaptation.mark_skipped(module, module_name, verdict.reason)
    if not verdict:
        return
    first_name, module = (*embeddings, *heads)[0]

    def bind() -> str | Verdict:
        return _bind(adaptation, name, embeddings, heads, holders)

    if adaptation.attempt(module, first_name, bind):
        kernels = _kernels_of(adaptation, first_name)
        for module_name, tied_module in embeddings:
            adaptation.mark_bound(tied_module, module_name, kernels[0])
        for module_name, tied_module in heads:
            adaptation.mark_bound(tied_module, module_name, kernels[1])
    else:
        for module_name, tied_module in (*embeddings, *heads):
            adaptation.mark_skipped(tied_module, module_name, adaptation.results[first_name].reason)


def _kernels_of(adaptation: Adaptation, name: str) -> tuple[str, str]:
    # _bind returns both names in one string, as attempt records one kernel.
    lookup_kernel, _, head_kernel = adaptation.results[name].kernel.partition(" ")
    return lookup_kernel, head_kernel


def _bind(
    adaptation: Adaptation,
    name: str,
    embeddings: list[NamedModule],
    heads: list[NamedModule],
    holders: list[tuple[nn.Module, str]],
) -> str | Verdict:
    """Bind the lookup and LM head kernels, and return the names of both, separated by a space."""
    weight: Any = holders[0][0]._parameters[holders[0][1]]
    dtype = weight.dtype
    site = adaptation.site(name, dtype)
    head_site = adaptation.site(heads[0][0], dtype) if heads else None
    with torch.device("meta"):
        layer = Embedding(site, weight.shape[0], weight.shape[1], head_site)
    set_weights(layer, weight=weight.data)
    is_plain = isinstance(layer.method, PlainEmbedding)
    assert layer.lookup is not None
    lookup_call = layer.lookup, layer.constants
    for module_name, module in embeddings:
        forward = forward_lookup(
            *lookup_call, class_forward(module), weight.shape[0], adaptation.device
        )
        if is_plain and not _same_rows(module, forward, weight):
            return Verdict.refuse("its kernel looks up other rows")
        adaptation.bind_forward(module, module_name, forward)
    for module_name, module in heads:
        assert layer.head_call is not None
        kernel, operands = layer.head_call
        bias = module._parameters.get("bias")
        if bias is not None:
            kernel, operands = _with_bias(kernel), (bias.data, *operands)
        forward = forward_one_input(
            kernel, operands, class_forward(module), dtype, adaptation.device
        )
        if is_plain:
            verdict = check_projection(module, forward, weight, weight.data, bias)
            if not verdict:
                return verdict
        adaptation.bind_forward(module, module_name, forward)
    if layer.head_call is not None:
        verdict = _release_table(adaptation, layer, holders, weight, name)
        if not verdict:
            return verdict
    if not isinstance(layer.method, PlainEmbedding):
        method_name = (
            f"{type(layer.method).__module__.partition('.')[0]}/{type(layer.method).__name__}"
        )
        return f"{method_name} {method_name}"
    matmul = layer.method.product
    head_kernel = "" if matmul is None else kernel_name(matmul.choice)
    return f"{kernel_name(layer.method.lookup.choice)} {head_kernel}"


def _release_table(
    adaptation: Adaptation,
    layer: Embedding,
    holders: list[tuple[nn.Module, str]],
    weight: Tensor,
    name: str,
) -> Verdict:
    """Free an embedding's plain weight, if it was quantized or lookups restore it exactly."""
    assert layer.head_call is not None
    assert layer.lookup is not None
    kernel, constants = layer.lookup, layer.constants

    def rows(ids: Tensor) -> Tensor:
        out = kernel(ids.reshape(-1).long(), *constants)
        return out.view(*ids.shape, out.shape[-1])

    restore: Restore | None = None
    if isinstance(layer.method, PlainEmbedding):
        if find_restore(layer.method.product, layer.head_call[1]) is None:
            return Verdict.accept()
        # Restored by lookups in chunks: a table is the largest weight, and a full copy of it would
        # raise the memory peak.
        for part in _parts(weight.shape[0]):
            ids = torch.arange(part.start, part.stop, device=weight.device)
            if not same_bits(rows(ids), weight.data[part]):
                return Verdict.refuse("its kernel cannot restore the packed weight bit for bit")
        restore = partial(_restore_by_rows, rows)
    adaptation.changes.pack(holders, PackedWeight(weight, restore, f"{name}.weight", rows))
    return Verdict.accept()


def _restore_by_rows(rows: Callable[[Tensor], Tensor], into: Tensor) -> None:
    for part in _parts(into.shape[0]):
        into[part] = rows(torch.arange(part.start, part.stop, device=into.device))


def _parts(num_rows: int) -> Iterator[slice]:
    for first in range(0, num_rows, _ROWS_AT_A_TIME):
        yield slice(first, min(first + _ROWS_AT_A_TIME, num_rows))


def _with_bias(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that calls ``kernel`` and adds a bias to the result."""

    def head(x: Tensor, bias: Tensor, *operands: Any) -> Tensor:
        return kernel(x, *operands).add_(bias)

    return head


def _same_rows(module: nn.Module, forward: Callable[..., Tensor], weight: Tensor) -> bool:
    num_rows = weight.shape[0]
    ids = torch.tensor([[0, num_rows // 2, num_rows - 1]], device=weight.device)
    with torch.no_grad():
        return torch.equal(forward(ids), class_forward(module)(ids))
