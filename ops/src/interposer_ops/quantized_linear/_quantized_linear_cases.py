"""Cases of projections by quantized weights: what those of all formats share.

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
"""Roundings to ``out_dtype``: of the result, and of what is expected, which is rounded to it as
well. The bias is added before, where the scales are applied."""

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class LinearFormat:
    """The arguments of a projection by weights of one format, and what they stand for.

    Attributes:
        drawn: returns the arguments by dims, the shape of ``x`` without I, dtype, generator and
            options; those of the weight are drawn first, and there is no bias yet.
        dequantized: returns ``x`` and the weight ``[O, I]`` in a float dtype that is given.
        scalings, stored_product: as of ``linear_case``.
        beside: returns what it is in ``linear_case``, by the arguments and the weight.
    """

    drawn: Callable[..., dict[str, Any]]
    dequantized: Callable[[Arguments, torch.dtype], tuple[Tensor, Tensor]]
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
        """Return the case of arguments that are drawn with ``options``, and of a bias."""
        arguments = self.drawn(dims, rows, dtype, generator, **options)
        bias = bias_of(int(dims["out_features"]), dtype, generator, biased)
        x, weight = self.dequantized(arguments, torch.float64)
        bounds = self.scalings, self.beside(arguments, weight)
        given = {**arguments, "bias": bias}
        stored = self.stored_product
        return linear_case(given, dims, x, weight, bias, *bounds, stored_product=stored)

    def sample(self, dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
        """Return T rows of hidden states and a weight, with the bias that the dims state."""
        generator = torch.Generator().manual_seed(seed)
        arguments = self.drawn(dims, (num_tokens,), dtype, generator)
        # Of its own seed: it must not depend on how many tokens were drawn before.
        generator.manual_seed(seed + 1)
        biased = bool(dims.get("biased"))
        arguments["bias"] = bias_of(int(dims["out_features"]), dtype, generator, biased)
        x, weight = self.dequantized(arguments, torch.float32)
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
    """Return the case of x weight^T + bias, whose dims state ``biased`` besides.

    Args:
        x: ``[..., I]`` float64, dequantized.
        weight: ``[O, I]`` float64, dequantized.
        scalings: float32 multiplications of each term or of their sum, whose roundings count as
            additions do.
        beside: bound of sums that a kernel may add and subtract again.
        stored_product: whether the product may be rounded before the bias is added to it.
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
    """Return the case of a sample, whose bounds come from the lengths of rows.

    Args:
        x: ``[T, I]``, dequantized.
        weight: ``[O, I]``, dequantized.
        beside, stored_product: as of ``linear_case``.
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
    """Return a bias, or None where it is not ``present``."""
    return normal((out_features,), dtype, generator) if present else None


def features_of(dims: Dims) -> tuple[int, int]:
    """Return how many input and output features there are."""
    return int(dims["in_features"]), int(dims["out_features"])


def scaled_groups(codes: Tensor, scales: Tensor, zero: Tensor | float = 0.0) -> Tensor:
    """Return ``[..., I]`` codes less ``zero``, times the ``[..., I / G]`` scale of each group."""
    groups = codes.unflatten(-1, (scales.shape[-1], codes.shape[-1] // scales.shape[-1]))
    offset = zero.unsqueeze(-1) if isinstance(zero, Tensor) else zero
    result: Tensor = ((groups - offset) * scales.unsqueeze(-1)).flatten(-2)
    return result
