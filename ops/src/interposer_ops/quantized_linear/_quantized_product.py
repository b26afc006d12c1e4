"""Kernels that quantize their inputs, then compute a quantized GEMM.

T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class CodedProduct:
    """Kernel of a ``LinearMethod`` that quantizes each token's input, then computes a GEMM.

    Calling the kernel computes ``multiply(*quantize(x, *options), *operands)``. The attributes let
    a fused kernel for several layers run the same steps. Equal instances compute the same function.

    Attributes:
        quantize: the bound kernel that returns quantized values ``[T, I]`` and one or several
            scales per token.
        product: the bound GEMM kernel.
        multiply: calls ``product`` with the arguments in the order of its op.
        options: the arguments of ``quantize`` after ``x``.
    """

    quantize: Callable[..., Any]
    product: Callable[..., Tensor]
    multiply: Callable[..., Tensor]
    options: tuple[Any, ...] = ()

    def __call__(self, x: Tensor, *operands: Any) -> Tensor:
        """Quantize ``x`` ``[T, I]`` and return the GEMM's result ``[T, O]``."""
        quantized, scales = self.quantize(x, *self.options)
        return self.multiply(quantized, scales, *operands)


class StaticProduct(CodedProduct):
    """A ``CodedProduct`` with one static scale ``[1]`` for all tokens, passed as the last operand.

    Calling the kernel computes ``multiply(quantize(x, scale, *options), scale, *operands)``, where
    ``quantize`` returns only quantized values.
    """

    __slots__ = ()

    def __call__(self, x: Tensor, *operands: Any) -> Tensor:
        """Quantize ``x`` ``[T, I]`` and return the GEMM's result ``[T, O]``."""
        *gemm_operands, scale = operands
        quantized = self.quantize(x, scale, *self.options)
        return self.multiply(quantized, scale, *gemm_operands)
