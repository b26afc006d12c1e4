"""Cases of the gated activations. I is the intermediate size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from interposer import Case
from interposer.op import Dims
from interposer_ops.cases.magnitude import peak
from interposer_ops.cases.numbers import normal_numbers

__all__ = [
    "gelu_and_mul_cases",
    "gelu_and_mul_sample",
    "silu_and_mul_cases",
    "silu_and_mul_sample",
]

_SHAPES = {
    "one row": (1, 128),
    "many rows": (33, 256),
    "odd width": (5, 2 * 63),
    "one element": (1, 2),
    "no rows": (0, 64),
    "three dimensions": (2, 3, 96),
    "wide": (2, 2 * 2051),
}
# Where exponentials underflow and overflow, and where the two forms of GELU differ.
_GATES = (-1e3, -104.0, -88.5, -20.0, -3.0, -1e-3, -0.0, 0.0, 1e-3, 3.0, 20.0, 88.5, 1e3)


def silu_and_mul_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield rows of several shapes and gates at which exponentials leave the float range."""
    generator = torch.Generator().manual_seed(seed)
    for label, x in _inputs(dtype, generator):
        yield _case(label, {"x": x})


def gelu_and_mul_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield the inputs of ``silu_and_mul`` for both forms of GELU."""
    for approximate in ("none", "tanh"):
        generator = torch.Generator().manual_seed(seed)
        for label, x in _inputs(dtype, generator):
            arguments = {"x": x, "approximate": approximate}
            yield _case(f"{label}, {approximate}", arguments)


def silu_and_mul_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return T rows of the merged gate and up projections."""
    return _case(f"{num_tokens} tokens", {"x": _sampled(dtype, dims, num_tokens, seed)})


def gelu_and_mul_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Return the sample of ``silu_and_mul`` for the form of GELU that most models use."""
    x = _sampled(dtype, dims, num_tokens, seed)
    return _case(f"{num_tokens} tokens", {"x": x, "approximate": "tanh"})


def _sampled(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, 2 * int(dims["intermediate_size"]))
    return normal_numbers(shape, dtype, generator, deviation=2.0)


def _inputs(dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    for label, shape in _SHAPES.items():
        yield label, (2 * torch.randn(shape, generator=generator)).to(dtype)
    gates = torch.tensor(_GATES)
    ups = 2 * torch.rand(3, len(_GATES), generator=generator) - 1
    yield "saturated gates", torch.cat((gates.expand(3, -1), ups), dim=-1).to(dtype)
    # Cut after the conversion, which would copy them into dense rows.
    yield "strided rows", torch.randn(4, 192, generator=generator).to(dtype)[:, 32:160]


def _case(label: str, arguments: Mapping[str, object]) -> Case:
    """Return the case of ``x``.

    An activation takes about four float32 operations, and 1 + erf cancels down to the error of 1,
    so that the error is one of the gate times the other half.
    """
    x = arguments["x"]
    assert isinstance(x, torch.Tensor)
    gate, up = x.float().chunk(2, dim=-1)
    dims = {"intermediate_size": gate.shape[-1]}
    return Case(label, arguments, dims, reduction=4, magnitude=peak(gate) * peak(up))
