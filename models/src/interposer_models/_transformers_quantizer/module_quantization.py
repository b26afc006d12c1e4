"""Quantization of a model's modules, by the same rules as ``load(quantization=...)``.

A module that the scheme excludes keeps its plain weight. Only torch's own classes are replaced:
linear layers, and the embedding table that the head shares.

Dimensions: V vocabulary, H hidden size, I input features, O output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from interposer import Resolver, Site
from interposer.errors import ConfigError
from interposer_models._transformers_quantizer.quantized_modules import (
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedModule,
)
from interposer_ops.layers.embedding import Embedding, LMHead, PlainEmbedding
from interposer_ops.layers.linear import Linear, PlainLinear


def quantize_modules(model: Any, resolver: Resolver) -> list[str]:
    """Replace the modules that the resolver's scheme quantizes, one after the other.

    Args:
        model: of transformers, with its weights in memory.
    Returns: the names of the replaced modules.
    Raises:
        ConfigError: the scheme quantizes none of the model's modules.
        CheckpointError: a weight has values that are not finite.
    """
    names = {id(module): name for name, module in model.named_modules()}
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for key, child in parent.named_children():
            holders.setdefault(id(child), []).append((parent, key))
    head, table = model.get_output_embeddings(), _input_embeddings(model)
    replaced = dict[str, QuantizedModule]()
    tied_head = None
    if isinstance(head, nn.Linear) and table is not None and head.weight is table.weight:
        tied_head = head
        replaced |= _quantize_tied(resolver, head, names[id(head)], table, names[id(table)])
        for name, quantized_module in replaced.items():
            _replace(holders[id(model.get_submodule(name))], quantized_module)
        # Releases the reference to the plain table.
        del table
    for name in [*names.values()]:
        module = model.get_submodule(name)
        # A subclass may use the weight in another way.
        if type(module) is not nn.Linear or module is tied_head:
            continue
        quantized = _quantize_linear(resolver, module, name, is_head=module is head)
        if quantized is not None:
            _replace(holders[id(module)], quantized)  # at once, to free the plain weight
            replaced[name] = quantized
    if not replaced:
        raise ConfigError(
            f"{type(model).__name__} has no torch.nn.Linear that quantization_config quantizes. "
            "Try: from_pretrained without it, or fewer names in 'modules_to_not_convert'"
        )
    return list(replaced)


def _quantize_linear(
    resolver: Resolver, module: nn.Linear, name: str, *, is_head: bool
) -> QuantizedLinear | None:
    site = Site(resolver, name, module.weight.dtype)
    layer: Linear | LMHead
    with torch.device("meta"):
        if is_head and module.bias is None:
            layer = LMHead(site, module.out_features, module.in_features)
        else:
            layer = Linear(site, module.in_features, module.out_features, module.bias is not None)
    if isinstance(layer.method, PlainLinear):
        return None
    _quantize_weights(layer, weight=module.weight, bias=module.bias)
    assert layer.kernel is not None, "finalize sets it"
    return QuantizedLinear(name, module, layer.kernel, *layer.operands)


def _quantize_tied(
    resolver: Resolver, head: nn.Linear, head_name: str, table: nn.Embedding, table_name: str
) -> dict[str, QuantizedModule]:
    """Return the replacements for a head and the tied embedding."""
    dtype = table.weight.dtype
    site, head_site = Site(resolver, table_name, dtype), Site(resolver, head_name, dtype)
    # The tied layer computes a head without a bias only.
    if head.bias is not None:
        return {}
    with torch.device("meta"):
        layer = Embedding(site, table.num_embeddings, table.embedding_dim, head_site)
    if isinstance(layer.method, PlainEmbedding):
        return {}
    _quantize_weights(layer, weight=table.weight)
    lookup, head_call = layer.lookup, layer.product
    assert lookup is not None, "finalize sets it"
    assert head_call is not None, "there is a head"
    return {
        table_name: QuantizedEmbedding(table_name, table, lookup, *layer.constants),
        head_name: QuantizedLinear(head_name, head, head_call[0], *head_call[1]),
    }


def _quantize_weights(layer: Linear | LMHead | Embedding, **plain: Tensor | None) -> None:
    """Replace a layer's meta parameters by plain weights, and quantize the weights."""
    for name, parameter in layer._parameters.items():
        if parameter is None:
            continue
        weight = plain[name]
        assert weight is not None, f"{name} of {layer.prefix}"
        filled = nn.Parameter(weight.detach(), requires_grad=False)
        filled.__dict__.update(vars(parameter))
        layer._parameters[name] = filled
    layer.finalize()


def _input_embeddings(model: Any) -> nn.Embedding | None:
    try:
        embeddings = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    # Subclasses may scale or add: only torch's own class is a plain lookup.
    return embeddings if type(embeddings) is nn.Embedding else None


def _replace(holders: list[tuple[nn.Module, str]], module: nn.Module) -> None:
    """Replace a module in all of its parents; some models share a module."""
    nn.Module.train(module, mode=False)  # as transformers leaves a model that it loads
    for parent, key in holders:
        setattr(parent, key, module)
