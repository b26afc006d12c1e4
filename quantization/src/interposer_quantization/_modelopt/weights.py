"""Linear layers of which ModelOpt quantizes the weights and not the inputs.

Dimensions: I input features, O output features, G groups; R rows and C columns of blocks.

Source: ``to_quantized_weight`` of NVIDIA ModelOpt 0.47 for what is stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, Site
from interposer.errors import ConfigError
from interposer_ops.linear import linear
from interposer_ops.quantized_linear import w4a16_linear, w8a16_linear
from interposer_ops.quantizers import NVFP4_BLOCK_SIZE, decode_e2m1, unpack_nibbles
from interposer_quantization._compressed_tensors.parameters import number_of_groups
from interposer_quantization._compressed_tensors.weight_linear import WeightLinear
from interposer_quantization._fp8.parameters import FORMAT, register, register_per_part
from interposer_quantization._weights.int_packing import kernel_codes

_BLOCK = 128
_SIGN = 8


class Int4WeightLinear(WeightLinear):
    """``weight`` ``[O / 2, I]`` uint8, two outputs a byte, and ``weight_scale`` ``[O, G]``.

    A weight is a signed integer of 4 bits times its scale; the first output has the low bits.
    """

    def __init__(self, group_size: int) -> None:
        super().__init__(None)
        self.group_size = group_size

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> BoundKernel[Any, Any]:
        """Register the codes and scales, and return a kernel for integers of 4 bits.

        Raises: ConfigError: groups do not divide the inputs, or pairs the outputs.
        """
        num_groups = number_of_groups(site, in_features, self.group_size)
        for member, size in self.members.sizes.items():
            if size % 2:
                raise ConfigError(
                    f"{site.prefix}: {member} has {size} outputs, which are stored in pairs. "
                    "Try: leave the layer out when the model is quantized"
                )
        codes = torch.empty(out_features // 2, in_features, dtype=torch.uint8)
        scales = torch.empty(out_features, num_groups, dtype=torch.float32)
        register(layer, weight=codes, weight_scale=scales)
        return site.bind_kernel(
            w4a16_linear,
            in_features=in_features,
            out_features=out_features,
            group_size=self.group_size,
            num_groups=num_groups,
            asymmetric=False,
            scale_dtype="float32",
        )

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each integer times the scale of its group."""
        scales = layer.get_parameter("weight_scale").double()
        return (_offset_codes(layer).double() - _SIGN) * scales.repeat_interleave(
            self.group_size, 1
        )

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the codes as the op takes them, two inputs a byte, and the scales.

        Raises: CheckpointError: a scale is not a positive number.
        """
        scales = layer.get_parameter("weight_scale")
        self.members.check(scales, "weight_scale")
        codes = kernel_codes(_offset_codes(layer), 4)
        return {"weight": codes, "scale": scales, "zero_points": None}


class Int8WeightLinear(WeightLinear):
    """``weight`` ``[O, I]`` int8 and ``weight_scale`` ``[O]``."""

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> BoundKernel[Any, Any]:
        """Register the codes and scales, and return a kernel for integers of 8 bits."""
        codes = torch.empty(out_features, in_features, dtype=torch.int8)
        register(layer, weight=codes, weight_scale=torch.empty(out_features, dtype=torch.float32))
        return _int8_kernel(site, in_features, out_features, in_features)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each integer times the scale of its output."""
        scales = layer.get_parameter("weight_scale").double()
        return layer.get_parameter("weight").double() * scales.unsqueeze(1)

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return what is stored.

        Raises: CheckpointError: a scale is not a positive number.
        """
        scales = layer.get_parameter("weight_scale")
        self.members.check(scales, "weight_scale")
        weight = layer.get_parameter("weight")
        return {"weight": weight, "scale": scales.data.unsqueeze(1), "zero_points": None}


class NvFp4WeightLinear(WeightLinear):
    """``weight`` ``[O, I / 2]`` uint8, ``weight_scale`` ``[O, I / 16]``, one ``weight_scale_2``.

    Twice an e2m1 number is an integer, so that the op of int8 weights represents all of them
    exactly. Where layers are fused, each output keeps the scale of its own layer.
    """

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> BoundKernel[Any, Any]:
        """Register the codes and all scales, and return a kernel for integers of 8 bits.

        Raises: ConfigError: blocks do not divide the inputs.
        """
        num_groups = number_of_groups(site, in_features, NVFP4_BLOCK_SIZE)
        register(
            layer,
            weight=torch.empty(out_features, in_features // 2, dtype=torch.uint8),
            weight_scale=torch.empty(out_features, num_groups, dtype=FORMAT),
        )
        register_per_part(layer, "weight_scale_2", len(self.members.sizes))
        return _int8_kernel(site, in_features, out_features, NVFP4_BLOCK_SIZE)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each number times both its scales."""
        numbers = decode_e2m1(unpack_nibbles(layer.get_parameter("weight")), torch.float64)
        return numbers * self._scales(layer).double().repeat_interleave(NVFP4_BLOCK_SIZE, 1)

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return twice the numbers as int8, and half of what both scales make.

        Raises: CheckpointError: a scale is not a positive number.
        """
        scales = layer.get_parameter("weight_scale").float()
        # A block of zeros may have the scale zero.
        self.members.check(scales.masked_fill(scales == 0, 1), "weight_scale")
        self.members.check(layer.get_parameter("weight_scale_2"), "weight_scale_2")
        codes = unpack_nibbles(layer.get_parameter("weight"))
        doubled = (2 * decode_e2m1(codes, torch.float32)).to(torch.int8)
        return {"weight": doubled, "scale": self._scales(layer) / 2, "zero_points": None}

    def _scales(self, layer: nn.Module) -> torch.Tensor:
        """Return ``[O, I / 16]`` float32: the scales of both levels as one, as ModelOpt does."""
        overall = self.members.per_output(layer.get_parameter("weight_scale_2"))
        return layer.get_parameter("weight_scale").float() * overall.unsqueeze(1)


class Fp8BlockWeightLinear(WeightLinear):
    """``weight`` ``[O, I]`` float8_e4m3fn and ``weight_scale`` ``[R, 1, C, 1]``, 128 square.

    No op multiplies plain inputs by such weights. So they are brought to the model's dtype once,
    when the layer is finalized, and take its memory from then on.
    """

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> BoundKernel[Any, Any]:
        """Register the numbers and their scales, and return a kernel for plain weights.

        Raises: ConfigError: a block lies across two layers.
        """
        sizes = self.members.sizes
        if len(sizes) > 1 and any(size % _BLOCK for size in sizes.values()):
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ConfigError(
                f"{site.prefix}: blocks of {_BLOCK} rows do not divide the outputs of the layers "
                f"that are fused there: {listed}. Try: leave them out when the model is quantized"
            )
        rows, columns = -(-out_features // _BLOCK), -(-in_features // _BLOCK)
        register(
            layer,
            weight=torch.empty(out_features, in_features, dtype=FORMAT),
            weight_scale=torch.empty(rows, 1, columns, 1, dtype=torch.float32),
        )
        return site.bind_kernel(linear, in_features=in_features, out_features=out_features)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]`` that is multiplied by, in the model's dtype."""
        return self._plain(layer).double()

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the weight in the model's dtype.

        Raises: CheckpointError: a scale is not a positive number.
        """
        self.members.check(layer.get_parameter("weight_scale"), "weight_scale")
        return {"weight": self._plain(layer)}

    def _plain(self, layer: nn.Module) -> torch.Tensor:
        weight, scales = layer.get_parameter("weight"), layer.get_parameter("weight_scale")
        num_rows, num_columns = weight.shape
        by_row = scales[:, 0, :, 0].repeat_interleave(_BLOCK, 0)[:num_rows]
        by_number = by_row.repeat_interleave(_BLOCK, 1)[:, :num_columns]
        return (weight.float() * by_number).to(self.dtype)


def _offset_codes(layer: nn.Module) -> torch.Tensor:
    """Return ``[O, I]`` uint8: the integers in ``weight``, each plus 8."""
    packed = layer.get_parameter("weight").data
    return torch.stack((packed & 15, packed >> 4), 1).flatten(0, 1) ^ _SIGN


def _int8_kernel(
    site: Site, in_features: int, out_features: int, group_size: int
) -> BoundKernel[Any, Any]:
    return site.bind_kernel(
        w8a16_linear,
        in_features=in_features,
        out_features=out_features,
        group_size=group_size,
        num_groups=in_features // group_size,
        asymmetric=False,
    )
