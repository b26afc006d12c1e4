"""Products of inputs that are quantized when they come.

Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class CodedProduct:
    """The kernel of a ``LinearMethod`` that quantizes every token, then multiplies.

    It computes ``multiply(*quantize(x, *options), *operands)``, and says what both steps are made
    of, so that whoever computes several layers at once can do the same. Equal ones compute the
    same.

    Attributes:
        quantize: the bound kernel that returns the codes ``[T, I]`` and the scales, one or several
            for every token.
        product: the bound kernel that multiplies them.
        multiply: calls ``product`` in the order of its op, with what is no operand besides.
        options: what ``quantize`` takes behind ``x``.
    """

    quantize: Callable[..., Any]
    product: Callable[..., Tensor]
    multiply: Callable[..., Tensor]
    options: tuple[Any, ...] = ()

    def __call__(self, x: Tensor, *operands: Any) -> Tensor:
        """Return ``[T, O]`` of ``x`` ``[T, I]``."""
        codes, scales = self.quantize(x, *self.options)
        return self.multiply(codes, scales, *operands)


class StaticProduct(CodedProduct):
    """The same with one scale for all tokens, ``[1]``, which is the last operand.

    It computes ``multiply(quantize(x, scale, *options), scale, *others)``: ``quantize`` returns the
    codes alone.
    """

    __slots__ = ()

    def __call__(self, x: Tensor, *operands: Any) -> Tensor:
        """Return ``[T, O]`` of ``x`` ``[T, I]``."""
        *others, scale = operands
        codes = self.quantize(x, scale, *self.options)
        return self.multiply(codes, scale, *others)
