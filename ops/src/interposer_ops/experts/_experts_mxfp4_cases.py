"""Cases of experts in MXFP4. T tokens, H hidden size, E experts, I intermediate size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from interposer import Case, Dims
from interposer_ops._case_numbers import normal_numbers
from interposer_ops.experts._expert_bounds_cases import (
    ACTIVATIONS,
    EVEN_SHAPES,
    RANKS,
    Shape,
    Weights,
    bounded_case,
    evenly_routed,
    routed,
    sampled_case,
    shape_of,
    spread,
)
from interposer_ops.quantizers._small_floats import decode_e2m1, decode_e8m0, unpack_nibbles
from interposer_testing.cases import Axis, CaseSpace, Point, normal

# Powers of two that the scales of a matrix differ by.
_EXPONENTS = {"": 3, "equal": 1, "far apart": 12}


def _mxfp4(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    tokens, hidden, inner, num_experts, _ = point["shape"]
    weights, first, second = _weights(point["shape"], point["exponents"], generator)
    biases = (
        {"gate_up": None, "down": None}
        if not point["bias"]
        else {
            "gate_up": normal((num_experts, 2 * inner), dtype, generator),
            "down": normal((num_experts, hidden), dtype, generator),
        }
    )
    arguments = {
        # Far from 0 the clamps of swiglu_oai act.
        "x": normal((tokens, hidden), dtype, generator, point["scale"]),
        **_biased(weights, biases),
        **routed(point, generator),
        "activation": point["activation"],
    }
    return bounded_case(arguments, first, second, {"biased": point["bias"]})


fused_experts_mxfp4_cases = CaseSpace(
    _mxfp4,
    Axis("shape", {**EVEN_SHAPES, "wide": (2, 160, 96, 3, 2)}),
    Axis("exponents", _EXPONENTS),
    Axis("bias", {"": False, "biases": True}),
    Axis("activation", ACTIVATIONS),
    Axis("ranks", RANKS),
    Axis("scale", {"": 1.0, "large": 8.0}),
    strided={"x": "rows", "gate_up_scale": "offset", "down": "offset"},
    crossed={
        "shape": ("many tokens",),
        "exponents": ("",),
        "bias": ("biases",),
        "activation": ("",),
        "ranks": ("",),
        "scale": ("",),
    },
    alone={"shape": ("no tokens",), "ranks": ("all on other ranks",)},
    valid=lambda point, _: (
        not (point["scale"] != 1.0 and (point["bias"] or point["ranks"] != "none"))
        and not (point.labels["exponents"] and (point["scale"] != 1.0 or point["ranks"] != "none"))
    ),
)
"""All codes, scales that are equal, near or far apart, and biases.

The scales of experts that no token chose are NaN.
"""


def fused_experts_mxfp4_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of hidden states that spread evenly over experts in MXFP4."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = int(dims["hidden_size"]), int(dims["intermediate_size"])
    num_experts = int(dims["num_experts"])
    weights, first, second = _weights(shape_of(dims, num_tokens), _EXPONENTS[""], generator)
    biases = (
        {"gate_up": None, "down": None}
        if not dims["biased"]
        else {
            "gate_up": normal_numbers((num_experts, 2 * inner), dtype, generator),
            "down": normal_numbers((num_experts, hidden), dtype, generator),
        }
    )
    x = normal_numbers((num_tokens, hidden), dtype, generator)
    arguments = {"x": x, **_biased(weights, biases), **evenly_routed(dims, num_tokens, generator)}
    return sampled_case(arguments, first, second, dims, num_tokens)


def _biased(
    weights: dict[str, torch.Tensor], biases: Mapping[str, torch.Tensor | None]
) -> dict[str, torch.Tensor | None]:
    """Return the arguments of both projections in the order of the op."""
    names = ("gate_up", "gate_up_scale", "gate_up_bias", "down", "down_scale", "down_bias")
    return {name: weights.get(name, biases.get(name.removesuffix("_bias"))) for name in names}


def _weights(shape: Shape, num_exponents: int, generator: torch.Generator) -> Weights:
    """Return the arguments of weights, and the matrices that they stand for, in float32."""

    def quantized(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        packed = torch.randint(
            256, (num_experts, rows, columns // 2), dtype=torch.uint8, generator=generator
        )
        # Codes deviate by 2.9, so that sums deviate by about one where scales are the largest.
        largest = 127 - 2 - (columns - 1).bit_length() // 2
        least = largest - num_exponents + 1
        blocks = (num_experts, rows, columns // 32)
        scales = torch.randint(least, largest + 1, blocks, dtype=torch.uint8, generator=generator)
        codes = decode_e2m1(unpack_nibbles(packed), torch.float32)
        return packed, scales, spread(codes, decode_e8m0(scales, torch.float32))

    _, hidden, inner, num_experts, _ = shape
    first, first_scale, gate_up = quantized(2 * inner, hidden)
    second, second_scale, down = quantized(hidden, inner)
    arguments = {
        "gate_up": first,
        "gate_up_scale": first_scale,
        "down": second,
        "down_scale": second_scale,
    }
    return arguments, gate_up, down
