"""Shared parts of the cases of linear layers with quantized weights.

I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interposer import Case, Dims
from interposer_testing.cases import longest_row, normal, peak

WITH_OUT_DTYPE = 2
"""Roundings to ``out_dtype``: of the kernel's result and of the reference's result. The bias is
added before the rounding, where the scales are applied."""

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class LinearFormat:
    """Functions that draw and dequantize the arguments of a linear op with one weight format.

    Attributes:
        draw: returns the arguments without a bias, from dims, the shape of ``x`` without I, dtype,
            generator and options; draws the weight first.
        dequantize: returns ``x`` and the weight ``[O, I]`` in the float dtype passed to it.
        scalings: see ``linear_case``.
        stored_product: see ``linear_case``.
        beside: returns the ``beside`` of ``linear_case`` from the arguments and the weight.
    """

    draw: Callable[..., dict[str, Any]]
    dequantize: Callable[[Arguments, torch.dtype], tuple[Tensor, Tensor]]
    scalings: int
    stored_product: bool = False
    beside: Callable[[Arguments, Tensor], float] = lambda _, __: 0.0

    def case(
        self,
        dims: Dims,
        rows: tuple[int, ...],
        dtype: torch.dtype,
        generator: torch.Generator,
        *,
        biased: bool,
        **options: Any,
    ) -> Case:
        """Draw arguments with ``options``, and a bias if ``biased``, and build their case."""
        arguments = self.draw(dims, rows, dtype, generator, **options)
        bias = bias_of(int(dims["out_features"]), dtype, generator, biased)
        x, weight = self.dequantize(arguments, torch.float64)
        bounds = self.scalings, self.beside(arguments, weight)
        arguments["bias"] = bias
        stored = self.stored_product
        return linear_case(arguments, dims, x, weight, bias, *bounds, stored_product=stored)

    def sample(self, dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
        """Make T rows of hidden states and a weight, with a bias if the dims state ``biased``."""
        generator = torch.Generator().manual_seed(seed)
        arguments = self.draw(dims, (num_tokens,), dtype, generator)
        # A separate seed, so that the bias does not depend on the number of tokens drawn before.
        generator.manual_seed(seed + 1)
        biased = bool(dims.get("biased"))
        arguments["bias"] = bias_of(int(dims["out_features"]), dtype, generator, biased)
        x, weight = self.dequantize(arguments, torch.float32)
        bounds = self.scalings, self.beside(arguments, weight)
        stored = self.stored_product
        return sampled_case(arguments, dims, x, weight, *bounds, stored_product=stored)


def linear_case(
    arguments: Arguments,
    dims: Dims,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scalings: int,
    beside: float = 0.0,
    *,
    stored_product: bool = False,
) -> Case:
    """Build the case of x weight^T + bias, and add ``biased`` to the dims.

    Args:
        x: ``[..., I]`` float64, dequantized.
        weight: ``[O, I]`` float64, dequantized.
        scalings: number of float32 multiplications of each term or of the sum; each counts like an
            addition.
        beside: bound of sums that a kernel may add and subtract again.
        stored_product: True if a kernel may round the matmul before the bias is added.
    """
    terms = peak(x.abs() @ weight.abs().T) + beside
    return Case(
        "",
        arguments,
        {**dims, "biased": bias is not None},
        reduction=weight.shape[1] + scalings + 1,
        magnitude=terms + (0.0 if bias is None else peak(bias)),
        rounded=peak(x @ weight.T) if stored_product and bias is not None else 0.0,
    )


def sampled_case(
    arguments: Arguments, dims: Dims, x: Tensor, weight: Tensor, scalings: int, beside: float = 0.0,
    *, stored_product: bool = False,
) -> Case:  # fmt: skip
    """Build the case of a tuning sample, with error bounds from the norms of rows.

    Args:
        x: ``[T, I]``, dequantized.
        weight: ``[O, I]``, dequantized.
        beside: see ``linear_case``.
        stored_product: see ``linear_case``.
    """
    terms, bias = longest_row(x) * longest_row(weight) + beside, arguments["bias"]
    return Case(
        f"{x.shape[0]} tokens",
        arguments,
        dims,
        reduction=weight.shape[1] + scalings + (bias is not None),
        magnitude=terms + (0.0 if bias is None else peak(bias)),
        rounded=terms if stored_product and bias is not None else 0.0,
    )


def bias_of(
    out_features: int, dtype: torch.dtype, generator: torch.Generator, present: bool = True
) -> Tensor | None:
    """Draw a bias ``[O]``, or return None if not ``present``."""
    return normal((out_features,), dtype, generator) if present else None


def features_of(dims: Dims) -> tuple[int, int]:
    """Return the numbers of input and output features in ``dims``."""
    return int(dims["in_features"]), int(dims["out_features"])


def scaled_groups(codes: Tensor, scales: Tensor, zero: Tensor | float = 0.0) -> Tensor:
    """Dequantize groups: (codes ``[..., I]`` - ``zero``) * scales ``[..., I / G]``."""
    groups = codes.unflatten(-1, (scales.shape[-1], codes.shape[-1] // scales.shape[-1]))
    offset = zero.unsqueeze(-1) if isinstance(zero, Tensor) else zero
    result: Tensor = ((groups - offset) * scales.unsqueeze(-1)).flatten(-2)
    return result
