"""Embeddings in GGUF blocks, alone or tied to an LM head.

Shapes: V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from interposer import Call, EmbeddingMethod, Site
from interposer_gguf._block_formats import BlockFormat
from interposer_gguf._embedding import gguf_embedding
from interposer_gguf._linear import gguf_linear
from interposer_gguf._matmuls import (
    BlocksMatmul,
    GroupedMatmul,
    check_blocks,
    group_dims,
    is_grouped,
    not_finite_error,
    parameter,
)
from interposer_ops.embedding import w4a16_embedding, w8a16_embedding
from interposer_ops.quantized_linear import w4a16_linear, w8a16_linear


class BlocksEmbedding(EmbeddingMethod):
    """Embedding method for a table in blocks ``[V, row]`` uint8, named after the block format.

    Rows are looked up in the stored blocks. If the embedding is tied to a head and ops on grouped
    integers represent the blocks exactly, lookup and head share the converted weight of these ops.
    """

    def __init__(self, layout: BlockFormat) -> None:
        self.layout = layout

    def create_weights(
        self, layer: nn.Module, site: Site, vocab_size: int, hidden_size: int, head: Site | None
    ) -> None:
        """Register the table of blocks under the name of the block format.

        Raises: ConfigError: the block size does not divide the hidden size.
        """
        layout = self.layout
        check_blocks(layout, site, hidden_size)
        self.prefix, self.dtype = site.prefix, site.dtype
        dims: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": hidden_size}
        sizes: dict[str, Any] = {"in_features": hidden_size, "out_features": vocab_size}
        sizes["biased"] = False
        matmul_class = BlocksMatmul
        # Three calls, because each pair of ops has its own types.
        self.lookup: Any
        self.head_kernel: Any
        # Without a head, rows are looked up in the blocks as stored.
        if head is not None and is_grouped(layout):
            matmul_class, groups = GroupedMatmul, group_dims(layout, hidden_size)
            dims, sizes = {**dims, **groups}, {**sizes, **groups}
            if layout.name == "q4_0":
                sizes["scale_dtype"] = "float32"
                self.lookup, self.head_kernel = site.bind_table(
                    w4a16_embedding, dims, w4a16_linear, sizes, head
                )
            else:
                self.lookup, self.head_kernel = site.bind_table(
                    w8a16_embedding, dims, w8a16_linear, sizes, head
                )
        else:
            dims |= {"stored_as": layout.name, "tied": False}
            sizes["stored_as"] = layout.name
            self.lookup, self.head_kernel = site.bind_table(
                gguf_embedding, dims, gguf_linear, sizes, head
            )
        self.matmul = matmul_class(layout, (), self.head_kernel)
        stored = self.matmul.empty(vocab_size, hidden_size, site)
        sample = self.matmul.sample(vocab_size, hidden_size)
        layer.register_parameter(layout.name, parameter(stored, sample=sample))

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[V, H]``: quantized value * scale + offset."""
        return self.matmul.dequantized(layer.get_parameter(self.layout.name))

    def finalize(self, layer: nn.Module) -> tuple[Call, Call | None]:
        """Return the bound kernels of lookup and head, which share one prepared weight.

        Raises: CheckpointError: a scale or an offset is infinite or not a number.
        """
        stored = layer.get_parameter(self.layout.name).data
        if not self.matmul.is_finite(stored):
            raise not_finite_error(self.prefix, self.matmul)
        # Release the stored weight before kernels prepare their own, to save peak memory.
        layer.register_parameter(self.layout.name, None)
        constants = self.matmul.constants(stored, None)
        del stored
        lookup_constants = {name: value for name, value in constants.items() if name != "bias"}
        lookup = _operands(self.lookup.prepared(**lookup_constants), list(lookup_constants))
        lookup_call: Call = self.lookup.function, (*lookup, self.dtype)
        if self.head_kernel is None:
            return lookup_call, None
        head_operands = _operands(self.head_kernel.prepared(**constants), list(constants))
        return lookup_call, (self.head_kernel.function, head_operands)


def _operands(prepared: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(prepared[name] for name in names)
