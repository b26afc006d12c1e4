"""vLLM's embedding table and LM head on selected kernels; tied ones share one copy of the weight.

Shapes: T tokens, V vocabulary shard of this worker with padding, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from interposer import BoundKernel
from interposer.errors import InterposerError
from interposer_ops.embedding import embedding
from interposer_ops.linear import linear
from interposer_vllm._adoption import LinearShape, free_parameters
from interposer_vllm._graph_ops import SlotKernel
from interposer_vllm._methods import AdoptedLinear, adopt_matmul, keep_in_vllm, with_method
from interposer_vllm._session import session

__all__ = ["adopt_head", "adopt_table"]


def adopt_table(layer: Any) -> None:
    """Prepare a table of vLLM for a lookup by a selected kernel, in case a head shares the table.

    A table that no head shares stays vLLM's own: a lookup of unquantized rows gains nothing.
    """
    if _is_unquantized(layer):
        with_method(layer, _AdoptedTable, lookup=SlotKernel(), is_tied=False)
    else:
        keep_in_vllm(layer.prefix, f"{type(layer.quant_method).__name__} of vLLM stores it")


def adopt_head(layer: Any) -> None:
    """Let a selected kernel compute a head of vLLM.

    A head that the checkpoint stores quantized is treated as a linear layer.

    Raises: NoCandidateError, UnknownNameError: the user pinned or required a kernel that cannot be
        used.
    """
    if _is_unquantized(layer):
        with_method(layer, _AdoptedHead, matmul=SlotKernel(), table=())
        return
    parts = {layer.prefix.rpartition(".")[2]: layer.num_embeddings_per_partition}
    # vLLM's logits processor passes a bias per call, which need not be the head's: the kernel must
    # not add one.
    shape = LinearShape(parts, layer.embedding_dim, biased=False)
    adopt_matmul(layer, lambda: shape, _QuantizedHead)


def _is_unquantized(layer: Any) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    return type(layer.quant_method) is UnquantizedEmbeddingMethod


class _QuantizedHead(AdoptedLinear):
    """Mixin of a quantization method for an LM head with a quantized weight."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the LM head's weight like that of a linear layer."""
        scale, rows = layer._parameters.get("weight_scale"), layer.num_embeddings_per_partition
        if scale is not None and scale.ndim == 2 and len(scale) == rows:
            # vLLM pads the vocabulary with rows of zeros and later drops their logits. Their scales
            # of zero would be reported as a broken checkpoint.
            indices = layer.shard_indices
            scale.data[indices.org_vocab_end_index - indices.org_vocab_start_index :] = 1
        super().process_weights_after_loading(layer)


class _AdoptedTable:
    """Mixin of a method that looks up rows by ``lookup``, after an LM head has bound the lookup."""

    lookup: SlotKernel
    is_tied: bool
    vllm_method: Any
    supports_pre_processed_weights = False

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Prepare an unshared table; a head that shares the table prepares both."""
        if not self.is_tied:
            self.vllm_method.process_weights_after_loading(layer)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Return the rows ``[T, H]`` of the token ids ``input_`` ``[T]``."""
        if self.lookup.kernel is None:
            rows: Tensor = self.vllm_method.embedding(layer, input_)
            return rows
        return self.lookup.look_up(input_, layer.embedding_dim, layer.params_dtype)


class _AdoptedHead:
    """Mixin of a method that computes an LM head by ``matmul``; ``table`` is the shared table."""

    matmul: SlotKernel
    table: tuple[Any, ...]
    vllm_method: Any
    supports_pre_processed_weights = False

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Share the table of ``embed_tokens`` with this head."""
        if isinstance(getattr(embed_tokens, "quant_method", None), _AdoptedTable):
            # In a tuple, because vLLM must not find the table as a submodule of the head.
            self.table = (embed_tokens,)
            embed_tokens.quant_method.is_tied = True
        return self.vllm_method.tie_weights(layer, embed_tokens)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weight for the kernels, once for both the head and a shared table."""
        try:
            bind_tied(layer, self.table[0]) if self.table else bind_untied_head(layer)
        except InterposerError as error:
            keep_in_vllm(layer.prefix, error)
            for module in (layer, *self.table):
                module.quant_method = module.quant_method.vllm_method
                module.quant_method.process_weights_after_loading(module)
            return
        session().taken.append(layer.prefix)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits ``[T, V]`` of ``x`` ``[T, H]``."""
        logits = self.matmul.multiply(x, layer.num_embeddings_per_partition)
        return logits if bias is None else logits + bias


def bind_untied_head(head: Any) -> None:
    """Bind a matmul kernel to the weight of an LM head that is not tied to the embedding."""
    site = session().site(head.prefix, head.params_dtype)
    _bind_matmul(head, site.bind_kernel(linear, **_head_sizes(head)), head.weight.data)
    free_parameters(head, head.quant_method.matmul.operands, keep=("bias",))


def bind_tied(head: Any, table: Any) -> None:
    """Bind lookup and matmul kernels that read one prepared copy of the tied weight."""
    site = session().site(table.prefix, table.params_dtype)
    rows, hidden = table.num_embeddings_per_partition, table.embedding_dim
    lookup, matmul = site.bind_table(
        embedding,
        {"vocab_size": rows, "hidden_size": hidden},
        linear,
        _head_sizes(head),
        session().site(head.prefix, head.params_dtype),
    )
    assert matmul is not None  # there is a head
    weight = table.weight.data
    prepared_table = lookup.prepared(weight=weight)["weight"]
    _bind_matmul(head, matmul, weight)
    is_traceable = session().is_traceable(table.prefix)
    table.quant_method.lookup.bind(lookup.function, (prepared_table,), is_traceable)
    operands = (prepared_table, *head.quant_method.matmul.operands)
    free_parameters(head, operands, keep=("bias",))
    free_parameters(table, operands)


def _head_sizes(head: Any) -> dict[str, int | float | str | bool]:
    rows = head.num_embeddings_per_partition
    return {"in_features": head.embedding_dim, "out_features": rows, "biased": False}


def _bind_matmul(head: Any, kernel: BoundKernel[..., Tensor], weight: Tensor) -> None:
    prepared = kernel.prepared(weight=weight, bias=None)
    operands = (prepared["weight"], prepared["bias"])
    is_traceable = session().is_traceable(head.prefix)
    head.quant_method.matmul.bind(kernel.function, operands, is_traceable)
