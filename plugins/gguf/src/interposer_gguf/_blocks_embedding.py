"""Embeddings in blocks of GGUF files, alone or tied to an lm_head.

Dimensions: V vocabulary, H hidden size.
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
from interposer_gguf._products import (
    BlocksProduct,
    GroupedProduct,
    check_blocks,
    group_dims,
    is_grouped,
    not_numbers,
    parameter,
)
from interposer_ops.embedding import w4a16_embedding, w8a16_embedding
from interposer_ops.quantized_linear import w4a16_linear, w8a16_linear


class BlocksEmbedding(EmbeddingMethod):
    """Rows of blocks ``[V, row]`` uint8 under the name of their format.

    They are looked up as they lie in the file. Where a head multiplies by them too, and ops for
    groups of integers represent the blocks exactly, both read what these ops take.
    """

    def __init__(self, layout: BlockFormat) -> None:
        self.layout = layout

    def create_weights(
        self, layer: nn.Module, site: Site, vocab_size: int, hidden_size: int, head: Site | None
    ) -> None:
        """Register a parameter named as the format.

        Raises: ConfigError: blocks do not divide the hidden size.
        """
        layout = self.layout
        check_blocks(layout, site, hidden_size)
        self.prefix, self.dtype = site.prefix, site.dtype
        dims: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": hidden_size}
        sizes: dict[str, Any] = {"in_features": hidden_size, "out_features": vocab_size}
        sizes["biased"] = False
        kind = BlocksProduct
        # One call for each pair of ops keeps their types apart.
        self.lookup: Any
        self.bound: Any
        if head is not None and is_grouped(layout):
            kind, groups = GroupedProduct, group_dims(layout, hidden_size)
            dims, sizes = {**dims, **groups}, {**sizes, **groups}
            if layout.name == "q4_0":
                sizes["scale_dtype"] = "float32"
                self.lookup, self.bound = site.bind_table(
                    w4a16_embedding, dims, w4a16_linear, sizes, head
                )
            else:
                self.lookup, self.bound = site.bind_table(
                    w8a16_embedding, dims, w8a16_linear, sizes, head
                )
        else:
            dims |= {"stored_as": layout.name, "tied": False}
            sizes["stored_as"] = layout.name
            self.lookup, self.bound = site.bind_table(
                gguf_embedding, dims, gguf_linear, sizes, head
            )
        self.rows = kind(layout, (), self.bound)
        stored = self.rows.empty(vocab_size, hidden_size, site)
        sample = self.rows.sample(vocab_size, hidden_size)
        layer.register_parameter(layout.name, parameter(stored, sample=sample))

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return ``[V, H]`` in float64: each code times its scale, plus its offset."""
        return self.rows.numbers(layer.get_parameter(self.layout.name))

    def finalize(self, layer: nn.Module) -> tuple[Call, Call | None]:
        """Return the bound kernels, both with the same rows.

        Raises: CheckpointError: a scale or an offset is infinite or not a number.
        """
        stored = layer.get_parameter(self.layout.name).data
        if not self.rows.is_finite(stored):
            raise not_numbers(self.prefix, self.rows)
        # What was stored goes before kernels prepare their own: it is not needed twice.
        layer.register_parameter(self.layout.name, None)
        constants = self.rows.constants(stored, None)
        del stored
        of_both = {name: held for name, held in constants.items() if name != "bias"}
        lookup = _operands(self.lookup.prepared(**of_both), list(of_both))
        called: Call = self.lookup.function, (*lookup, self.dtype)
        if self.bound is None:
            return called, None
        product = _operands(self.bound.prepared(**constants), list(constants))
        return called, (self.bound.function, product)


def _operands(prepared: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(prepared[name] for name in names)
