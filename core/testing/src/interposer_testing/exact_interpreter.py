"""Patches that make triton's interpreter convert bfloat16 and float8 as GPUs do.

The interpreter of triton 3.7.1 stores bfloat16 and float8 numbers as unsigned integers, and

- truncates float32 to bfloat16 instead of rounding to nearest even; for float8 the interpreter
  rounds half away from zero and loses a carry into the exponent;
- widens subnormal bfloat16 numbers and float8 NaNs to wrong numbers;
- adds, multiplies and compares the integers instead of the numbers, also in ``tl.dot``.

With the patches, torch converts from and to these formats, and arithmetic on them raises: a GPU
would compute in float32, so that a kernel must convert with ``.to(tl.float32)`` after each load. A
``tl.dot`` multiplies the numbers.

The interpreter also stores the running program in globals, so that two threads disturb each other,
and rewrites the whole language module at each call between kernel functions. With the patches,
launches wait for each other, and a launch rewrites each module once.

Remove this module once the tests in ``core/testing/tests/test_exact_interpreter.py`` that show the
faults of triton's interpreter fail.
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

__all__ = ["make_exact"]

_NARROW = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
_BITS = {1: torch.uint8, 2: torch.int16}


def make_exact() -> None:
    """Patch triton's interpreter for the rest of this process."""
    interpreter.interpreter_builder.__class__ = ExactBuilder
    interpreter.GridExecutor.__call__ = _launch_alone
    interpreter.InterpretedFunction.__call__ = _call_within_launch


def _on_numbers(name: str) -> Callable[..., Any]:
    """Wrap the interpreter's operation ``name`` to refuse operands that are stored as integers."""
    inherited = getattr(interpreter.InterpreterBuilder, name)

    def operation(self: Any, *arguments: Any) -> Any:
        # binary_op and unary_op take the numpy function as the last argument.
        _refuse_bits(arguments[-1] if name in ("binary_op", "unary_op") else name, *arguments)
        with np.errstate(all="ignore"):  # hardware makes infinities and NaN without a warning
            return inherited(self, *arguments)

    return operation


class ExactBuilder(interpreter.InterpreterBuilder):  # type: ignore[misc]
    """Interpreter operations whose conversions round as hardware does."""

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        """Convert ``src`` to another dtype, rounded to nearest, ties to even."""
        converted = self._converted(src, dst_type)
        return super().cast_impl(src, dst_type) if converted is None else converted

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        """Convert ``src`` with rounding to nearest even; leave other modes to the interpreter."""
        nearest = rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        converted = self._converted(src, dst_type) if nearest else None
        if converted is None:
            converted = super().create_fp_to_fp(src, dst_type, rounding_mode)
        return converted

    binary_op = _on_numbers("binary_op")
    unary_op = _on_numbers("unary_op")
    create_rsqrt = _on_numbers("create_rsqrt")
    create_fma = _on_numbers("create_fma")

    def create_dot(self, a: Any, b: Any, d: Any, *options: Any) -> Any:
        """Return ``a @ b + d``, with operands that are stored as integers converted to float32."""
        converted = [self._converted(operand, tl.float32) for operand in (a, b)]
        wide = [o if c is None else c for o, c in zip((a, b), converted, strict=True)]
        with np.errstate(all="ignore"):
            return super().create_dot(*wide, d, *options)

    def _converted(self, src: Any, dst_type: Any) -> Any:
        """Convert ``src`` to ``dst_type``; None if neither dtype is stored as an integer."""
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
_launch_lock = threading.RLock()
_rewritten_modules: set[int] = set()  # modules whose ``tl`` the current launch has replaced


def _launch_alone(self: Any, *arguments: Any, **options: Any) -> None:
    with _launch_lock:
        _rewritten_modules.clear()
        _launch(self, *arguments, **options)


def _call_within_launch(self: Any, *arguments: Any, **options: Any) -> Any:
    module = id(self.fn.__globals__)
    if module in _rewritten_modules:
        return self.rewrite()(*arguments, **options)
    result = _call(self, *arguments, **options)
    _rewritten_modules.add(module)
    return result


def _tensor(data: Any, dtype: Any) -> Tensor:
    data = np.ascontiguousarray(data)
    if dtype not in _NARROW:
        return torch.from_numpy(data)
    signed = data.view(np.int16) if data.itemsize == 2 else data
    return torch.from_numpy(signed).view(_NARROW[dtype])


def _refuse_bits(function: Any, *operands: Any) -> None:
    for operand in operands:
        dtype = operand.dtype.scalar if isinstance(operand, interpreter.TensorHandle) else None
        if dtype in _NARROW:
            name = getattr(function, "__name__", function)
            raise TypeError(
                f"{name} of {dtype}: the interpreter would compute on its bits. "
                "Convert right after the load: tl.load(...).to(tl.float32)"
            )
