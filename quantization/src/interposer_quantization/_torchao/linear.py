"""Linear layers of integers as torchao stores them in safetensors.

Dimensions: I input features, O output features, G groups.

Source: ``flatten_tensor_state_dict`` of torchao 0.18 for the names of tensors, ``Int8Tensor`` and
``IntxUnpackedToInt8Tensor`` for what they mean.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, LinearMethod, Site
from interposer.errors import CheckpointError, ConfigError
from interposer_ops.quantized_linear import w8a16_linear
from interposer_quantization._compressed_tensors.inputs import bound_rounding
from interposer_quantization._compressed_tensors.stored import Inputs
from interposer_quantization._fp8.parameters import Members, register
from interposer_quantization._torchao.config import Weights
from interposer_quantization._weights.packed_linear import register_stored

_WEIGHT, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"


class TorchAoLinear(LinearMethod):
    """``_weight_qdata`` ``[O, I]`` int8, ``_weight_scale`` and ``_weight_zero_point`` ``[O, G]``.

    A weight is (code - zero point) * scale. Scales are held in float32, which represents those of
    every checkpoint exactly. Where inputs are quantized, they are rounded to what their codes stand
    for, and multiplied in the model's dtype: no op takes both.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.round_input: Callable[[torch.Tensor], torch.Tensor] | None = None

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register what is stored and, if asked for, ``bias``.

        Raises: ConfigError: groups do not divide the inputs.
        """
        size = self.weights.inputs_per_scale or in_features
        num_groups, rest = divmod(in_features, size)
        if rest:
            raise ConfigError(
                f"{site.prefix}: groups of {size} do not divide its {in_features} inputs. "
                "Try: quantize with a group size that does, or leave the layer plain"
            )
        self.members = Members(layer, site, out_features)
        self._bind(site, in_features, out_features, size)
        tensors = {
            _WEIGHT: torch.empty(out_features, in_features, dtype=torch.int8),
            _SCALE: torch.empty(out_features, num_groups, dtype=torch.float32),
            "bias": torch.empty(out_features, dtype=site.dtype) if bias else None,
        }
        register(layer, **tensors)
        zeros = torch.empty(out_features, num_groups, dtype=torch.int8)

        def none(_: torch.Generator) -> torch.Tensor:
            return torch.zeros(out_features, num_groups, dtype=torch.int8)

        register_stored(layer, _ZERO, zeros, **({"sample": none} if self.weights.symmetric else {}))

    def _bind(self, site: Site, in_features: int, out_features: int, size: int) -> None:
        """Bind what is done with inputs, and the product."""
        if self.weights.inputs != "plain":
            symmetric = self.weights.inputs == "symmetric"
            inputs = Inputs("int", 8, symmetric, "token", None, static=False, exponents=False)
            self.round_input = bound_rounding(inputs, site, in_features)
        self.bound: BoundKernel[Any, Any] = site.bind_kernel(
            w8a16_linear,
            in_features=in_features,
            out_features=out_features,
            group_size=size,
            num_groups=in_features // size,
            asymmetric=not self.weights.symmetric,
        )

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each code less its zero point, times its scale."""
        codes, zeros, scales = (
            layer.get_parameter(name).double() for name in (_WEIGHT, _ZERO, _SCALE)
        )
        size = codes.shape[1] // scales.shape[1]
        return (codes - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``, rounded if inputs are."""
        return (x if self.round_input is None else self.round_input(x)).double()

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the bound kernel with its constants, prepared if it wants them so.

        Raises: CheckpointError: a scale is not a positive number, or a zero point not 0 though
            weights are symmetric.
        """
        self.members.check(layer.get_parameter(_SCALE), _SCALE)
        names = {"weight": _WEIGHT, "scale": _SCALE, "bias": "bias", "zero_points": _ZERO}
        stored = {operand: layer._parameters[name] for operand, name in names.items()}
        if self.weights.symmetric:
            self._check_symmetric(layer.get_parameter(_ZERO))
            stored["zero_points"] = None
            layer.register_parameter(_ZERO, None)
        prepared = self.bound.prepared(**stored)
        for operand, name in names.items():
            if prepared[operand] is not layer._parameters[name]:
                # The prepared copy replaces it; held twice it would double the memory.
                layer.register_parameter(name, None)
        kernel: Callable[..., torch.Tensor] = self.bound.function
        if self.round_input is not None:
            kernel = partial(_product_of_rounded, self.round_input, kernel)
        return kernel, tuple(prepared[operand] for operand in names)

    def _check_symmetric(self, zeros: torch.Tensor) -> None:
        for member, stored in zip(
            self.members.sizes, zeros.split(list(self.members.sizes.values())), strict=True
        ):
            if stored.any():
                raise CheckpointError(
                    self.members.tensor(member, _ZERO),
                    f"{int(stored.count_nonzero())} of {stored.numel()} zero points are not 0, "
                    "but quantization_config says that weights are symmetric",
                    "correct the quantization_config if the zero points are right",
                )


def _product_of_rounded(
    round_input: Callable[[torch.Tensor], torch.Tensor],
    kernel: Callable[..., torch.Tensor],
    x: torch.Tensor,
    *operands: Any,
) -> torch.Tensor:
    return kernel(round_input(x), *operands)
