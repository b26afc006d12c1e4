"""The table of embeddings and the head of vLLM, on chosen kernels; tied ones share one form.

Dimensions: T tokens, V vocabulary of this worker with its padding, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from interposer import BoundKernel
from interposer.errors import InterposerError
from interposer_ops.embedding import embedding
from interposer_ops.linear import linear
from interposer_vllm._adoption import Product, emptied
from interposer_vllm._graph_ops import PlacedKernel
from interposer_vllm._methods import AdoptedLinear, adopt_product, keep, with_method
from interposer_vllm._session import session

__all__ = ["adopt_head", "adopt_table"]


def adopt_table(layer: Any) -> None:
    """Let a table of vLLM be looked up by a chosen kernel, if a head shares it.

    One that is alone stays vLLM's own: a lookup of stored rows has nothing to gain.
    """
    if _is_plain(layer):
        with_method(layer, _AdoptedTable, lookup=PlacedKernel(), is_tied=False)
    else:
        keep(layer.prefix, f"{type(layer.quant_method).__name__} of vLLM stores it")


def adopt_head(layer: Any) -> None:
    """Let a head of vLLM use what is chosen here for the product.

    One that the checkpoint stores quantized is a linear layer like any other.

    Raises: NoCandidateError, UnknownNameError: the user pinned or required what cannot be had.
    """
    if _is_plain(layer):
        with_method(layer, _AdoptedHead, product=PlacedKernel(), table=())
        return
    parts = {layer.prefix.rpartition(".")[2]: layer.num_embeddings_per_partition}
    # Whoever computes logits hands over the bias, which is not always that of the head.
    product = Product(parts, layer.embedding_dim, biased=False)
    adopt_product(layer, lambda: product, _QuantizedHead)


def _is_plain(layer: Any) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    return type(layer.quant_method) is UnquantizedEmbeddingMethod


class _QuantizedHead(AdoptedLinear):
    """Part of a method that multiplies by a head whose weight is quantized."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weight as that of any linear layer."""
        scale, rows = layer._parameters.get("weight_scale"), layer.num_embeddings_per_partition
        if scale is not None and scale.ndim == 2 and len(scale) == rows:
            # vLLM pads the vocabulary with rows of zeros, whose logits it cuts off again. A scale
            # of zero would be taken for a broken checkpoint.
            indices = layer.shard_indices
            scale.data[indices.org_vocab_end_index - indices.org_vocab_start_index :] = 1
        super().process_weights_after_loading(layer)


class _AdoptedTable:
    """Part of a method that looks rows up by ``lookup``, once a head has bound it."""

    lookup: PlacedKernel
    is_tied: bool
    own: Any
    supports_pre_processed_weights = False

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing where a head shares the table: that binds both."""
        if not self.is_tied:
            self.own.process_weights_after_loading(layer)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Return the rows ``[T, H]`` of ``input_`` ``[T]``."""
        if self.lookup.kernel is None:
            rows: Tensor = self.own.embedding(layer, input_)
            return rows
        return self.lookup.look_up(input_, layer.embedding_dim, layer.params_dtype)


class _AdoptedHead:
    """Part of a method that multiplies by ``product``, with the table that it shares if any."""

    product: PlacedKernel
    table: tuple[Any, ...]
    own: Any
    supports_pre_processed_weights = False

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Share the table of ``embed_tokens``."""
        if isinstance(getattr(embed_tokens, "quant_method", None), _AdoptedTable):
            # In a tuple, so that nothing takes it for a part of the head.
            self.table = (embed_tokens,)
            embed_tokens.quant_method.is_tied = True
        return self.own.tie_weights(layer, embed_tokens)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weight, once for both where it is shared."""
        try:
            bind_tied(layer, self.table[0]) if self.table else bind_alone(layer)
        except InterposerError as error:
            keep(layer.prefix, error)
            for module in (layer, *self.table):
                module.quant_method = module.quant_method.own
                module.quant_method.process_weights_after_loading(module)
            return
        session().taken.append(layer.prefix)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits ``[T, V]`` of ``x`` ``[T, H]``."""
        logits = self.product.multiply(x, layer.num_embeddings_per_partition)
        return logits if bias is None else logits + bias


def bind_alone(head: Any) -> None:
    """Bind the product of a head whose weight is its own."""
    site = session().site(head.prefix, head.params_dtype)
    _bind_product(head, site.bind_kernel(linear, **_sizes(head)), head.weight.data)
    emptied(head, head.quant_method.product.operands, keep=("bias",))


def bind_tied(head: Any, table: Any) -> None:
    """Bind a lookup and a product that read one form of the table, which is held once."""
    site = session().site(table.prefix, table.params_dtype)
    rows, hidden = table.num_embeddings_per_partition, table.embedding_dim
    lookup, product = site.bind_table(
        embedding,
        {"vocab_size": rows, "hidden_size": hidden},
        linear,
        _sizes(head),
        session().site(head.prefix, head.params_dtype),
    )
    assert product is not None  # there is a head
    weight = table.weight.data
    looked_up = lookup.prepared(weight=weight)["weight"]
    _bind_product(head, product, weight)
    is_traceable = session().is_traceable(table.prefix)
    table.quant_method.lookup.bind(lookup.function, (looked_up,), is_traceable)
    operands = (looked_up, *head.quant_method.product.operands)
    emptied(head, operands, keep=("bias",))
    emptied(table, operands)


def _sizes(head: Any) -> dict[str, int | float | str | bool]:
    rows = head.num_embeddings_per_partition
    return {"in_features": head.embedding_dim, "out_features": rows, "biased": False}


def _bind_product(head: Any, bound: BoundKernel[..., Tensor], weight: Tensor) -> None:
    prepared = bound.prepared(weight=weight, bias=None)
    operands = (prepared["weight"], prepared["bias"])
    is_traceable = session().is_traceable(head.prefix)
    head.quant_method.product.bind(bound.function, operands, is_traceable)
