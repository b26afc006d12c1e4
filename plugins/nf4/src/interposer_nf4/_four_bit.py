"""Linear layers of 4-bit weights that index a codebook.

Dimensions: I input features, O output features, G inputs per block, P fused layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, Site
from interposer.errors import CheckpointError, ConfigError
from interposer_nf4._codebook_linear import dequantize, nf4_linear
from interposer_nf4._codebooks import CODEBOOKS
from interposer_nf4._parts import parts_of, register
from interposer_nf4._quant_state import QuantState
from interposer_nf4._settings import FourBit
from interposer_nf4._stored_weight import StoredWeight, names_of

# Default block sizes of bitsandbytes.
_BLOCK, _NESTED_BLOCK = 64, 256


class FourBitLinear(LinearMethod):
    """Linear method for 4-bit weights; registers the tensors of each fused layer as stored.

    The config does not state the block size, so the number of scales is known only after loading.
    Blocks never cross from one fused layer into another. Blocks that continue into the next row are
    split at the row end: each scale is repeated for every G inputs, where G divides both the block
    size and the inputs. Quantized scales are dequantized to float32.
    """

    def __init__(self, kind: FourBit) -> None:
        self.kind = kind

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register the tensors of each fused layer and, if requested, ``bias``.

        Raises: ConfigError: the number of inputs is odd, so that a byte belongs to two rows.
        """
        if in_features % 2:
            raise ConfigError(
                f"{site.prefix}: codes of 4 bits are stored in pairs, which do not divide its "
                f"{in_features} inputs. Try: leave the layer plain, by llm_int8_skip_modules"
            )
        parent = site.prefix.rpartition(".")[0]
        self.parent = f"{parent}." if parent else ""
        self.parts = parts_of(layer, site, out_features)
        self.in_features = in_features
        sizes = {"in_features": in_features, "out_features": out_features}
        self.bound = site.bind_kernel(nf4_linear, **sizes, biased=bias)
        for index, (part, size) in enumerate(self.parts.items()):
            names = names_of(self.kind)
            for key, tensor in self._usual(size, in_features).items():
                name = f"{self.parent}{part}.{names[key]}"
                register(layer, f"{key}_{index}", tensor, name, tensor if key == "state" else None)
        offset = torch.empty(out_features, dtype=site.dtype) if bias else None
        register(layer, "bias", offset)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: codebook value * scale."""
        packed, scales, codebook = self._joined(self._read(layer))
        return dequantize(packed, scales, codebook, torch.float64)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Concatenate the tensors of the fused layers; return the bound kernel and the constants.

        Raises: CheckpointError: a tensor holds values that no weight can be computed from, or fused
            layers have different codebooks.
        """
        bias = layer._parameters["bias"]
        packed, scales, codebook = self._joined(self._read(layer))
        # A list: the loop changes the dict.
        for name in [name for name in layer._parameters if name != "bias"]:
            layer.register_parameter(name, None)
        # The stored tensors are freed first, so that at most two copies exist.
        prepared = self.bound.prepared(weight=packed, absmax=scales, codebook=codebook, bias=bias)
        if prepared["bias"] is not bias:
            layer.register_parameter("bias", None)
        names = ("weight", "absmax", "codebook", "bias")
        return self.bound.function, tuple(prepared[name] for name in names)

    def _read(self, layer: nn.Module) -> list[StoredWeight]:
        weights = []
        for index, (part, size) in enumerate(self.parts.items()):
            names = names_of(self.kind)
            weights.append(
                StoredWeight.read(
                    self.kind,
                    (size, self.in_features),
                    {key: layer.get_parameter(f"{key}_{index}").data for key in names},
                    {key: f"{self.parent}{part}.{name}" for key, name in names.items()},
                )
            )
        first = weights[0].codebook
        for part, weight in zip(self.parts, weights, strict=True):
            if not torch.equal(weight.codebook, first):
                raise CheckpointError(
                    f"{self.parent}{part}.weight.quant_map",
                    f"differs from that of {next(iter(self.parts))}, but fused layers must have "
                    "the same codebook",
                    "quantize these layers alike",
                )
        return weights

    def _joined(
        self, weights: list[StoredWeight]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Concatenate packed weights to ``[O, I / 2]`` and scales to ``[O, I / G]``.

        Returns: packed weight, scales, and the common codebook ``[16]``.
        """
        # Block sizes are powers of two, and so are these sizes: the smallest divides the others.
        size = min(weight.inputs_per_scale for weight in weights)
        packed = [weight.packed for weight in weights]
        scales = [weight.scales(size) for weight in weights]
        if len(weights) == 1:
            return packed[0], scales[0], weights[0].codebook
        return torch.cat(packed), torch.cat(scales), weights[0].codebook

    def _usual(self, out_features: int, in_features: int) -> dict[str, torch.Tensor]:
        """Return example tensors for the loader; only the quantization state has values."""
        num_blocks = -(-out_features * in_features // _BLOCK)
        double = self.kind.double
        state = QuantState(
            quant_type=self.kind.quant_type,
            blocksize=_BLOCK,
            dtype="float32",
            shape=(out_features, in_features),
            nested_blocksize=_NESTED_BLOCK if double else None,
            nested_dtype="float32" if double else None,
            nested_offset=1.0 if double else None,
        )
        tensors = {
            "weight": torch.empty(out_features * in_features // 2, 1, dtype=torch.uint8),
            "absmax": torch.empty(num_blocks, dtype=torch.uint8 if double else torch.float32),
            "quant_map": torch.empty(len(CODEBOOKS[self.kind.quant_type])),
            "state": state.stored(),
        }
        if double:
            tensors["nested_absmax"] = torch.empty(-(-num_blocks // _NESTED_BLOCK))
            tensors["nested_quant_map"] = torch.empty(256)
        return tensors
