"""Declarations of the kernels that fused native calls can compute inside.

A fused call computes several kernels at once, such as a norm, a matmul and an activation. Before a
fused call, the layer checks that every kernel of its parts is declared by ``@fused``. Undeclared
kernels are called one by one. Kernels of other distributions can be declared too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as every_module
from torch.utils.hooks import RemovableHandle

from interposer_cpu._kernels.interface import CODE_TYPES, float64_bits
from interposer_ops.quantized_linear import CodedProduct, StaticProduct

K = TypeVar("K", bound=Callable[..., Any])
CodingFields = tuple[int, int, int, int]


class InputQuantization(NamedTuple):
    """Quantization of a matmul's inputs (activations).

    Attributes:
        fields: fields of an interposer_coding: dtype of the quantized values, bits of the largest
            scale as a float64, inputs per scale, kind of the scales.
        is_static: the last operand of the matmul is a static scale for all tokens.
    """

    fields: CodingFields
    is_static: bool = False


UNQUANTIZED = InputQuantization((-1, 0, 0, 0))
"""Inputs are not quantized."""


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """Declaration that fused native calls can compute a kernel's op.

    Attributes:
        op: computed op; ``"linear"`` for every matmul, ``"quantizer"``, ``"activation"``.
        inputs: kinds of quantized inputs that a matmul takes or a quantizer returns.
        read: converts the options of the kernel to the library's arguments; returns None if the
            library does not support the options.
        is_static: the kernel is a quantizer with one static scale for all tokens.
    """

    op: str
    inputs: frozenset[str] = frozenset()
    read: Callable[..., Any] | None = None
    is_static: bool = False


# A registry, not attributes of the functions: functools.wraps would copy an attribute to a wrapper,
# which may compute something else.
_DECLARATIONS: dict[object, FusedKernel] = {}
_UNDECLARED = FusedKernel("")


def fused(
    op: str,
    *inputs: str,
    read: Callable[..., Any] | None = None,
    is_static: bool = False,
) -> Callable[[K], K]:
    """Declare that fused native calls can compute the decorated kernel's op.

    A declared matmul must take the same packed weight as this distribution's kernel of that op.

    Args:
        op: computed op; ``"linear"`` for every matmul, ``"quantizer"``, ``"activation"``.
        inputs: kinds of quantized inputs that a matmul takes or a quantizer returns.
        read: converts the options of the kernel to the library's arguments; returns None if the
            library does not support the options.
        is_static: the kernel is a quantizer with one static scale for all tokens.
    """

    def declare(kernel: K) -> K:
        _DECLARATIONS[kernel] = FusedKernel(op, frozenset(inputs), read, is_static)
        return kernel

    return declare


def is_declared(kernel: object, op: str) -> bool:
    """Check whether ``kernel`` is declared as ``op``."""
    return _DECLARATIONS.get(kernel, _UNDECLARED).op == op


def is_fused(layer: nn.Module, standard: type[nn.Module], kernel: object, op: str) -> bool:
    """Check whether a fused call can replace a layer that does nothing but call ``kernel``.

    Args:
        standard: the class of the layer in ``interposer_ops``. A class from another plugin may
            compute anything, so such a layer is never fused.
    """
    return type(layer) is standard and is_declared(kernel, op)


def quantization_fields(
    dtype: torch.dtype, limit: float | None = None, block_size: int = 0, scales: int = 0
) -> CodingFields | None:
    """Build the native fields of an input quantization; None if the library lacks ``dtype``.

    Args:
        dtype: dtype of the quantized values.
        limit: largest scale; None for no limit.
        block_size: inputs per scale; 0 for one scale per token.
        scales: 0 for any scales, 1 for powers of two, or ``SHARED_EXPONENTS``.
    """
    if dtype not in CODE_TYPES:
        return None
    return CODE_TYPES[dtype], float64_bits(limit or 0.0), block_size, scales


def input_quantization(kernel: Callable[..., Any] | None) -> InputQuantization | None:
    """Return how a projection's kernel quantizes inputs; None if fused calls cannot do so."""
    if not isinstance(kernel, CodedProduct):
        declared = _DECLARATIONS.get(kernel, _UNDECLARED)
        return UNQUANTIZED if declared.op == "linear" and not declared.inputs else None
    # Exact types only: a subclass can override the computation.
    if type(kernel) not in (CodedProduct, StaticProduct):
        return None
    quantizer, matmul = (
        _DECLARATIONS.get(part, _UNDECLARED) for part in (kernel.quantize, kernel.product)
    )
    # The matmul must take a kind of quantized inputs that the quantizer returns.
    if not quantizer.inputs & matmul.inputs or quantizer.read is None:
        return None
    if quantizer.is_static != isinstance(kernel, StaticProduct):
        return None
    fields = quantizer.read(*kernel.options)
    return None if fields is None else InputQuantization(fields, quantizer.is_static)


def activation_number(kernel: Callable[..., Any], options: tuple[str, ...]) -> int | None:
    """Return the library's number of an activation kernel; None if the library lacks it."""
    declared = _DECLARATIONS.get(kernel, _UNDECLARED)
    if declared.op != "activation" or declared.read is None:
        return None
    number: int = declared.read(*options)
    return number


def weight_arguments(coding: InputQuantization, operands: tuple[Any, ...]) -> tuple[int, ...]:
    """List the arguments of a projection in a fused call: weight, static scale, quantization."""
    scale = operands[-1].data_ptr() if coding.is_static else 0
    return operands[0][0].data_ptr(), scale, *coding.fields


class InputQuantizations:
    """Cache of the input quantizations of several projections' kernels.

    A projection whose weights are exchanged may get another kernel, and the surrounding layer is
    not notified. So the cache is checked at every call.
    """

    __slots__ = ("kernels", "quantizations")

    def __init__(self) -> None:
        self.kernels: tuple[object, ...] = ()
        self.quantizations: tuple[Any, ...] = ()

    def of(self, *kernels: Callable[..., Any] | None) -> tuple[Any, ...]:
        """Return the input quantization of each kernel; cached until a kernel changes."""
        if kernels != self.kernels:
            self.quantizations = tuple(map(input_quantization, kernels))
            self.kernels = kernels
        return self.quantizations


class ForwardHooks:
    """Forward hooks of some modules, and torch's global forward hooks.

    The dictionaries are live: hooks that are added later appear as well. A deep copy of a layer
    must refer to the hooks of the copied modules, which an object of this class ensures.

    Attributes:
        dicts: hook dictionaries; all are empty without hooks.
    """

    __slots__ = ("_handles", "before", "dicts", "modules")

    def __init__(self, modules: Iterable[nn.Module], before: Iterable[nn.Module] = ()) -> None:
        """Watch all forward hooks of ``modules`` and the pre-hooks of the modules ``before``."""
        self.modules, self.before = tuple(modules), tuple(before)
        hooks = [h for m in self.modules for h in (m._forward_hooks, m._forward_pre_hooks)]
        hooks += [m._forward_pre_hooks for m in self.before]
        self.dicts: tuple[Any, ...] = (
            every_module._global_forward_hooks,
            every_module._global_forward_pre_hooks,
            *hooks,
        )
        self._handles = -1  # number of torch's hook handles when no dictionary had an entry

    def is_empty(self) -> bool:
        """Check that there is no hook, at no cost if no hook was registered since the last check.

        An MoE layer has hundreds of dictionaries, which are seldom in the CPU caches.
        """
        handles = RemovableHandle.next_id
        if self._handles != handles:
            if any(self.dicts):
                return False
            self._handles = handles
        return True

    def __reduce__(self) -> tuple[type[ForwardHooks], tuple[tuple[nn.Module, ...], ...]]:
        """Rebuild the object from the copied modules when a layer is copied."""
        return ForwardHooks, (self.modules, self.before)
