"""Triton's interpreter with the conversions of a GPU, and without silent arithmetic on bits.

The interpreter of triton 3.7.1 keeps bfloat16 and float8 numbers as unsigned integers, and

- cuts float32 down to bfloat16 instead of rounding to nearest even; to float8 it rounds half away
  from zero, and loses a carry into the exponent;
- turns subnormal bfloat16 numbers, and a NaN of float8, into other numbers where it widens them;
- adds, multiplies and compares the integers where a kernel computes with such a number, and
  multiplies matrices of them.

Here every conversion from and to these formats is torch's, and arithmetic on them raises: a GPU
would compute in float32, so a kernel says so with ``.to(tl.float32)`` behind each load. A
``tl.dot`` of them multiplies their values.

Besides, it keeps the running program in globals, so that two threads disturb each other, and takes
the whole language apart at each call of one kernel function by another: here launches wait for each
other, and calls within one are plain.

To be removed once the tests in ``ops/tests/triton/test_exact_interpreter.py`` that show the
interpreter itself to be wrong fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

_NARROW = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
_BITS = {1: torch.uint8, 2: torch.int16}


def make_exact() -> None:
    """Let Triton's interpreter convert exactly from now on, in this process."""
    interpreter.interpreter_builder.__class__ = ExactBuilder
    interpreter.GridExecutor.__call__ = _launched_alone
    interpreter.InterpretedFunction.__call__ = _called_within


def _of_numbers(name: str) -> Callable[..., Any]:
    """Return the interpreter's operation ``name``, which refuses operands that are kept as bits."""
    inherited = getattr(interpreter.InterpreterBuilder, name)

    def operation(self: Any, *given: Any) -> Any:
        # Which one it is stands behind the operands of binary_op and unary_op.
        _refuse_bits(given[-1] if name in ("binary_op", "unary_op") else name, *given)
        with np.errstate(all="ignore"):  # hardware makes infinities and NaN without a word
            return inherited(self, *given)

    return operation


class ExactBuilder(interpreter.InterpreterBuilder):  # type: ignore[misc]
    """The interpreter's builder of operations with conversions that round as hardware does."""

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        """Return ``src`` converted to nearest even."""
        converted = self._converted(src, dst_type)
        return super().cast_impl(src, dst_type) if converted is None else converted

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        """Return ``src`` converted to nearest even, or as the interpreter does in another mode."""
        nearest = rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        converted = self._converted(src, dst_type) if nearest else None
        if converted is None:
            converted = super().create_fp_to_fp(src, dst_type, rounding_mode)
        return converted

    binary_op = _of_numbers("binary_op")
    unary_op = _of_numbers("unary_op")
    create_rsqrt = _of_numbers("create_rsqrt")
    create_fma = _of_numbers("create_fma")

    def create_dot(self, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        """Return ``a @ b + d`` of the values that ``a`` and ``b`` stand for."""
        converted = [self._converted(operand, tl.float32) for operand in (a, b)]
        wide = [o if c is None else c for o, c in zip((a, b), converted, strict=True)]
        with np.errstate(all="ignore"):
            return super().create_dot(*wide, d, *rest)

    def _converted(self, src: Any, dst_type: Any) -> Any:
        """Return ``src`` converted, or None where neither side is kept as an integer."""
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or not (source in _NARROW or target in _NARROW):
            return None
        numbers = _tensor(src.data, source)
        if target in _NARROW:
            # By way of float32, which holds all of float16; float64 is rounded once all the same.
            narrow = numbers.to(_NARROW[target])
            bits = narrow.view(_BITS[narrow.dtype.itemsize]).numpy()
            data = bits.view(interpreter._get_np_dtype(target))
        else:
            data = numbers.float().numpy().astype(interpreter._get_np_dtype(target))
        return interpreter.TensorHandle(data, target)


_launch = interpreter.GridExecutor.__call__
_call = interpreter.InterpretedFunction.__call__
_one = threading.RLock()
_prepared: set[int] = set()  # modules whose language the launch under way has replaced


def _launched_alone(self: Any, *arguments: Any, **named: Any) -> None:
    with _one:
        _prepared.clear()
        _launch(self, *arguments, **named)


def _called_within(self: Any, *arguments: Any, **named: Any) -> Any:
    module = id(self.fn.__globals__)
    if module in _prepared:
        return self.rewrite()(*arguments, **named)
    result = _call(self, *arguments, **named)
    _prepared.add(module)
    return result


def _tensor(data: Any, dtype: Any) -> Tensor:
    data = np.ascontiguousarray(data)
    if dtype not in _NARROW:
        return torch.from_numpy(data)
    signed = data.view(np.int16) if data.itemsize == 2 else data
    return torch.from_numpy(signed).view(_NARROW[dtype])


def _refuse_bits(what: Any, *operands: Any) -> None:
    for operand in operands:
        dtype = operand.dtype.scalar if isinstance(operand, interpreter.TensorHandle) else None
        if dtype in _NARROW:
            name = getattr(what, "__name__", what)
            raise TypeError(
                f"{name} of {dtype}: the interpreter would compute on its bits. "
                "Convert right after the load: tl.load(...).to(tl.float32)"
            )
