"""4-bit and 8-bit integer weight formats of compressed-tensors.

Dimensions: O output features, I input features, N groups of an output.

Source: the layouts and the mapping of a range to scales are those of compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from interposer_quantization._weights.int_packing import pack_int32, unpack_int32
from interposer_quantization.writing._weight_format import Grid, WeightFormat, meta, storable_scale


class IntegerFormat(WeightFormat):
    """Integer format: b-bit signed values with one scale per output or per group of inputs.

    Args:
        packed: store the values in int32 words; else as int8.
        dynamic_inputs: inputs are quantized to int8 at run time, with one scale per token.
    """

    def __init__(
        self,
        bits: int,
        inputs_per_scale: int | None,
        *,
        symmetric: bool = True,
        packed: bool = True,
        dynamic_inputs: bool = False,
    ) -> None:
        self.bits = bits
        self.inputs_per_scale = inputs_per_scale
        self.symmetric = symmetric
        self.packed = packed
        self.dynamic_inputs = dynamic_inputs
        self.storage = "pack-quantized" if packed else "int-quantized"
        self._lowest, self._highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def in_bytes(self) -> IntegerFormat:
        """Return the same format, stored as int8 instead of packed."""
        return IntegerFormat(
            self.bits,
            self.inputs_per_scale,
            symmetric=self.symmetric,
            packed=False,
            dynamic_inputs=self.dynamic_inputs,
        )

    def weight_settings(self) -> Mapping[str, Any]:
        """Return the ``weights`` entry of a group in ``quantization_config``."""
        size = self.inputs_per_scale
        return {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "group_size": size,
            "strategy": "channel" if size is None else "group",
            "dynamic": False,
        }

    def input_settings(self) -> Mapping[str, Any] | None:
        """Return the ``input_activations`` entry of a group, or None if inputs stay unquantized."""
        if not self.dynamic_inputs:
            return None
        return {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "group_size": None,
            "strategy": "token",
            "dynamic": True,
        }

    def stored(
        self, weight: torch.Tensor, grid: Grid, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Quantize a weight to its stored tensors, with ``weight_scale`` ``[O, N]``.

        Unpacked: ``weight`` ``[O, I]`` int8 and, if asymmetric, ``weight_zero_point`` ``[O, N]``
        int8. Packed: ``weight_packed`` ``[O, ceil(I * b / 32)]`` int32, ``weight_shape`` and, if
        asymmetric, ``weight_zero_point`` ``[ceil(O * b / 32), N]`` int32.
        """
        quantized = self.codes(self.groups(weight), grid).flatten(1)
        scale = grid.scale.to(dtype)
        if not self.packed:
            tensors = {"weight": quantized.to(torch.int8), "weight_scale": scale}
            if grid.zero is not None:
                tensors["weight_zero_point"] = grid.zero.to(torch.int8)
            return tensors
        tensors = {
            "weight_packed": self._words(quantized),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if grid.zero is not None:
            # Zero points are packed along the outputs, the weight along the inputs.
            tensors["weight_zero_point"] = self._words(grid.zero.T).T.contiguous()
        return tensors

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return meta-device tensors with the shapes and dtypes that ``rounded`` returns."""
        rows, columns = shape
        num_groups = columns // (self.inputs_per_scale or columns)
        scale = meta(dtype, rows, num_groups)
        if not self.packed:
            tensors = {"weight": meta(torch.int8, rows, columns), "weight_scale": scale}
            if not self.symmetric:
                tensors["weight_zero_point"] = meta(torch.int8, rows, num_groups)
            return tensors
        per_word = 32 // self.bits
        tensors = {
            "weight_packed": meta(torch.int32, rows, -(-columns // per_word)),
            "weight_scale": scale,
            "weight_shape": meta(torch.int64, 2),
        }
        if not self.symmetric:
            words = -(-rows // per_word)
            tensors["weight_zero_point"] = meta(torch.int32, words, num_groups)
        return tensors

    def read(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Dequantize the stored tensors to the float32 weight ``[O, I]``."""
        scale = tensors["weight_scale"].float()
        zero = tensors.get("weight_zero_point")
        if not self.packed:
            quantized = tensors["weight"].float()
        else:
            rows, columns = (int(size) for size in tensors["weight_shape"])
            quantized = self._unpack(tensors["weight_packed"], columns)
            zero = None if zero is None else self._unpack(zero.T.contiguous(), rows).T
        groups = quantized.unflatten(1, (scale.shape[1], -1))
        if zero is not None:
            groups = groups - zero.unsqueeze(-1)
        dequantized: torch.Tensor = (groups * scale.unsqueeze(-1)).flatten(1)
        return dequantized

    def _span(
        self,
        low: torch.Tensor,
        high: torch.Tensor,
        dtype: torch.dtype,
        tensor_scale: torch.Tensor | None,
    ) -> Grid:
        span = 2**self.bits - 1
        if self.symmetric:
            return Grid(storable_scale(torch.maximum(-low, high) * 2 / span, dtype))
        # fitted() makes the range include 0, so the zero point fits into b bits.
        scale = storable_scale((high - low) / span, dtype)
        zero = (self._lowest - low / scale).round().clamp(self._lowest, self._highest)
        return Grid(scale, zero)

    def _rounded(self, quotients: torch.Tensor) -> torch.Tensor:
        return quotients.round().clamp(self._lowest, self._highest)

    def _words(self, quantized: torch.Tensor) -> torch.Tensor:
        """Pack the values of each row into int32; the last int32 is padded with zero bits."""
        # Packed storage is unsigned: the smallest value becomes 0.
        unsigned = (quantized - self._lowest).to(torch.uint8)
        num_padding = -quantized.shape[1] % (32 // self.bits)
        return pack_int32(functional.pad(unsigned, (0, num_padding)), self.bits)

    def _unpack(self, words: torch.Tensor, count: int) -> torch.Tensor:
        quantized: torch.Tensor = unpack_int32(words, self.bits)[:, :count].float() + self._lowest
        return quantized
