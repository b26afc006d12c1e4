"""Variants of a drawn case: scaled inputs, and values replaced by those of another case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from interposer import Case
from interposer_testing._judge.clock import fill
from interposer_testing._judge.task import Workload


def varied(workload: Workload, generator: torch.Generator) -> Case:
    """Draw a case, and scale each free input by a random power of two from 1/4 to 4."""
    case = workload.case(generator)
    arguments = dict(case.arguments)
    for name in workload.free:
        if arguments[name] is None:
            continue
        exponent = int(torch.randint(-2, 3, (), generator=generator))
        arguments[name] = arguments[name] * 2.0**exponent
    return replace(case, arguments=arguments)


def changed(
    case: Case, new_values: Case, how: str, constants: Sequence[str], generator: torch.Generator
) -> Case:
    """Return a copy of ``case`` with values of ``new_values`` in each tensor argument.

    Arguments that differ in shape or dtype keep their values, and so do constants: no program
    changes those between calls.

    Args:
        how: replaces "one" random value, the "last" value, the second "half" or "all" values.
    """
    arguments = dict(case.arguments)
    for name, value in case.arguments.items():
        new = new_values.arguments[name]
        if not isinstance(value, torch.Tensor) or name in constants or not value.numel():
            continue
        if new.shape != value.shape or new.dtype != value.dtype or 0 in value.stride():
            continue
        # Integers, such as indices, are valid only together.
        if how != "all" and not value.is_floating_point():
            continue
        is_changed = torch.zeros(value.numel(), dtype=torch.bool)
        match how:
            case "one":
                is_changed[torch.randint(value.numel(), (), generator=generator)] = True
            case "last":
                is_changed[-1] = True
            case "half":
                is_changed[value.numel() // 2 :] = True
            case _:
                is_changed[:] = True
        mixed = torch.where(is_changed.view(value.shape), new, value)
        arguments[name] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        fill(arguments[name], mixed)
    return replace(case, arguments=arguments)


def num_bytes(case: Case) -> int:
    tensors = (v for v in case.arguments.values() if isinstance(v, torch.Tensor))
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
