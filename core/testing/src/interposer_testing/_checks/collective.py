"""Test cases of collectives: input and expected result of each rank.

Dimensions: N ranks, T rows, H hidden.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from interposer import Communicator
from interposer_testing._checks.fault import Fault

DTYPES = ("float32", "bfloat16", "float16", "int64")
"""The dtypes for a communicator whose record names no dtypes."""
SUMS = ("all_reduce", "reduce_scatter")
FUSED = "all_reduce_add_rms_norm"
EPS = 1e-5
_LENGTHS = (0, 1, 3, 1001, 4096, 40_000)
_UNEVEN = ((3, 3, 3, 3), (0, 5, 1, 2), (4, 0, 0, 0), (0, 0, 0, 0), (33, 129, 7, 64))
# T and H of fused all-reduce + RMSNorm.
_NORM_SHAPES = ((0, 64), (1, 96), (3, 1000), (70, 128))
# Sums of four integers up to 8 are exact in every 16-bit float.
_MAX_INTEGER = 8


@dataclass(frozen=True)
class CollectiveCase:
    """One call of a collective by every rank.

    Attributes:
        sizes: number of rows of each rank; equal for collectives that require equal sizes.
        tail: shape of one row.
        source: the rank that broadcasts.
        exact: the values are small integers, so their sums are exact.
        strided: the input is every second element of a buffer.
    """

    collective: str
    dtype: str
    sizes: tuple[int, ...]
    tail: tuple[int, ...] = ()
    source: int = 0
    exact: bool = True
    strided: bool = False

    def __str__(self) -> str:
        values = "whole numbers" if self.exact else "any numbers"
        layout = ", strided" if self.strided else ""
        rows = f"rows {[*self.sizes]} of {[*self.tail]}"
        return f"{self.collective} of {self.dtype}, {rows}, {values}{layout}"

    def sent(self, rank: int) -> list[int]:
        """Return the number of rows that ``rank`` sends to each rank in ``all_to_all``."""
        # Rank 1 receives nothing from anybody, so that empty messages are tested too.
        num = len(self.sizes)
        return [self.sizes[(rank + to) % num] * (to != 1) for to in range(num)]

    def rows(self, rank: int) -> int:
        """Return the number of input rows of ``rank``."""
        match self.collective:
            case "all_gather":
                return self.sizes[rank]
            case "reduce_scatter":
                return sum(self.sizes)
            case "all_to_all":
                return sum(self.sent(rank))
        return self.sizes[0]

    def num_bytes(self, rank: int) -> int:
        """Return the size of the input of ``rank`` in bytes."""
        return self.rows(rank) * torch.Size(self.tail).numel() * self._dtype.itemsize

    @cached_property
    def inputs(self) -> list[Tensor]:
        """The inputs of all ranks; every rank draws all inputs, so no input has to be sent."""
        return [self.fresh(rank) for rank in range(len(self.sizes))]

    def fresh(self, rank: int, device: str = "cpu") -> Tensor:
        """Draw the input of ``rank`` into new memory, which the caller may write to."""
        # Python's ``hash`` differs between processes, so use a checksum as seed.
        seed = zlib.crc32(f"{self} of {rank}".encode())
        generator = torch.Generator().manual_seed(seed)
        shape = (self.rows(rank), *self.tail)
        if self.exact:
            values = torch.randint(-_MAX_INTEGER, _MAX_INTEGER + 1, shape, generator=generator)
        else:
            values = torch.randn(shape, generator=generator) * 3
        values = values.to(self._dtype)
        if not self.strided:
            return values.to(device)
        buffer = values.new_zeros(*shape[:-1], 2 * shape[-1])
        buffer[..., ::2] = values
        return buffer.to(device)[..., ::2]

    def call(self, communicator: Communicator, rank: int, x: Tensor) -> Tensor:
        """Call the collective on ``rank`` and return the result.

        For fused all-reduce + RMSNorm, return normed output and residual stream as float32
        ``[2, T, H]``.
        """
        if self.collective == FUSED:
            residual, weight = (t.to(x.device) for t in self.stream)
            results = communicator.all_reduce_add_rms_norm(x, residual, weight, EPS)
            return torch.stack([result.to(torch.float32) for result in results])
        arguments: tuple[Any, ...] = (self.sizes,)
        match self.collective:
            case "all_reduce":
                arguments = ()
            case "broadcast":
                arguments = (self.source,)
            case "all_to_all":
                arguments = (self.sent(rank), self.received(rank))
        method = getattr(communicator, self.collective)
        return method(x, *arguments)  # type: ignore[no-any-return]

    def received(self, rank: int) -> list[int]:
        """Return the number of rows that ``rank`` receives from each rank in ``all_to_all``."""
        return [self.sent(sender)[rank] for sender in range(len(self.sizes))]

    def faults(self, rank: int, result: Any) -> Iterator[Fault]:
        """Compare the result of ``rank`` with the expected result.

        Sums of integers and moved rows must be exact. For other sums of N values x, the error bound
        is ((1 + u)^(N - 1) - 1) * sum(|x|): each of N - 1 additions rounds by at most u times
        the intermediate sum, which is at most sum(|x|). u is half the distance from 1 to the next
        number of the dtype. A communicator may also sum in float32 and round once; so the bound is
        the sum of the bounds for the dtype and for float32, plus the smallest normal number.
        """
        if self.collective == FUSED:
            yield from self._norm_faults(result)
            return
        expected, magnitude = self._expected(rank)
        where = str(self)
        if not isinstance(result, Tensor):
            yield Fault("shape", where, f"a tensor expected, got {type(result).__name__}")
            return
        if (result.shape, result.dtype) != (expected.shape, self._dtype):
            form = f"{[*expected.shape]} {self.dtype} expected"
            yield Fault("shape", where, f"{form}, got {[*result.shape]} {result.dtype}")
            return
        error_bound = torch.zeros_like(expected)
        if magnitude is not None:
            error_bound = self._bound_of_sum(magnitude)
        yield from self._compare(result, expected, error_bound)

    def _bound_of_sum(self, magnitude: Tensor) -> Tensor:
        num, tiny = len(self.sizes), torch.finfo(self._dtype).smallest_normal
        roundings = [torch.finfo(d).eps / 2 for d in (self._dtype, torch.float32)]
        return sum((1 + u) ** (num - 1) - 1 for u in roundings) * magnitude + tiny

    def _norm_faults(self, result: Tensor) -> Iterator[Fault]:
        """Compare output y and residual t of fused all-reduce + RMSNorm with expected values.

        Let the error of t be at most d, and e the root mean square of d. The root mean square r of
        a row is then off by at most e, because norms of vectors differ by at most the norm of the
        difference. So the error of y = w t / r is at most w (d / (r - e) + |t| e / (r (r - e))).
        In addition, t is rounded once, r is a float32 sum of H squares, and y is rounded at most
        four times.
        """
        residual, weight = (t.to(torch.float64) for t in self.stream)
        inputs = torch.stack([x.to(torch.float64) for x in self.inputs])
        stream = inputs.sum(0) + residual
        eps = torch.finfo(torch.float32).eps
        stream_error = self._bound_of_sum(inputs.abs().sum(0)) + eps * stream.abs()
        rms = (stream.square().mean(-1, keepdim=True) + EPS).sqrt()
        rms_error = stream_error.square().mean(-1, keepdim=True).sqrt() + self.tail[0] * eps * rms
        min_rms = rms - rms_error
        normed = stream / rms * weight
        error_bound = weight.abs() * (
            stream_error / min_rms + stream.abs() * rms_error / (rms * min_rms)
        )
        error_bound = error_bound + 4 * torch.finfo(self._dtype).eps * normed.abs()
        error_bound = error_bound + torch.finfo(self._dtype).smallest_normal
        if result.shape != (2, *stream.shape):
            form = f"twice {[*stream.shape]} expected"
            yield Fault("shape", str(self), f"{form}, got {[*result.shape]}")
            return
        bounds = torch.stack([error_bound, stream_error])
        yield from self._compare(result, torch.stack([normed, stream]), bounds)

    def _compare(self, actual: Tensor, expected: Tensor, error_bound: Tensor) -> Iterator[Fault]:
        """Yield a fault if the error of an element is above the bound."""
        where = str(self)
        error = (actual.cpu().to(expected.dtype) - expected).abs()
        is_wrong = ~(error <= error_bound)  # also true for NaN
        if bool(is_wrong.any()):
            index = int(is_wrong.reshape(-1).nonzero()[0])
            value, expected_value = (t.reshape(-1)[index].item() for t in (actual, expected))
            yield Fault(
                "value",
                where,
                f"{int(is_wrong.sum())} of {is_wrong.numel()} elements are wrong; element {index} "
                f"is {value:.6g}, expected {expected_value:.6g}",
                float(error.reshape(-1)[index]),
                float(error_bound.reshape(-1)[index]),
            )

    @cached_property
    def stream(self) -> tuple[Tensor, Tensor]:
        """The residual ``[T, H]`` in float32, as in models, and the norm weight ``[H]``."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"stream of {self}".encode()))
        residual = torch.randn((self.sizes[0], *self.tail), generator=generator)
        weight = torch.rand(self.tail, generator=generator) + 0.5
        return residual, weight.to(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    def _expected(self, rank: int) -> tuple[Tensor, Tensor | None]:
        """Return the expected result of ``rank``, and sum(|x|) if the sum may be rounded."""
        wide = torch.float64 if self._dtype.is_floating_point else torch.int64
        inputs = [x.to(wide) for x in self.inputs]
        match self.collective:
            case "all_gather":
                return torch.cat(inputs), None
            case "broadcast":
                return inputs[self.source], None
            case "all_to_all":
                parts = [x.split(self.sent(sender)) for sender, x in enumerate(inputs)]
                return torch.cat([part[rank] for part in parts]), None
        total, magnitude = torch.stack(inputs).sum(0), torch.stack(inputs).abs().sum(0)
        if self.collective == "reduce_scatter":
            total, magnitude = (t.split(self.sizes)[rank] for t in (total, magnitude))
        return total, None if self.exact else magnitude


def collective_cases(
    collective: str, num: int, dtypes: Sequence[str] = DTYPES
) -> list[CollectiveCase]:
    """Return the cases of a collective for ``num`` ranks; at most four ranks."""
    cases = []
    for dtype in dtypes or DTYPES:
        floats = getattr(torch, dtype).is_floating_point
        if collective == FUSED:
            cases += _norm_cases(dtype, num) if floats else []
            continue
        values = (True, False) if floats and collective in SUMS else (True,)
        if collective in ("all_reduce", "broadcast"):
            for length, exact in product(_LENGTHS, values):
                cases.append(CollectiveCase(collective, dtype, (length,) * num, exact=exact))
            sizes = (13,) * num
            tail: tuple[int, ...] = (6,)
        else:
            for rows, exact in product(_UNEVEN, values):
                cases.append(CollectiveCase(collective, dtype, rows[:num], (7,), exact=exact))
            cases.append(CollectiveCase(collective, dtype, (256,) * num, (64,)))
            sizes, tail = _UNEVEN[1][:num], (2, 4)
        cases.append(CollectiveCase(collective, dtype, sizes, tail, num - 1, strided=True))
    return cases


def _norm_cases(dtype: str, num: int) -> list[CollectiveCase]:
    cases = [
        CollectiveCase(FUSED, dtype, (count,) * num, (hidden,), exact=False)
        for count, hidden in _NORM_SHAPES
    ]
    return [*cases, replace(cases[-1], strided=True)]
