# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Compare conversions of Triton's interpreter with torch's, all as JSON.

In a process of its own with TRITON_INTERPRET=1: triton decides when it is imported.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

from interposer_testing.exact_interpreter import make_exact

NARROW = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def convert(source, target, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(target + place, tl.load(source + place).to(target.dtype.element_ty))


@triton.jit
def double(source, target, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    value = tl.load(source + place)
    tl.store(target + place, value + value)


@triton.jit
def multiply(one, other, target, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    place = row * SIZE + column
    product = tl.dot(tl.load(one + place), tl.load(other + place))
    tl.store(target + place, product)


def converted(source: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the interpreter converts every number as torch does."""
    target = torch.empty(source.shape, dtype=dtype)
    convert[(1,)](source, target, COUNT=source.numel())
    results, expected = target.double(), source.to(dtype).double()
    return bool(((results == expected) | (results.isnan() & expected.isnan())).all())


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return float32 numbers at, between and half way between those of ``dtype``, and larger."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.arange(2**16 if dtype.itemsize == 2 else 2**8)
    every = bits.to(torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype).float()
    every = every[every.isfinite()].sort().values.unique()
    half_way = (every[1:].double() + every[:-1].double()).mul(0.5).float()
    drawn = torch.randn(2**12, generator=generator) * torch.finfo(dtype).max ** 0.5
    mixed = torch.cat((every, half_way, drawn, torch.tensor([torch.nan, 0.0, -0.0])))
    mixed = mixed[~(mixed.abs() > torch.finfo(dtype).max)]  # what overflows depends on the device
    count = triton.next_power_of_2(mixed.numel())
    return torch.cat((mixed, torch.zeros(count - mixed.numel())))


def conversions() -> dict[str, bool]:
    """Return whether each conversion is right, there and back."""
    results = {}
    for dtype in NARROW:
        source = numbers(dtype)
        results[f"to {dtype}"] = converted(source, dtype)
        narrow = source.to(dtype)
        results[f"from {dtype}"] = converted(narrow, torch.float32)
    return results


def doubled() -> str:
    """Return how doubling 1.5 in bfloat16 ends."""
    target = torch.zeros(2, dtype=torch.bfloat16)
    try:
        double[(1,)](torch.tensor([1.5, -2.0], dtype=torch.bfloat16), target, COUNT=2)
    except triton.runtime.errors.InterpreterError as error:
        return str(error)
    return str(target.tolist())


def product() -> bool:
    """Return whether a product of bfloat16 matrices is that of their values."""
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randn(16, 16, generator=generator).to(torch.bfloat16) for _ in range(2))
    target = torch.empty(16, 16)
    multiply[(1,)](one, other, target, SIZE=16)
    return bool(torch.allclose(target, one.float() @ other.float(), atol=1e-4))


def main() -> None:
    before = {**conversions(), "doubled": doubled(), "product": product()}
    make_exact()
    after = {**conversions(), "doubled": doubled(), "product": product()}
    json.dump({"before": before, "after": after}, sys.stdout)


if __name__ == "__main__":
    main()
