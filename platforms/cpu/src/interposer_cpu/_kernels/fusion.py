"""Declarations of kernels that calls of the compiled library may fuse, beside each of them.

A fused call computes what several kernels would one after the other. So a layer that makes one asks
the kernels that its parts hold what they declare. A kernel that declares nothing is called by
itself. A kernel of another distribution may declare the same, by ``interposer_cpu.fused``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as every_module

from interposer_cpu._kernels.interface import CODE_TYPES, float64_bits
from interposer_ops.quantized_linear import CodedProduct, StaticProduct

K = TypeVar("K", bound=Callable[..., Any])
Words = tuple[int, int, int, int]


class InputCoding(NamedTuple):
    """The numbers that inputs become before they are multiplied by a weight.

    Attributes:
        words: of an interposer_coding: type of the codes, bits of the largest scale as a float64,
            inputs that share a scale, kind of the scales.
        is_static: the last operand is one scale for all tokens.
    """

    words: Words
    is_static: bool = False


FLOATS = InputCoding((-1, 0, 0, 0))
"""Inputs are multiplied as they are."""


@dataclass(frozen=True, slots=True)
class Fused:
    """The place of a kernel in fused calls.

    Attributes:
        op: that it computes; ``"linear"`` for every matmul, ``"quantizer"``, ``"activation"``.
        inputs: kinds of codes: of a matmul, what it multiplies; of a quantizer, what it makes.
        read: returns what the library takes for the options that the kernel is called with; None
            where it has nothing for them.
        is_static: of a quantizer: it is given one scale for all tokens.
    """

    op: str
    inputs: frozenset[str] = frozenset()
    read: Callable[..., Any] | None = None
    is_static: bool = False


# Not attributes of the functions, which a wrapper of one of them would take over.
_FUSED: dict[object, Fused] = {}
_ALONE = Fused("")


def fused(
    op: str,
    *inputs: str,
    read: Callable[..., Any] | None = None,
    is_static: bool = False,
) -> Callable[[K], K]:
    """Declare that fused calls may compute in place of a kernel; see ``Fused``.

    A matmul takes the packed weight that this distribution's kernel of the same kind takes.
    """

    def declare(kernel: K) -> K:
        _FUSED[kernel] = Fused(op, frozenset(inputs), read, is_static)
        return kernel

    return declare


def is_declared(kernel: object, op: str) -> bool:
    """Say whether ``kernel`` declares to be fused as ``op``."""
    return _FUSED.get(kernel, _ALONE).op == op


def is_fused(layer: nn.Module, standard: type[nn.Module], kernel: object, op: str) -> bool:
    """Say whether a layer only calls ``kernel``, and this declares to be fused as ``op``.

    Args:
        standard: the layer's own class, which others may replace. A replacement does not declare
            what it computes, so that its parts have to be called.
    """
    return type(layer) is standard and is_declared(kernel, op)


def coding_words(
    dtype: torch.dtype, limit: float | None = None, block_size: int = 0, scales: int = 0
) -> Words | None:
    """Return words of an ``InputCoding``, None where the library has no such codes.

    Args:
        limit: the largest scale.
        scales: 0 for any numbers, 1 for powers of two, or ``SHARED_EXPONENTS``.
    """
    if dtype not in CODE_TYPES:
        return None
    return CODE_TYPES[dtype], float64_bits(limit or 0.0), block_size, scales


def input_coding(kernel: Callable[..., Any] | None) -> InputCoding | None:
    """Return what a projection's kernel does with inputs; None where fused calls cannot."""
    if not isinstance(kernel, CodedProduct):
        declared = _FUSED.get(kernel, _ALONE)
        return FLOATS if declared.op == "linear" and not declared.inputs else None
    # A subclass may compute something else.
    if type(kernel) not in (CodedProduct, StaticProduct):
        return None
    quantizer, matmul = (_FUSED.get(part, _ALONE) for part in (kernel.quantize, kernel.product))
    if not quantizer.inputs & matmul.inputs or quantizer.read is None:
        return None
    if quantizer.is_static != isinstance(kernel, StaticProduct):
        return None
    words = quantizer.read(*kernel.options)
    return None if words is None else InputCoding(words, quantizer.is_static)


def activation_number(kernel: Callable[..., Any], options: tuple[str, ...]) -> int | None:
    """Return the library's number of an activation that it computes, else None."""
    declared = _FUSED.get(kernel, _ALONE)
    if declared.op != "activation" or declared.read is None:
        return None
    number: int = declared.read(*options)
    return number


def weight_words(coding: InputCoding, operands: tuple[Any, ...]) -> tuple[int, ...]:
    """Return what fused calls take of a projection with these operands."""
    scale = operands[-1].data_ptr() if coding.is_static else 0
    return operands[0][0].data_ptr(), scale, *coding.words


class InputCodings:
    """Input codings of projections, read anew where one of them holds another kernel.

    Kernels are exchanged with weights, of which a layer around the projections is not told.
    """

    __slots__ = ("found", "kernels")

    def __init__(self) -> None:
        self.kernels: tuple[object, ...] = ()
        self.found: tuple[Any, ...] = ()

    def of(self, *kernels: Callable[..., Any] | None) -> tuple[Any, ...]:
        """Return ``input_coding`` of each of the kernels that projections hold now."""
        if kernels != self.kernels:
            self.found = tuple(map(input_coding, kernels))
            self.kernels = kernels
        return self.found


class ForwardHooks:
    """The forward hooks of some modules, and those of all modules there are.

    Attributes:
        dicts: none is true where there is no hook. In an object, as a copy of a layer's containers
            would hold the hooks of another module.
    """

    __slots__ = ("before", "dicts", "modules")

    def __init__(self, modules: Iterable[nn.Module], before: Iterable[nn.Module] = ()) -> None:
        """Look at the hooks of ``modules``, and at those that run before ``before``."""
        self.modules, self.before = tuple(modules), tuple(before)
        own = [h for m in self.modules for h in (m._forward_hooks, m._forward_pre_hooks)]
        own += [m._forward_pre_hooks for m in self.before]
        self.dicts: tuple[Any, ...] = (
            every_module._global_forward_hooks,
            every_module._global_forward_pre_hooks,
            *own,
        )

    def __reduce__(self) -> tuple[type[ForwardHooks], tuple[tuple[nn.Module, ...], ...]]:
        """Let a copy look at the copies of the modules, and at what is common to all."""
        return ForwardHooks, (self.modules, self.before)
