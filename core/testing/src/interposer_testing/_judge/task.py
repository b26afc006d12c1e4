"""Tasks, workloads and solutions as data: no code of a solution runs here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from interposer import Case, CustomOp


@dataclass(frozen=True, slots=True)
class Workload:
    """One set of inputs of a task, drawn anew from a generator.

    Attributes:
        label: unique within the task.
        case: draws the arguments, on the CPU.
        free: names of the float arguments whose values may have any distribution.
        timed: whether the inputs have a size that is worth timing.
        of_other_size: draws arguments of another size, if the definition has such.
    """

    label: str
    case: Callable[[torch.Generator], Case]
    free: frozenset[str] = frozenset()
    timed: bool = True
    of_other_size: Callable[[torch.Generator], Case] | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """The results that a solution must return for one case, by name in the order of return.

    Attributes:
        values: float64, or the output's dtype if it is no float.
        bounds: largest allowed absolute errors, shapes of ``values``.
        forms: meta tensors with the shapes, dtypes and strides of the results.
        precision: how the values were computed: "float64", or "own dtype" if the reference runs in
            no other.
    """

    values: Mapping[str, torch.Tensor]
    bounds: Mapping[str, torch.Tensor]
    forms: Mapping[str, torch.Tensor]
    precision: Literal["float64", "own dtype"] = "float64"


@dataclass(frozen=True, slots=True)
class ModuleState:
    """Arguments, seed and weights with which a solution that is a class is constructed.

    The solution is ``Class(*arguments)`` after ``torch.manual_seed(seed)``. Then each tensor of
    ``tensors`` is copied to the parameter or buffer with the same name and shape, if there is one.

    Attributes:
        seed: independent of the seeds of the inputs.
        arguments: plain values, without tensors.
    """

    seed: int
    arguments: tuple[Any, ...]
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """A computation with a trusted reference, for which solutions are judged.

    Attributes:
        name: such as "silu_and_mul", "rmsnorm_h4096" or "level1/19_ReLU".
        source: format of the definition.
        digest: SHA-256 of the definition, as hexadecimal digits.
        op: unregistered unless ``source`` is "op"; its signature is that of a solution.
        expect: runs the reference on a case. Do not use ``op.tolerance`` instead: it is unknown for
            other sources than "op".
        outputs: names of the outputs, which a solution may return as a dict; empty if unnamed.
        module: set if the solution is a class, such as ``ModelNew``.
    """

    name: str
    source: Literal["op", "flashinfer-trace", "kernelbench", "sol-execbench"]
    digest: str
    op: CustomOp[..., Any]
    workloads: tuple[Workload, ...]
    expect: Callable[[Case], Expected]
    outputs: tuple[str, ...] = ()
    module: ModuleState | None = None


@dataclass(frozen=True, slots=True)
class Solution:
    """A candidate implementation of a task, read as bytes and never imported here.

    Attributes:
        name: shown in reports.
        path: file or folder that was named on the command line.
        file: relative path of the source in ``sources`` that defines the entry.
        entry: name of the function or class.
        language: decides how the child loads the file.
        sources: contents by relative path; the child sees no other files.
        style: whether outputs are returned, or written to tensors that follow the inputs.
        uses_triton: whether a file imports Triton, whose interpreter runs it on a CPU.
    """

    name: str
    path: Path
    file: str
    entry: str
    language: Literal["python", "cpp", "wheel"]
    sources: Mapping[str, bytes]
    style: Literal["returns", "writes outputs"] = "returns"
    uses_triton: bool = False
