"""The passes over a model's modules, and the kernel or layer proposed for each module."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

from interposer import Verdict
from interposer_models._adapt.adaptation import Adaptation
from interposer_models._adapt.convolutions import KINDS as CONVOLUTIONS
from interposer_models._adapt.convolutions import bind_convolution
from interposer_models._adapt.experts import bind_experts, looks_like_experts
from interposer_models._adapt.gated_mlp import bind_gated_mlp
from interposer_models._adapt.gated_trace import GatedParts, find_gated
from interposer_models._adapt.input_trace import find_sharing
from interposer_models._adapt.merged import bind_merged
from interposer_models._adapt.norm_candidates import find_norm
from interposer_models._adapt.norms import bind_norm, find_layer_norm
from interposer_models._adapt.packed_weight import PackedWeight
from interposer_models._adapt.projections import bind_projection
from interposer_models._adapt.router_candidates import looks_like_router
from interposer_models._adapt.routers import bind_router
from interposer_models._adapt.tables import NamedModule, bind_table

Holders = dict[int, list[tuple[str, nn.Module, str]]]
"""By the id of a parameter, its holders: module name, module, and the parameter's name there."""


def bind_tables(adaptation: Adaptation) -> None:
    """Bind embeddings, and projections that share an embedding's weight."""
    for holders in _matrices(adaptation.model).values():
        embeddings: list[NamedModule] = [(n, m) for n, m, _ in holders if type(m) is nn.Embedding]
        projections: list[NamedModule] = [(n, m) for n, m, _ in holders if type(m) is nn.Linear]
        other_holders: list[NamedModule] = [
            (n, m) for n, m, _ in holders if type(m) not in (nn.Embedding, nn.Linear)
        ]
        is_tied = bool(projections) and len(holders) > 1
        lookups = [*embeddings, *((n, m) for n, m in other_holders if isinstance(m, nn.Embedding))]
        # Without an embedding, no lookup could restore the packed weight for the other holders.
        if is_tied and not lookups:
            names = ", ".join(name for name, _, _ in holders)
            for name, module in projections:
                adaptation.mark_skipped(module, name, f"its weight is shared by {names}")
        elif embeddings or is_tied:
            holder_parameters = [(module, parameter_name) for _, module, parameter_name in holders]
            bind_table(adaptation, lookups[0][0], embeddings, projections, holder_parameters)
            for name, module in other_holders:
                if any(
                    isinstance(parameter, PackedWeight) for parameter in module._parameters.values()
                ):
                    reason = "its forward reads the weight that a head's kernel packed"
                    adaptation.mark_skipped(module, name, reason)


def bind_composites(adaptation: Adaptation) -> None:
    """Bind modules that one standard layer computes at once: gated MLPs and merged projections."""
    tied_ids = {
        id(module)
        for holders in _matrices(adaptation.model).values()
        if len(holders) > 1
        for _, module, _ in holders
    }
    for name, module in adaptation.model.named_modules():
        if id(module) in adaptation.handled_ids or not module._modules:
            continue
        if any(id(child) in tied_ids for child in module.children()):
            continue
        gated_parts = find_gated(module)
        if gated_parts is not None and _bind_gated(adaptation, module, name, gated_parts):
            continue
        # Larger groups first: a projection can be merged only once.
        for group in sorted(find_sharing(module), key=len, reverse=True):
            _bind_merged(adaptation, module, name, group)


def _bind_gated(adaptation: Adaptation, module: nn.Module, name: str, parts: GatedParts) -> bool:
    results, handled_ids = dict(adaptation.results), set(adaptation.handled_ids)
    if adaptation.attempt(module, name, lambda: bind_gated_mlp(adaptation, module, name, parts)):
        return True
    # The refusal concerns the gated MLP as a whole. Its children are bound one by one later, and
    # record reasons of their own.
    adaptation.results, adaptation.handled_ids = results, handled_ids
    return False


def _bind_merged(
    adaptation: Adaptation, module: nn.Module, name: str, group: tuple[str, ...]
) -> None:
    if any(id(module._modules[label]) in adaptation.handled_ids for label in group):
        return
    results, handled_ids = dict(adaptation.results), set(adaptation.handled_ids)
    if not adaptation.attempt(module, name, lambda: bind_merged(adaptation, module, name, group)):
        adaptation.results, adaptation.handled_ids = results, handled_ids
        return
    # Only the children are bound: the parent gets its previous result back, if it had one.
    adaptation.handled_ids.discard(id(module))
    del adaptation.results[name]
    if name in results:
        adaptation.results[name] = results[name]


def bind_leaves(adaptation: Adaptation, heads: set[int]) -> None:
    """Bind projections, norms, convolutions, experts and routers; skip all other leaves."""
    conv1d_class = _conv1d_class()
    tied_ids = {
        id(module)
        for holders in _matrices(adaptation.model).values()
        if len(holders) > 1
        for _, module, _ in holders
    }
    for name, module in adaptation.model.named_modules():
        if id(module) in adaptation.handled_ids:
            continue
        kind = type(module)
        # A subclass may override forward without changing the result: check_projection compares.
        is_derived = isinstance(module, nn.Linear) and kind.forward is not nn.Linear.forward
        is_derived = is_derived and not module._modules and id(module) not in tied_ids
        if kind is nn.Linear or kind is conv1d_class or is_derived:
            _bind_projection(adaptation, module, name, kind is conv1d_class, id(module) in heads)
        elif kind is nn.LayerNorm:
            _bind_norm(adaptation, module, name)
        elif kind in CONVOLUTIONS:
            _bind_convolution(adaptation, module, name)
        elif looks_like_experts(module):
            _bind_experts(adaptation, module, name)
        elif not module._modules:
            _bind_leaf(adaptation, module, name)


def _bind_projection(
    adaptation: Adaptation, module: nn.Module, name: str, is_transposed: bool, is_head: bool
) -> None:
    def bind() -> str | Verdict:
        return bind_projection(adaptation, module, name, transposed=is_transposed, is_head=is_head)

    adaptation.attempt(module, name, bind)


def _bind_norm(adaptation: Adaptation, module: nn.Module, name: str) -> None:
    assert isinstance(module, nn.LayerNorm)
    norm = find_layer_norm(module)
    if isinstance(norm, Verdict):
        adaptation.mark_skipped(module, name, norm.reason)
        return
    adaptation.attempt(module, name, lambda: bind_norm(adaptation, module, name, norm))


def _bind_experts(adaptation: Adaptation, module: nn.Module, name: str) -> None:
    adaptation.attempt(module, name, lambda: bind_experts(adaptation, module, name))


def _bind_convolution(adaptation: Adaptation, module: nn.Module, name: str) -> None:
    adaptation.attempt(module, name, lambda: bind_convolution(adaptation, module, name))


def _bind_leaf(adaptation: Adaptation, module: nn.Module, name: str) -> None:
    norm = find_norm(module)
    if looks_like_router(module):
        adaptation.attempt(module, name, lambda: bind_router(adaptation, module, name))
    elif norm is not None:
        adaptation.attempt(module, name, lambda: bind_norm(adaptation, module, name, norm))
    elif any(parameter is not None for parameter in module._parameters.values()):
        adaptation.mark_skipped(module, name, "no known op matches its class")


def _matrices(model: nn.Module) -> Holders:
    """Return the modules that hold each matrix, by the id of the parameter, in model order."""
    holders: Holders = {}
    for name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            if parameter is not None and parameter.ndim == 2:
                holders.setdefault(id(parameter), []).append((name, module, parameter_name))
    return holders


def _conv1d_class() -> type[nn.Module] | None:
    """Return transformers' Conv1D, a linear layer with a transposed weight, if imported."""
    module = sys.modules.get("transformers.pytorch_utils")
    conv1d: type[nn.Module] | None = getattr(module, "Conv1D", None)
    return conv1d


def head_ids(model: nn.Module) -> Iterator[int]:
    """Yield the ids of the modules that ``get_output_embeddings`` returns: the LM heads."""
    for _, module in model.named_modules():
        get_head = getattr(module, "get_output_embeddings", None)
        head = get_head() if callable(get_head) else None
        if isinstance(head, nn.Module):
            yield id(head)
