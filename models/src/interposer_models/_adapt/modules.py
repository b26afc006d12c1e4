"""The walk over a model's modules, and what is proposed for each."""

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
from interposer_models._adapt.norms import bind_norm, layer_norm_of
from interposer_models._adapt.packed_weight import PackedWeight
from interposer_models._adapt.projections import bind_projection
from interposer_models._adapt.router_candidates import looks_like_router
from interposer_models._adapt.routers import bind_router
from interposer_models._adapt.tables import Named, bind_table

Holders = dict[int, list[tuple[str, nn.Module, str]]]


def bind_tables(adaptation: Adaptation) -> None:
    """Bind embeddings, and projections that share their table."""
    for holders in _matrices(adaptation.model).values():
        embeddings: list[Named] = [(n, m) for n, m, _ in holders if type(m) is nn.Embedding]
        projections: list[Named] = [(n, m) for n, m, _ in holders if type(m) is nn.Linear]
        others: list[Named] = [
            (n, m) for n, m, _ in holders if type(m) not in (nn.Embedding, nn.Linear)
        ]
        tied = bool(projections) and len(holders) > 1
        looks_up = [*embeddings, *((n, m) for n, m in others if isinstance(m, nn.Embedding))]
        if tied and not looks_up:
            names = ", ".join(name for name, _, _ in holders)
            for name, module in projections:
                adaptation.leave(module, name, f"its weight is shared by {names}")
        elif embeddings or tied:
            shared = [(module, held_as) for _, module, held_as in holders]
            bind_table(adaptation, looks_up[0][0], embeddings, projections, shared)
            for name, module in others:
                if any(isinstance(held, PackedWeight) for held in module._parameters.values()):
                    reason = "its own forward reads the table that a head holds packed"
                    adaptation.leave(module, name, reason)


def bind_composites(adaptation: Adaptation) -> None:
    """Bind modules that compute with several children what one layer does at once."""
    shared = {
        id(module)
        for holders in _matrices(adaptation.model).values()
        if len(holders) > 1
        for _, module, _ in holders
    }
    for name, module in adaptation.model.named_modules():
        if id(module) in adaptation.done or not module._modules:
            continue
        if any(id(child) in shared for child in module.children()):
            continue
        parts = find_gated(module)
        if parts is not None and _bind_gated(adaptation, module, name, parts):
            continue
        for group in sorted(find_sharing(module), key=len, reverse=True):
            _bind_merged(adaptation, module, name, group)


def _bind_gated(adaptation: Adaptation, module: nn.Module, name: str, parts: GatedParts) -> bool:
    before = dict(adaptation.places), set(adaptation.done)
    if adaptation.attempt(module, name, lambda: bind_gated_mlp(adaptation, module, name, parts)):
        return True
    # Its children are bound one by one, and say for themselves what they are left for.
    adaptation.places, adaptation.done = before
    return False


def _bind_merged(
    adaptation: Adaptation, module: nn.Module, name: str, group: tuple[str, ...]
) -> None:
    if any(id(module._modules[label]) in adaptation.done for label in group):
        return
    before = dict(adaptation.places), set(adaptation.done)
    if not adaptation.attempt(module, name, lambda: bind_merged(adaptation, module, name, group)):
        adaptation.places, adaptation.done = before
        return
    # The module itself goes on as it was, so that it has no place for this.
    adaptation.done.discard(id(module))
    del adaptation.places[name]
    if name in before[0]:
        adaptation.places[name] = before[0][name]


def bind_leaves(adaptation: Adaptation, heads: set[int]) -> None:
    """Bind projections and norms, and say of everything else with parameters why it is left."""
    transposed = _transposed_kind()
    shared = {
        id(module)
        for holders in _matrices(adaptation.model).values()
        if len(holders) > 1
        for _, module, _ in holders
    }
    for name, module in adaptation.model.named_modules():
        if id(module) in adaptation.done:
            continue
        kind = type(module)
        # A forward of its own may compute the same in other words; the comparison says so.
        derived = isinstance(module, nn.Linear) and kind.forward is not nn.Linear.forward
        derived = derived and not module._modules and id(module) not in shared
        if kind is nn.Linear or kind is transposed or derived:
            _bind_projection(adaptation, module, name, kind is transposed, id(module) in heads)
        elif kind is nn.LayerNorm:
            _bind_norm(adaptation, module, name)
        elif kind in CONVOLUTIONS:
            _bind_convolution(adaptation, module, name)
        elif looks_like_experts(module):
            _bind_experts(adaptation, module, name)
        elif not module._modules:
            _bind_leaf(adaptation, module, name)


def _bind_projection(
    adaptation: Adaptation, module: nn.Module, name: str, transposed: bool, is_head: bool
) -> None:
    def bind() -> str | Verdict:
        return bind_projection(adaptation, module, name, transposed=transposed, is_head=is_head)

    adaptation.attempt(module, name, bind)


def _bind_norm(adaptation: Adaptation, module: nn.Module, name: str) -> None:
    assert isinstance(module, nn.LayerNorm)
    norm = layer_norm_of(module)
    if isinstance(norm, Verdict):
        adaptation.leave(module, name, norm.reason)
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
        adaptation.leave(module, name, "no op is known that computes what its class does")


def _matrices(model: nn.Module) -> Holders:
    """Return the modules of every matrix, by the id of the parameter, in the order of the model."""
    found: Holders = {}
    for name, module in model.named_modules():
        for held_as, parameter in module._parameters.items():
            if parameter is not None and parameter.ndim == 2:
                found.setdefault(id(parameter), []).append((name, module, held_as))
    return found


def _transposed_kind() -> type[nn.Module] | None:
    """Return the class of projections with a transposed weight, if its module is there."""
    module = sys.modules.get("transformers.pytorch_utils")
    kind: type[nn.Module] | None = getattr(module, "Conv1D", None)
    return kind


def head_ids(model: nn.Module) -> Iterator[int]:
    """Yield the ids of the modules that the model names as those which make its logits."""
    for _, module in model.named_modules():
        named = getattr(module, "get_output_embeddings", None)
        head = named() if callable(named) else None
        if isinstance(head, nn.Module):
            yield id(head)
