"""Linear layers of weights of four bits, each an index into a codebook.

Dimensions: I input features, O output features, G inputs per block, P layers that are fused.
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

# What bitsandbytes takes where nobody asks for another.
_BLOCK, _NESTED_BLOCK = 64, 256


class FourBitLinear(LinearMethod):
    """Codes, scales, codebook and state of each layer of the checkpoint, as they are stored.

    The config does not tell the size of blocks, so how many scales there are is known when they
    come. Blocks do not cross from one layer of the checkpoint into another, so where layers are
    fused, outputs keep those of their own. Blocks that run on from row to row are split where rows
    end: each scale is repeated for as many inputs as blocks and rows have in common. Scales that
    are quantized themselves are held in float32.
    """

    def __init__(self, kind: FourBit) -> None:
        self.kind = kind

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register the tensors of every part, one by one, and if asked for ``bias``.

        Raises: ConfigError: the inputs are odd, so that a byte belongs to two rows.
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
        """Return the float64 weight ``[O, I]``: each number of the codebook times its scale."""
        codes, scales, codebook = self._joined(self._read(layer))
        return dequantize(codes, scales, codebook, torch.float64)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the bound kernel with its constants, the tensors of all parts joined.

        Raises: CheckpointError: a tensor holds what no weight can be computed with, or layers that
            are fused have different codebooks.
        """
        bias = layer._parameters["bias"]
        codes, scales, codebook = self._joined(self._read(layer))
        for name in [name for name in layer._parameters if name != "bias"]:
            layer.register_parameter(name, None)
        prepared = self.bound.prepared(weight=codes, absmax=scales, codebook=codebook, bias=bias)
        if prepared["bias"] is not bias:
            layer.register_parameter("bias", None)
        names = ("weight", "absmax", "codebook", "bias")
        return self.bound.function, tuple(prepared[name] for name in names)

    def _read(self, layer: nn.Module) -> list[StoredWeight]:
        read = []
        for index, (part, size) in enumerate(self.parts.items()):
            names = names_of(self.kind)
            read.append(
                StoredWeight.read(
                    self.kind,
                    (size, self.in_features),
                    {key: layer.get_parameter(f"{key}_{index}").data for key in names},
                    {key: f"{self.parent}{part}.{name}" for key, name in names.items()},
                )
            )
        first = read[0].codebook
        for part, weight in zip(self.parts, read, strict=True):
            if not torch.equal(weight.codebook, first):
                raise CheckpointError(
                    f"{self.parent}{part}.weight.quant_map",
                    f"differs from that of {next(iter(self.parts))}, but {', '.join(self.parts)} "
                    "run as one product, which has one codebook",
                    "quantize these layers alike",
                )
        return read

    def _joined(
        self, weights: list[StoredWeight]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes ``[O, I / 2]``, scales ``[O, I / G]`` and the codebook ``[16]``."""
        # All are powers of two, so the smallest divides the others.
        size = min(weight.inputs_per_scale for weight in weights)
        codes = [weight.codes for weight in weights]
        scales = [weight.scales(size) for weight in weights]
        if len(weights) == 1:
            return codes[0], scales[0], weights[0].codebook
        return torch.cat(codes), torch.cat(scales), weights[0].codebook

    def _usual(self, out_features: int, in_features: int) -> dict[str, torch.Tensor]:
        """Return what is mostly stored for such a layer; only the state is filled."""
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
        usual = {
            "weight": torch.empty(out_features * in_features // 2, 1, dtype=torch.uint8),
            "absmax": torch.empty(num_blocks, dtype=torch.uint8 if double else torch.float32),
            "quant_map": torch.empty(len(CODEBOOKS[self.kind.quant_type])),
            "state": state.stored(),
        }
        if double:
            usual["nested_absmax"] = torch.empty(-(-num_blocks // _NESTED_BLOCK))
            usual["nested_quant_map"] = torch.empty(256)
        return usual
