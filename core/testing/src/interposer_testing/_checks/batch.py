"""The check of ``batch_invariant``: the result of a row does not depend on the other rows."""

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

# More rows than one SIMD vector or one thread's shard has, and a multiple of neither.
_NUM_TOKENS = 101
_MAX_ELEMENTS = 1 << 20


def check_batch_invariance(subject: Subject, exemplar: Exemplar) -> list[Fault]:
    """Check that rows give the same bits alone, in pairs, shifted, and in the full batch.

    The check runs on the exemplar, and on about a hundred rows if the op has a sample.
    """
    op = subject.op
    cases = [exemplar.build()]
    if op.sample is not None and exemplar.num_elements <= _MAX_ELEMENTS:
        cases.append(op.sample(exemplar.planned.dtype, exemplar.dims, _NUM_TOKENS, exemplar.seed))
    return next(filter(None, (list(_faults(subject, case)) for case in cases)), [])


def _faults(subject: Subject, case: Case) -> Iterator[Fault]:
    rows = num_rows(subject.op, case)
    # Every comparison is with one call on all rows.
    full_batch = _values(subject, case, rows, rows)
    for size, name in ((1, "one row"), (2, "two rows")):
        if size < rows:
            for where, difference in differences(full_batch, _values(subject, case, rows, size)):
                yield Fault("batch", where, f"calls with {rows} rows and {name}: {difference}")
    shifted = _values(subject, _rolled(subject, case), rows, rows)
    shared = _shared(subject)
    length = _last_length(subject.op, case)
    unshifted = {where: v if where in shared else _roll(v, -length) for where, v in shifted.items()}
    for where, difference in differences(full_batch, unshifted):
        yield Fault("batch", where, f"the batch and the batch shifted by one row: {difference}")


def _values(subject: Subject, case: Case, rows: int, size: int) -> dict[str, torch.Tensor]:
    """Run the case in calls of ``size`` rows; return outputs, concatenated, and mutated arguments.

    Mutated arguments that are no rows of the batch, such as a cache, are shared by all calls.
    """
    op, call_arguments = subject.op, subject.given(case)
    arguments: Mapping[str, Any] = {**call_arguments.arguments, **call_arguments.prepared}
    parts: list[list[torch.Tensor]] = []
    for start in range(0, rows, size):
        rows_of_call = rows_of(op, arguments, slice(start, start + size))
        positional = subject.positional({**arguments, **rows_of_call})
        parts.append(tensors_of(subject.function(*positional)))
    outputs = [torch.cat(column) for column in zip(*parts, strict=True)]
    values = {f"output {number}": tensor for number, tensor in enumerate(outputs)}
    return values | {f"argument {n!r}": call_arguments.operands[n].tensor for n in op.mutates}


def _rolled(subject: Subject, case: Case) -> Case:
    """Return the case with all rows shifted by one, in memory with the same strides."""
    op, operands, arguments = subject.op, subject.given(case).operands, case.arguments
    rolled = {name: _roll(arguments[name], 1) for name in op.batched if name in operands}
    for name, starts in op.ragged.items():
        # The last sequence becomes the first: rotate tokens by its length, and all offsets.
        lengths = arguments[starts].diff()
        rolled[name] = _roll(arguments[name], int(lengths[-1]))
        rolled[starts] = functional.pad(lengths.roll(1).cumsum(0), (1, 0))
    shifted = {name: operands[name].tensor.copy_(value) for name, value in rolled.items()}
    return replace(case, arguments={**arguments, **shifted})


def _roll(tensor: torch.Tensor, shift: int) -> torch.Tensor:
    # CUDA cannot roll 8-bit floats, so roll their bits.
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).roll(shift, 0).view(tensor.dtype)
    return tensor.roll(shift, 0)


def _last_length(op: CustomOp[..., Any], case: Case) -> int:
    """Return the number of output rows that belong to the last row or sequence of the case."""
    for starts in op.ragged.values():
        return int(case.arguments[starts].diff()[-1])
    return 1


def _shared(subject: Subject) -> set[str]:
    """Return the labels of mutated arguments that are not rows of the batch, such as a cache."""
    op = subject.op
    return {f"argument {name!r}" for name in op.mutates if name not in op.batched}
