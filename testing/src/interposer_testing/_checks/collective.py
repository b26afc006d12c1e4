"""Cases of collectives, with what each rank gives and what it must get.

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
"""The dtypes that a communicator is tried in whose record names none."""
SUMS = ("all_reduce", "reduce_scatter")
FUSED = "all_reduce_add_rms_norm"
EPS = 1e-5
_LENGTHS = (0, 1, 3, 1001, 4096, 40_000)
_UNEVEN = ((3, 3, 3, 3), (0, 5, 1, 2), (4, 0, 0, 0), (0, 0, 0, 0), (33, 129, 7, 64))
_ROWS = ((0, 64), (1, 96), (3, 1000), (70, 128))  # of a sum that is normalised
_LARGEST = 8  # sums of four whole numbers up to it are exact in every float of 16 bits


@dataclass(frozen=True)
class CollectiveCase:
    """One call of a collective by every rank.

    Attributes:
        sizes: rows of each rank; the first is that of all where they are equal by definition.
        tail: shape of a row.
        source: the rank that broadcasts.
        exact: the values are small whole numbers, whose sums are not rounded.
        strided: only every second element of some memory is given.
    """

    collective: str
    dtype: str
    sizes: tuple[int, ...]
    tail: tuple[int, ...] = ()
    source: int = 0
    exact: bool = True
    strided: bool = False

    def __str__(self) -> str:
        what = "whole numbers" if self.exact else "any numbers"
        more = ", strided" if self.strided else ""
        rows = f"rows {[*self.sizes]} of {[*self.tail]}"
        return f"{self.collective} of {self.dtype}, {rows}, {what}{more}"

    def sent(self, rank: int) -> list[int]:
        """Return how many rows ``rank`` has for each in ``all_to_all``."""
        num = len(self.sizes)
        return [self.sizes[(rank + to) % num] * (to != 1) for to in range(num)]

    def rows(self, rank: int) -> int:
        """Return how many rows ``rank`` gives."""
        match self.collective:
            case "all_gather":
                return self.sizes[rank]
            case "reduce_scatter":
                return sum(self.sizes)
            case "all_to_all":
                return sum(self.sent(rank))
        return self.sizes[0]

    def num_bytes(self, rank: int) -> int:
        """Return the bytes that ``rank`` gives."""
        return self.rows(rank) * torch.Size(self.tail).numel() * self._dtype.itemsize

    @cached_property
    def given(self) -> list[Tensor]:
        """The tensors of all ranks; each draws the same, so that none is sent to compare."""
        return [self.fresh(rank) for rank in range(len(self.sizes))]

    def fresh(self, rank: int, device: str = "cpu") -> Tensor:
        """Return a copy of what ``rank`` gives, which may be written."""
        seed = zlib.crc32(f"{self} of {rank}".encode())
        generator = torch.Generator().manual_seed(seed)
        shape = (self.rows(rank), *self.tail)
        if self.exact:
            values = torch.randint(-_LARGEST, _LARGEST + 1, shape, generator=generator)
        else:
            values = torch.randn(shape, generator=generator) * 3
        values = values.to(self._dtype)
        if not self.strided:
            return values.to(device)
        twice = values.new_zeros(*shape[:-1], 2 * shape[-1])
        twice[..., ::2] = values
        return twice.to(device)[..., ::2]

    def call(self, communicator: Communicator, rank: int, x: Tensor) -> Tensor:
        """Return what ``rank`` gets for ``x``; of a norm, the residual stream behind it.

        Both are in float32 then, ``[2, T, H]``.
        """
        if self.collective == FUSED:
            residual, weight = (t.to(x.device) for t in self.stream)
            both = communicator.all_reduce_add_rms_norm(x, residual, weight, EPS)
            return torch.stack([part.to(torch.float32) for part in both])
        given: tuple[Any, ...] = (self.sizes,)
        match self.collective:
            case "all_reduce":
                given = ()
            case "broadcast":
                given = (self.source,)
            case "all_to_all":
                given = (self.sent(rank), self.received(rank))
        method = getattr(communicator, self.collective)
        return method(x, *given)  # type: ignore[no-any-return]

    def received(self, rank: int) -> list[int]:
        """Return how many rows each has for ``rank`` in ``all_to_all``."""
        return [self.sent(other)[rank] for other in range(len(self.sizes))]

    def faults(self, rank: int, found: Any) -> Iterator[Fault]:
        """Yield what is wrong with the result of ``rank``.

        Sums of whole numbers, and what is moved, are exact. Else a sum s of N values x differs by
        at most ((1 + u)^(N - 1) - 1) * sum(|x|), if each of N - 1 additions rounds by a share u of
        its result, which sum(|x|) bounds; u is half the distance from 1 to the next number of the
        dtype. A sum in float32 that is rounded once differs by no more than one addition in the
        dtype and N - 1 in float32. The bound is the sum of both, and the smallest subnormal.
        """
        if self.collective == FUSED:
            yield from self._faults_of_norm(found)
            return
        expected, magnitude = self._expected(rank)
        where = str(self)
        if not isinstance(found, Tensor):
            yield Fault("shape", where, f"a tensor expected, got {type(found).__name__}")
            return
        if (found.shape, found.dtype) != (expected.shape, self._dtype):
            form = f"{[*expected.shape]} {self.dtype} expected"
            yield Fault("shape", where, f"{form}, got {[*found.shape]} {found.dtype}")
            return
        bound = torch.zeros_like(expected)
        if magnitude is not None:
            bound = self._bound_of_sum(magnitude)
        yield from self._beyond(found, expected, bound)

    def _bound_of_sum(self, magnitude: Tensor) -> Tensor:
        num, tiny = len(self.sizes), torch.finfo(self._dtype).smallest_normal
        roundings = [torch.finfo(d).eps / 2 for d in (self._dtype, torch.float32)]
        return sum((1 + u) ** (num - 1) - 1 for u in roundings) * magnitude + tiny

    def _faults_of_norm(self, found: Tensor) -> Iterator[Fault]:
        """Yield what is wrong with a normalised sum and the stream.

        A stream t that is off by at most d has a row norm r that is off by the root mean square e
        of d, as norms of vectors differ by no more than the norm of their difference. So y = w t/r
        is off by at most w (d / (r - e) + |t| e / (r (r - e))). Behind that, t is rounded to the
        stream's dtype, r to float32 from a sum of H squares, and y at most four times.
        """
        residual, weight = (t.to(torch.float64) for t in self.stream)
        given = torch.stack([x.to(torch.float64) for x in self.given])
        stream = given.sum(0) + residual
        small = torch.finfo(torch.float32).eps
        off = self._bound_of_sum(given.abs().sum(0)) + small * stream.abs()
        row = (stream.square().mean(-1, keepdim=True) + EPS).sqrt()
        row_off = off.square().mean(-1, keepdim=True).sqrt() + self.tail[0] * small * row
        least = row - row_off
        normed = stream / row * weight
        bound = weight.abs() * (off / least + stream.abs() * row_off / (row * least))
        bound = bound + 4 * torch.finfo(self._dtype).eps * normed.abs()
        bound = bound + torch.finfo(self._dtype).smallest_normal
        if found.shape != (2, *stream.shape):
            form = f"twice {[*stream.shape]} expected"
            yield Fault("shape", str(self), f"{form}, got {[*found.shape]}")
            return
        yield from self._beyond(found, torch.stack([normed, stream]), torch.stack([bound, off]))

    def _beyond(self, found: Tensor, expected: Tensor, bound: Tensor) -> Iterator[Fault]:
        """Yield a fault if an element is further from what is expected than the bound."""
        where = str(self)
        error = (found.cpu().to(expected.dtype) - expected).abs()
        wrong = ~(error <= bound)  # a NaN is wrong
        if bool(wrong.any()):
            at = int(wrong.reshape(-1).nonzero()[0])
            got, want = found.reshape(-1)[at].item(), expected.reshape(-1)[at].item()
            yield Fault(
                "value",
                where,
                f"{int(wrong.sum())} of {wrong.numel()} elements are wrong; element {at} is "
                f"{got:.6g}, expected {want:.6g}",
                float(error.reshape(-1)[at]),
                float(bound.reshape(-1)[at]),
            )

    @cached_property
    def stream(self) -> tuple[Tensor, Tensor]:
        """The residual ``[T, H]`` in float32, as models keep it, and the weight ``[H]``."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"stream of {self}".encode()))
        residual = torch.randn((self.sizes[0], *self.tail), generator=generator)
        weight = torch.rand(self.tail, generator=generator) + 0.5
        return residual, weight.to(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    def _expected(self, rank: int) -> tuple[Tensor, Tensor | None]:
        """Return what ``rank`` must get, and the sum of magnitudes where it may be rounded."""
        wide = torch.float64 if self._dtype.is_floating_point else torch.int64
        given = [x.to(wide) for x in self.given]
        match self.collective:
            case "all_gather":
                return torch.cat(given), None
            case "broadcast":
                return given[self.source], None
            case "all_to_all":
                parts = [x.split(self.sent(other)) for other, x in enumerate(given)]
                return torch.cat([part[rank] for part in parts]), None
        total, magnitude = torch.stack(given).sum(0), torch.stack(given).abs().sum(0)
        if self.collective == "reduce_scatter":
            total, magnitude = (t.split(self.sizes)[rank] for t in (total, magnitude))
        return total, None if self.exact else magnitude


def collective_cases(
    collective: str, num: int, dtypes: Sequence[str] = DTYPES
) -> list[CollectiveCase]:
    """Return the cases of a collective on ``num`` ranks, at most four."""
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
        for count, hidden in _ROWS
    ]
    return [*cases, replace(cases[-1], strided=True)]
