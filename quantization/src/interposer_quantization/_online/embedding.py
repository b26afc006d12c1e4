"""An embedding whose plain rows become integers when it is finalized, once for all uses.

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
from interposer_quantization._compressed_tensors.parameters import number_of_groups
from interposer_quantization._fp8.parameters import register, register_passing
from interposer_quantization._online.integer_linear import FormatOf
from interposer_quantization._online.linear import check_finite
from interposer_quantization._weights.integer_rounding import IntegerRounding
from interposer_quantization._weights.tied_products import PlainHead, RoundedHead

_NARROW = 4  # bits; half of a byte
_MIDDLE = 1 << _NARROW - 1


class OnlineEmbedding(EmbeddingMethod):
    """``weight`` ``[V, H]`` in the model's dtype, which is quantized and dropped by ``finalize``.

    Lookups and products read the same codes, of 4 or of 8 bits.

    Args:
        format_of: the format of symmetric integers.
        scale_dtype: that scales are rounded to before numbers are divided by them.
    """

    def __init__(self, format_of: FormatOf, scale_dtype: torch.dtype) -> None:
        self.format_of = format_of
        self.scale_dtype = scale_dtype

    def create_weights(
        self, layer: nn.Module, site: Site, vocab_size: int, hidden_size: int, head: Site | None
    ) -> None:
        """Register ``weight``, as plain checkpoints have it.

        Raises: ConfigError: groups do not divide the hidden size, or it is odd and codes have
            4 bits.
        """
        self.chosen = self.format_of(site, hidden_size)
        self.narrow = self.chosen.bits == _NARROW
        self.name, self.dtype = f"{site.prefix}.weight", site.dtype
        if self.narrow and hidden_size % 2:
            raise ConfigError(
                f"{site.prefix}: rows of {hidden_size} numbers of 4 bits do not fill bytes. "
                "Try: 'head' 'int8' or 'plain'"
            )
        size = self.chosen.inputs_per_scale or hidden_size
        groups = {"group_size": size, "num_groups": number_of_groups(site, hidden_size, size)}
        sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size}
        # Ops of both widths and kinds of inputs bind alike, but are of different types.
        op: Any = w4a16_embedding if self.narrow else w8a16_embedding
        self.lookup: Any
        self.product: Any
        kind = RoundedHead if self.chosen.dynamic_inputs else PlainHead
        self.head = kind(self.narrow)
        products = {"in_features": hidden_size, "out_features": vocab_size, "biased": False}
        dims = {**products, **self.head.dims(groups)}
        self.lookup, self.product = site.bind_table(
            op, {**sizes, **groups, "asymmetric": False}, self.head.op, dims, head
        )
        if head is not None:
            self.head.bind_inputs(head, hidden_size, self.product)
        shape = vocab_size, hidden_size
        self.rounding = IntegerRounding(self.chosen, site, shape, self.scale_dtype)
        register_passing(layer, "weight", torch.empty(shape, dtype=site.dtype))

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return ``[V, H]`` in float64, as the codes and scales of ``weight`` mean it."""
        weight, scale = self._quantized(layer.get_parameter("weight").data)
        codes = unpack_nibbles(weight).double() - _MIDDLE if self.narrow else weight.double()
        grouped = codes.unflatten(1, (scale.shape[1], -1))
        numbers: torch.Tensor = (grouped * scale.double().unsqueeze(-1)).flatten(1)
        return numbers

    def dequantizable(self) -> Verdict:
        """Refuse: whoever asks for a quantized table is not to get a plain one."""
        return Verdict.refuse("the table was plain, and is quantized on request")

    def finalize(self, layer: nn.Module) -> tuple[Call, Call | None]:
        """Return the bound kernels, both with the same codes.

        Raises: CheckpointError: the weight holds what is no finite number.
        """
        weight = layer.get_parameter("weight").data
        codes, scale = self._quantized(weight)
        # Kernels that share a copy of the codes are to get the very same tensors.
        scale = self.head.scales(scale)
        # Before kernels prepare their own: it is not needed any more.
        register(layer, weight=None)
        del weight
        constants = {"weight": codes, "scale": scale, "zero_points": None}
        held = self.lookup.prepared(**constants)
        lookup: Call = self.lookup.function, (*(held[name] for name in constants), self.dtype)
        if self.product is None:
            return lookup, None
        return lookup, self.head.call(self.product, codes, scale)

    def _quantized(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales ``[V, G]`` as the ops take them."""
        rounded = self.rounding(weight)
        if not rounded.finite:
            check_finite(weight, self.name)
        return rounded.codes, rounded.scale
