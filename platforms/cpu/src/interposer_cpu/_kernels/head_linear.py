"""Linear layers of heads with quantized weights.

Dimensions: N heads, T tokens, I input features, O output features of a head.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn
from torch.compiler import is_compiling

from interposer import LinearMethod, Site
from interposer.errors import ConfigError
from interposer_cpu._kernels.fusion import UNQUANTIZED, InputQuantization, input_quantization
from interposer_cpu._kernels.interface import CODE_TYPES, TYPES
from interposer_cpu._kernels.quantizers import quantize_int8_per_token
from interposer_cpu.native import library
from interposer_ops.layers.head_linear import HeadLinear, HeadWeight

_BLOCK = 64  # outputs that are packed together, kBlock in native/linear/packed.h
_INT8 = CODE_TYPES[torch.int8]


def operand_inputs(operand: Any) -> InputQuantization:
    """Return the quantization of inputs for a prepared weight of heads."""
    return InputQuantization(tuple(operand[2])) if _is_quantized(operand) else UNQUANTIZED


def _is_quantized(operand: Any) -> bool:
    # Plain tuples, which a file of packed weights can store: packed weight and number of outputs,
    # as of ``batched_linear``, and the fields of the inputs' quantization if weights are quantized.
    return type(operand) is tuple and len(operand) == 3


@final
class NativeHeadLinear(HeadLinear):
    """Heads whose plain weights are quantized as the other linear layers of the model.

    The weights of all heads are quantized and packed as one linear layer of N O outputs. Heads keep
    the dtype of the model without such a scheme, if the checkpoint stores quantized weights, if O
    is no multiple of 64, if the scheme's groups do not divide I, and if the library lacks the
    scheme's kernels.
    """

    def __init__(self, site: Site, num_heads: int, in_features: int, out_features: int) -> None:
        super().__init__(site, num_heads, in_features, out_features)
        self._method = self._create_method(site)

    def _create_method(self, site: Site) -> LinearMethod | None:
        """Return the scheme's method for plain weights of this layer; None to keep them plain."""
        scheme = site.resolver.scheme
        if scheme is None or self.out_features % _BLOCK:
            return None
        method: LinearMethod | None = scheme.linear_method(
            site.prefix, (site.prefix.rpartition(".")[2],)
        )
        if method is None or not method.quantizes_plain_weights:
            return None
        outputs = self.num_heads * self.out_features
        try:
            method.create_weights(nn.Module(), site, self.in_features, outputs, bias=False)
        except ConfigError:
            return None  # the scheme's groups do not divide the inputs of a head
        return method

    def quantizes(self) -> bool:
        """Say whether ``prepared`` quantizes the weight."""
        return self._method is not None

    def prepared(self, weight: torch.Tensor) -> HeadWeight:
        """Quantize a weight ``[N, O, I]`` if the scheme does, and prepare it for the kernel."""
        method = self._method
        if method is None:
            return super().prepared(weight)
        values = method.dequantized(_one_layer(weight))
        kernel, operands = method.finalize(_one_layer(weight))
        inputs = input_quantization(kernel)
        rounded = weight if values is None else values.to(weight.dtype).view_as(weight)
        if inputs is None or not _takes(inputs):
            return super().prepared(rounded)
        return HeadWeight((*operands[0], inputs.fields), rounded)

    def project(self, x: torch.Tensor, operand: Any) -> torch.Tensor:
        """Multiply ``x`` ``[N, T, I]`` by a prepared weight head by head; return ``[N, T, O]``."""
        if not _is_quantized(operand):
            return super().project(x, operand)
        packed, _, fields = operand
        dtype = x.dtype
        out = torch.empty(x.shape[0], x.shape[1], self.out_features, dtype=dtype)
        scales = packed  # stands for None
        if fields != UNQUANTIZED.fields:
            x, scales = quantize_int8_per_token(x.contiguous())
        elif x.stride(2) != 1:
            x = x.contiguous()
        if is_compiling():
            torch.ops.interposer_cpu.multiply_batch_out(out, x, packed, scales)
            return out
        library().multiply_batch(
            packed.data_ptr(),
            x.data_ptr(),
            0 if scales is packed else scales.data_ptr(),
            TYPES[dtype] if scales is packed else _INT8,
            out.data_ptr(),
            TYPES[dtype],
            x.shape[0],
            x.shape[1],
            self.out_features,
            x.stride(0),
            x.stride(1),
        )
        return out


def _takes(inputs: InputQuantization) -> bool:
    """Check for plain inputs, or int8 inputs with one dynamic scale per row."""
    return inputs in (UNQUANTIZED, InputQuantization((_INT8, 0, 0, 0)))


def _one_layer(weight: torch.Tensor) -> nn.Module:
    """Return a module with a weight ``[N, O, I]`` as that of one linear layer, ``[N O, I]``."""
    layer = nn.Module()
    parameter = nn.Parameter(weight.flatten(0, 1), requires_grad=False)
    layer.register_parameter("weight", parameter)
    layer.register_parameter("bias", None)
    return layer
