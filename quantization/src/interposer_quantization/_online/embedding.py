"""Embedding whose float weight ``finalize`` quantizes to integers, also for a tied head.

Dimensions: V vocabulary, H hidden size, G groups of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from interposer import Call, EmbeddingMethod, Site, Verdict
from interposer.errors import ConfigError
from interposer_ops.embedding import w4a16_embedding, w8a16_embedding
from interposer_ops.quantizers import unpack_nibbles
from interposer_quantization._compressed_tensors.parameters import count_groups
from interposer_quantization._fp8.parameters import register, register_transient
from interposer_quantization._online.integer_linear import FormatOf
from interposer_quantization._online.linear import check_finite
from interposer_quantization._weights.integer_rounding import IntegerRounding
from interposer_quantization._weights.tied_head import QuantizedInputHead, WeightOnlyHead

_NIBBLE_BITS = 4
_MIDDLE = 1 << _NIBBLE_BITS - 1


class OnlineEmbedding(EmbeddingMethod):
    """Embedding method for a float ``weight`` ``[V, H]`` that ``finalize`` quantizes and frees.

    Lookup and lm_head matmul read the same 4-bit or 8-bit weight.

    Args:
        format_of: function that returns the symmetric integer format.
        scale_dtype: dtype to which scales are rounded before the division.
    """

    def __init__(self, format_of: FormatOf, scale_dtype: torch.dtype) -> None:
        self.format_of = format_of
        self.scale_dtype = scale_dtype

    def create_weights(
        self, layer: nn.Module, site: Site, vocab_size: int, hidden_size: int, head: Site | None
    ) -> None:
        """Register ``weight`` ``[V, H]`` in the layout of unquantized checkpoints.

        Raises: ConfigError: groups do not divide the hidden size, or the hidden size is odd and the
            format has 4 bits.
        """
        self.chosen = self.format_of(site, hidden_size)
        self.is_int4 = self.chosen.bits == _NIBBLE_BITS
        self.name, self.dtype = f"{site.prefix}.weight", site.dtype
        if self.is_int4 and hidden_size % 2:
            raise ConfigError(
                f"{site.prefix}: rows of {hidden_size} numbers of 4 bits do not fill bytes. "
                "Try: 'head' 'int8' or 'plain'"
            )
        size = self.chosen.inputs_per_scale or hidden_size
        groups = {"group_size": size, "num_groups": count_groups(site, hidden_size, size)}
        sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size}
        # Any: the ops bind with the same dims, but have different types.
        op: Any = w4a16_embedding if self.is_int4 else w8a16_embedding
        self.lookup: Any
        self.product: Any
        # The head format decides whether hidden states are quantized to int8.
        kind = QuantizedInputHead if self.chosen.dynamic_inputs else WeightOnlyHead
        self.head = kind(self.is_int4)
        head_sizes = {"in_features": hidden_size, "out_features": vocab_size, "biased": False}
        dims = {**head_sizes, **self.head.dims(groups)}
        self.lookup, self.product = site.bind_table(
            op, {**sizes, **groups, "asymmetric": False}, self.head.op, dims, head
        )
        if head is not None:
            self.head.bind_inputs(head, hidden_size, self.product)
        shape = vocab_size, hidden_size
        self.rounding = IntegerRounding(self.chosen, site, shape, self.scale_dtype)
        register_transient(layer, "weight", torch.empty(shape, dtype=site.dtype))

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the quantized and dequantized ``weight`` ``[V, H]`` in float64."""
        weight, scale = self._quantized(layer.get_parameter("weight").data)
        quantized = unpack_nibbles(weight).double() - _MIDDLE if self.is_int4 else weight.double()
        grouped = quantized.unflatten(1, (scale.shape[1], -1))
        dequantized: torch.Tensor = (grouped * scale.double().unsqueeze(-1)).flatten(1)
        return dequantized

    def dequantizable(self) -> Verdict:
        """Refuse dequantization: the user requested a quantized embedding."""
        return Verdict.refuse("the table was plain, and is quantized on request")

    def finalize(self, layer: nn.Module) -> tuple[Call, Call | None]:
        """Quantize the weight; return the bound lookup and, if tied, the bound head matmul.

        Raises: CheckpointError: the weight has a value that is not finite.
        """
        weight = layer.get_parameter("weight").data
        quantized, scale = self._quantized(weight)
        # Kernels share one prepared copy only if they receive the identical tensors.
        scale = self.head.scales(scale)
        # Free the plain weight before the kernels prepare their copies.
        register(layer, weight=None)
        del weight
        constants = {"weight": quantized, "scale": scale, "zero_points": None}
        prepared = self.lookup.prepared(**constants)
        lookup: Call = self.lookup.function, (*(prepared[name] for name in constants), self.dtype)
        if self.product is None:
            return lookup, None
        return lookup, self.head.call(self.product, quantized, scale)

    def _quantized(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize the weight; return quantized values and scales ``[V, G]`` in the ops' layout."""
        rounded = self.rounding(weight)
        if not rounded.is_finite:
            check_finite(weight, self.name)
        return rounded.quantized, rounded.scale
