"""The check that a row's result does not depend on the rest of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from interposer import Case, CustomOp
from interposer_testing._checks.call import Subject, differences, tensors_of
from interposer_testing._checks.exemplar import Exemplar, num_rows, rows_of
from interposer_testing._checks.fault import Fault

# More rows than go into one vector or one thread's share, and no multiple of either.
_NUM_TOKENS = 101
_MOST_ELEMENTS = 1 << 20


def check_batch_invariance(subject: Subject, exemplar: Exemplar) -> list[Fault]:
    """Return where rows alone, in pairs or elsewhere give other bits than in the whole batch.

    Tried are the case, and a batch of a hundred rows where the op draws samples.
    """
    op = subject.op
    cases = [exemplar.build()]
    if op.sample is not None and exemplar.num_elements <= _MOST_ELEMENTS:
        cases.append(op.sample(exemplar.planned.dtype, exemplar.dims, _NUM_TOKENS, exemplar.seed))
    return next(filter(None, (list(_faults(subject, case)) for case in cases)), [])


def _faults(subject: Subject, case: Case) -> Iterator[Fault]:
    rows = num_rows(subject.op, case)
    whole = _values(subject, case, rows, rows)
    for size, name in ((1, "by itself"), (2, "in a pair")):
        if size < rows:
            for where, how in differences(whole, _values(subject, case, rows, size)):
                yield Fault("batch", where, f"among {rows} rows and {name} it is {how}")
    moved = _values(subject, _rolled(subject, case), rows, rows)
    shared = _shared(subject)
    by = _last(subject.op, case)
    back = {where: v if where in shared else _roll(v, -by) for where, v in moved.items()}
    for where, how in differences(whole, back):
        yield Fault("batch", where, f"one row further on it is {how}")


def _values(subject: Subject, case: Case, rows: int, size: int) -> dict[str, torch.Tensor]:
    """Return the outputs and mutated arguments after all rows went through, ``size`` at a time.

    What is mutated and no row of the batch, such as a cache, is handed from call to call.
    """
    op, given = subject.op, subject.given(case)
    arguments: Mapping[str, Any] = {**given.arguments, **given.prepared}
    parts: list[list[torch.Tensor]] = []
    for start in range(0, rows, size):
        own = rows_of(op, arguments, slice(start, start + size))
        parts.append(tensors_of(subject.function(*subject.positional({**arguments, **own}))))
    outputs = [torch.cat(column) for column in zip(*parts, strict=True)]
    values = {f"output {number}": tensor for number, tensor in enumerate(outputs)}
    return values | {f"argument {n!r}": given.operands[n].tensor for n in op.mutates}


def _rolled(subject: Subject, case: Case) -> Case:
    """Return the case with every row one further on, in memory of the same strides."""
    op, given, arguments = subject.op, subject.given(case), case.arguments
    rolled = {name: _roll(arguments[name], 1) for name in op.batched if name in given.operands}
    for name, starts in op.ragged.items():
        lengths = arguments[starts].diff()
        rolled[name] = _roll(arguments[name], int(lengths[-1]))
        rolled[starts] = functional.pad(lengths.roll(1).cumsum(0), (1, 0))
    moved = {name: given.operands[name].tensor.copy_(value) for name, value in rolled.items()}
    return replace(case, arguments={**arguments, **moved})


def _roll(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Return the rows ``by`` further on; CUDA rolls no floats of 8 bits, so bits are rolled."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).roll(by, 0).view(tensor.dtype)
    return tensor.roll(by, 0)


def _last(op: CustomOp[..., Any], case: Case) -> int:
    """Return how much of every output is of the last row."""
    for starts in op.ragged.values():
        return int(case.arguments[starts].diff()[-1])
    return 1


def _shared(subject: Subject) -> set[str]:
    op = subject.op
    return {f"argument {name!r}" for name in op.mutates if name not in op.batched}
