"""Tasks and solutions: the op that a kernel claims to compute, and the files of the kernel."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from interposer import Case, CustomOp

Source = Literal["op", "flashinfer-trace", "kernelbench", "sol-execbench"]
Language = Literal["python", "triton", "cpp", "wheel", "hub"]
Style = Literal["returns", "writes outputs"]


@dataclass(frozen=True, slots=True)
class Workload:
    """One set of inputs of a task, which is drawn anew for each use.

    Attributes:
        label: name of the set, unique within the task.
        case: draws the arguments.
        is_timed: whether kernels are timed with these inputs.
    """

    label: str
    case: Callable[[torch.Generator], Case]
    is_timed: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """What a kernel has to compute.

    Attributes:
        name: name of the op, the definition or the problem.
        source: format from which the task was read.
        digest: SHA-256 of the definition, in hexadecimal.
        op: op with the reference, its tolerance, and the arguments that it mutates. The op need
            not be registered.
        workloads: inputs of the task.
        arguments: arguments of the class of a KernelBench solution.
        state: draws parameters and buffers by name, for an instance of such a class; they are also
            the last arguments of ``op``.
    """

    name: str
    source: Source
    digest: str
    op: CustomOp[..., Any]
    workloads: tuple[Workload, ...]
    arguments: tuple[Any, ...] = ()
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Solution:
    """The files of a kernel, which only the process of the kernel executes.

    Attributes:
        name: name for reports.
        sources: content of the files by relative path; the process sees no other files of the
            solution.
        file: path of the file with the entry point, a key of ``sources``; empty for an installed
            module.
        entry: name of the function, or of a class whose instances are called.
        module: installed module with the entry point, such as one of a wheel.
        language: language of the kernel.
        style: whether the function returns its outputs, or takes them as last arguments.
        is_class: whether ``entry`` is a class that is created before it is called.
    """

    name: str
    sources: Mapping[str, bytes]
    file: str
    entry: str
    module: str = ""
    language: Language = "python"
    style: Style = "returns"
    is_class: bool = False
    paths: tuple[Path, ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 of the names and contents of all files, in hexadecimal."""
        digest = hashlib.sha256()
        for name, content in sorted(self.sources.items()):
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()
