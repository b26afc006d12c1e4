"""The choice of modules and methods that quantize a model, as ``load(quantization=...)`` does.

A module keeps its plain weight where the scheme leaves it out, as ``load`` does. The modules are
those of torch's own types: projections, and the table of token embeddings that the head shares.

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
    """Replace what the resolver's scheme quantizes, one module after the other.

    Args:
        model: of transformers, with its weights in memory.
    Returns: the names of the modules that were replaced.
    Raises:
        ConfigError: the scheme takes none of the model's modules.
        CheckpointError: a weight holds what is no finite number.
    """
    names = {id(module): name for name, module in model.named_modules()}
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for key, child in parent.named_children():
            holders.setdefault(id(child), []).append((parent, key))
    head, table = model.get_output_embeddings(), _input_embeddings(model)
    replaced = dict[str, QuantizedModule]()
    shared = None
    if isinstance(head, nn.Linear) and table is not None and head.weight is table.weight:
        shared = head
        replaced |= _tied(resolver, head, names[id(head)], table, names[id(table)])
        for name, both in replaced.items():
            _put(holders[id(model.get_submodule(name))], both)
        del table
    for name in [*names.values()]:
        module = model.get_submodule(name)
        # A subclass may compute something else with its weight.
        if type(module) is not nn.Linear or module is shared:
            continue
        quantized = _linear(resolver, module, name, is_head=module is head)
        if quantized is not None:
            _put(holders[id(module)], quantized)  # at once, so that its plain weight goes
            replaced[name] = quantized
    if not replaced:
        raise ConfigError(
            f"{type(model).__name__} has no torch.nn.Linear that quantization_config quantizes. "
            "Try: from_pretrained without it, or fewer names in 'modules_to_not_convert'"
        )
    return list(replaced)


def _linear(
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
    _fill(layer, weight=module.weight, bias=module.bias)
    assert layer.kernel is not None, "finalize sets it"
    return QuantizedLinear(name, module, layer.kernel, *layer.operands)


def _tied(
    resolver: Resolver, head: nn.Linear, head_name: str, table: nn.Embedding, table_name: str
) -> dict[str, QuantizedModule]:
    """Return what takes the place of a head and of the table that it shares."""
    dtype = table.weight.dtype
    site, head_site = Site(resolver, table_name, dtype), Site(resolver, head_name, dtype)
    if head.bias is not None:
        return {}
    with torch.device("meta"):
        layer = Embedding(site, table.num_embeddings, table.embedding_dim, head_site)
    if isinstance(layer.method, PlainEmbedding):
        return {}
    _fill(layer, weight=table.weight)
    lookup, product = layer.lookup, layer.product
    assert lookup is not None, "finalize sets it"
    assert product is not None, "there is a head"
    return {
        table_name: QuantizedEmbedding(table_name, table, lookup, *layer.constants),
        head_name: QuantizedLinear(head_name, head, product[0], *product[1]),
    }


def _fill(layer: Linear | LMHead | Embedding, **plain: Tensor | None) -> None:
    """Give a layer on the meta device its weights, and let it quantize them."""
    for name, parameter in layer._parameters.items():
        if parameter is None:
            continue
        given = plain[name]
        assert given is not None, f"{name} of {layer.prefix}"
        filled = nn.Parameter(given.detach(), requires_grad=False)
        filled.__dict__.update(vars(parameter))
        layer._parameters[name] = filled
    layer.finalize()


def _input_embeddings(model: Any) -> nn.Embedding | None:
    try:
        found = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    # Subclasses scale or add: only torch's own looks rows up and does nothing else.
    return found if type(found) is nn.Embedding else None


def _put(holders: list[tuple[nn.Module, str]], module: nn.Module) -> None:
    """Put a module wherever the plain one stands; some models share a module."""
    nn.Module.train(module, mode=False)  # as transformers leaves a model that it loads
    for parent, key in holders:
        setattr(parent, key, module)
