"""FP8, MXFP8, MXFP4 and NVFP4 weight formats of compressed-tensors.

Dimensions: O output features, I input features, N groups of an output.

Source: the layouts are those of compressed-tensors 0.20; the formats are those of the OCP
Microscaling Formats (MX) Specification v1.0 and NVIDIA's NVFP4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interposer_ops.quantizers import (
    E2M1_MAX,
    MX_BLOCK_SIZE,
    NVFP4_BLOCK_SIZE,
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    pack_nibbles,
    shared_exponents,
    unpack_nibbles,
)
from interposer_quantization.writing._weight_format import Grid, WeightFormat, meta, storable_scale

_E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0
_E8M0_BIAS = 127
_E8M0_MAX = 254


class Fp8Format(WeightFormat):
    """FP8: ``weight`` ``[O, I]`` float8_e4m3fn, a scale per output, inputs quantized per token."""

    storage = "float-quantized"

    def weight_settings(self) -> Mapping[str, Any]:
        """Return the ``weights`` entry of a group in ``quantization_config``."""
        return _settings(8, "channel", None)

    def input_settings(self) -> Mapping[str, Any]:
        """Return the ``input_activations`` entry of a group in ``quantization_config``."""
        return {**_settings(8, "token", None), "dynamic": True}

    def stored(
        self, weight: torch.Tensor, grid: Grid, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Quantize a weight to ``weight`` and ``weight_scale`` ``[O, 1]`` in ``dtype``."""
        quantized = self.codes(self.groups(weight), grid).flatten(1)
        return {"weight": quantized.to(_E4M3), "weight_scale": grid.scale.to(dtype)}

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return meta-device tensors with the shapes and dtypes that ``rounded`` returns."""
        rows, columns = shape
        return {"weight": meta(_E4M3, rows, columns), "weight_scale": meta(dtype, rows, 1)}

    def read(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Dequantize the stored tensors to the float32 weight ``[O, I]``."""
        return tensors["weight"].float() * tensors["weight_scale"].float()

    def _span(
        self,
        low: torch.Tensor,
        high: torch.Tensor,
        dtype: torch.dtype,
        tensor_scale: torch.Tensor | None,
    ) -> Grid:
        return Grid(storable_scale(torch.maximum(-low, high) / _E4M3_MAX, dtype))

    def _rounded(self, quotients: torch.Tensor) -> torch.Tensor:
        return _e4m3(quotients)


class _MxFormat(WeightFormat):
    """Base of MX formats: groups of 32 inputs share a power-of-two scale, stored as an exponent."""

    inputs_per_scale = MX_BLOCK_SIZE
    _bits: int
    _largest_exponent: int

    def weight_settings(self) -> Mapping[str, Any]:
        """Return the ``weights`` entry of a group in ``quantization_config``."""
        return {
            **_settings(self._bits, "group", self.inputs_per_scale),
            "scale_dtype": "torch.uint8",
        }

    def _span(
        self,
        low: torch.Tensor,
        high: torch.Tensor,
        dtype: torch.dtype,
        tensor_scale: torch.Tensor | None,
    ) -> Grid:
        peaks = torch.maximum(-low, high)
        exponents = shared_exponents(peaks, self._largest_exponent).int()
        # Raise the exponent where the peak would saturate. The largest e4m3 value is 448 =
        # 1.75 * 2^8. The largest e2m1 value, 6, is the nearest one for peaks up to 7 = 1.75 * 2^2.
        exponents += torch.frexp(peaks).mantissa >= 1.75 / 2
        exponents = torch.where(peaks > 0, exponents.clamp(max=_E8M0_MAX), _E8M0_BIAS)
        return Grid(decode_e8m0(exponents.to(torch.uint8), torch.float32))


class Mxfp8Format(_MxFormat):
    """MXFP8: ``weight`` ``[O, I]`` float8_e4m3fn and ``weight_scale`` ``[O, I / 32]`` uint8.

    Inputs are quantized to MXFP8 as well, because MXFP8 matmul units take both operands in MXFP8.
    """

    storage = "mxfp8-quantized"
    _bits = 8
    _largest_exponent = 8

    def input_settings(self) -> Mapping[str, Any]:
        """Return the ``input_activations`` entry of a group in ``quantization_config``."""
        return {**self.weight_settings(), "dynamic": True}

    def stored(
        self, weight: torch.Tensor, grid: Grid, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Quantize a weight to ``weight`` and ``weight_scale``."""
        quantized = self.codes(self.groups(weight), grid).flatten(1)
        return {"weight": quantized.to(_E4M3), "weight_scale": _exponents(grid.scale)}

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return meta-device tensors with the shapes and dtypes that ``rounded`` returns."""
        rows, columns = shape
        return {
            "weight": meta(_E4M3, rows, columns),
            "weight_scale": meta(torch.uint8, rows, columns // self.inputs_per_scale),
        }

    def read(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Dequantize the stored tensors to the float32 weight ``[O, I]``."""
        scale = decode_e8m0(tensors["weight_scale"], torch.float32)
        groups = self.groups(tensors["weight"].float())
        return (groups * scale.unsqueeze(-1)).flatten(1)

    def _rounded(self, quotients: torch.Tensor) -> torch.Tensor:
        return _e4m3(quotients)


class Mxfp4Format(_MxFormat):
    """MXFP4: ``weight_packed`` ``[O, I / 2]`` uint8 and ``weight_scale`` ``[O, I / 32]`` uint8."""

    storage = "mxfp4-pack-quantized"
    _bits = 4
    _largest_exponent = 2

    def stored(
        self, weight: torch.Tensor, grid: Grid, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Quantize a weight to ``weight_packed``, low nibble first, and ``weight_scale``."""
        quantized = self.codes(self.groups(weight), grid).flatten(1)
        packed = pack_nibbles(encode_e2m1(quantized))
        return {"weight_packed": packed, "weight_scale": _exponents(grid.scale)}

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return meta-device tensors with the shapes and dtypes that ``rounded`` returns."""
        rows, columns = shape
        return {
            "weight_packed": meta(torch.uint8, rows, columns // 2),
            "weight_scale": meta(torch.uint8, rows, columns // self.inputs_per_scale),
        }

    def read(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Dequantize the stored tensors to the float32 weight ``[O, I]``."""
        quantized = decode_e2m1(unpack_nibbles(tensors["weight_packed"]), torch.float32)
        scale = decode_e8m0(tensors["weight_scale"], torch.float32)
        return (self.groups(quantized) * scale.unsqueeze(-1)).flatten(1)

    def _rounded(self, quotients: torch.Tensor) -> torch.Tensor:
        return _e2m1(quotients)


class Nvfp4Format(WeightFormat):
    """NVFP4: ``weight_packed`` ``[O, I / 2]`` and ``weight_scale`` ``[O, I / 16]`` float8_e4m3fn.

    Group scales are divided by ``weight_global_scale`` ``[1]`` float32, and so brought into the
    range of e4m3.
    """

    storage = "nvfp4-pack-quantized"
    inputs_per_scale = NVFP4_BLOCK_SIZE
    shares_tensor_scale = True

    def weight_settings(self) -> Mapping[str, Any]:
        """Return the ``weights`` entry of a group in ``quantization_config``."""
        return {
            **_settings(4, "tensor_group", self.inputs_per_scale),
            "scale_dtype": "torch.float8_e4m3fn",
        }

    def tensor_scale(self, peak: torch.Tensor) -> torch.Tensor:
        """Return the NVFP4 global scale that maps ``peak`` to the largest representable value."""
        scale = _E4M3_MAX * E2M1_MAX / peak
        # The scale of a tensor of zeros is infinite.
        return torch.where(scale.isfinite(), scale, 1.0)

    def stored(
        self, weight: torch.Tensor, grid: Grid, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Quantize a weight to ``weight_packed``, low nibble first, group and global scales."""
        assert grid.tensor_scale is not None
        quantized = self.codes(self.groups(weight), grid).flatten(1)
        return {
            "weight_packed": pack_nibbles(encode_e2m1(quantized)),
            "weight_scale": grid.scale.to(_E4M3),
            "weight_global_scale": grid.tensor_scale,
        }

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return meta-device tensors with the shapes and dtypes that ``rounded`` returns."""
        rows, columns = shape
        return {
            "weight_packed": meta(torch.uint8, rows, columns // 2),
            "weight_scale": meta(_E4M3, rows, columns // self.inputs_per_scale),
            "weight_global_scale": meta(torch.float32, 1),
        }

    def read(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Dequantize the stored tensors to the float32 weight ``[O, I]``."""
        quantized = decode_e2m1(unpack_nibbles(tensors["weight_packed"]), torch.float32)
        step = tensors["weight_scale"].float() / tensors["weight_global_scale"]
        return (self.groups(quantized) * step.unsqueeze(-1)).flatten(1)

    def _span(
        self,
        low: torch.Tensor,
        high: torch.Tensor,
        dtype: torch.dtype,
        tensor_scale: torch.Tensor | None,
    ) -> Grid:
        assert tensor_scale is not None
        ideal = torch.maximum(-low, high) / E2M1_MAX * tensor_scale
        # A group far below the tensor's peak gets the smallest positive e4m3 scale, never 0.
        smallest = torch.finfo(_E4M3).smallest_normal * torch.finfo(_E4M3).eps
        scale = ideal.clamp(smallest, _E4M3_MAX).to(_E4M3).float()
        return Grid(scale, tensor_scale=tensor_scale)

    def _rounded(self, quotients: torch.Tensor) -> torch.Tensor:
        return _e2m1(quotients)


def _e4m3(quotients: torch.Tensor) -> torch.Tensor:
    return quotients.clamp(-_E4M3_MAX, _E4M3_MAX).to(_E4M3).float()


def _e2m1(quotients: torch.Tensor) -> torch.Tensor:
    return decode_e2m1(encode_e2m1(quotients), torch.float32)


def _exponents(powers: torch.Tensor) -> torch.Tensor:
    """Return the biased exponents (uint8) of scales that are powers of two."""
    # frexp returns mantissas in [0.5, 1), so its exponent is one too high.
    return (torch.frexp(powers).exponent - 1 + _E8M0_BIAS).to(torch.uint8)


def _settings(bits: int, strategy: str, group_size: int | None) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "float",
        "symmetric": True,
        "group_size": group_size,
        "strategy": strategy,
        "dynamic": False,
    }
