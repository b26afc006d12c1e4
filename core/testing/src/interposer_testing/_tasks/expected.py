"""Expected values and error bounds of a task's reference.

An op of this project counts its roundings. A reference from elsewhere does not, so its error is
measured: the reference runs twice, once as it is and once with every float in float64. For an
output y of dtype d, the bound of element i is

    max(4 * e, 64 * u(float32)) * (|y_i| + rms(y)) + u(d) * |y_i| + s(d)

    e = max over i of (|own_i - y_i| - u(d) * |y_i| - s(d)) / (|y_i| + rms(y)), at least 0

where y is the float64 result, ``own`` the reference's own result, u the unit roundoff and s the
smallest subnormal. A solution may therefore lose two bits more than the reference. The term with
u(float32) is the random-walk error of a float32 sum of 4,096 terms one after another: the reference
may sum pairwise, and an honest kernel need not. TF32 products (u = 2^-11) of zero-mean numbers
exceed it. The last terms are one rounding to the output dtype, or two if y is rounded itself, as
float8 outputs are. If a reference runs only in its own dtype, y is that result, and e is 2 * u(d).

Where the reference overflows its own dtype, every value passes. An integer output may differ from
the float64 result as far as the reference's own result differs, as a top-k index at a tie.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from interposer import Case, CustomOp
from interposer.errors import ConfigError, described, foreign_errors
from interposer_testing._checks.call import CallArguments, tensors_of
from interposer_testing._checks.expectation import Expectation
from interposer_testing._judge.task import Expected

_FACTOR = 4
_FLOOR = 64 * torch.finfo(torch.float32).eps / 2
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)

Run = Callable[[Mapping[str, Any], bool], Sequence[Tensor]]
"""Runs a reference on arguments by name; if true, with weights in float64."""


def counted(op: CustomOp[..., Any], case: Case) -> Expected:
    """Run the reference of a registered op; return results with bounds from the op's tolerance."""
    expectation = Expectation.of(op, case, CallArguments({}, case.arguments, {}))
    fakes = [tensor.to("meta") for tensor in tensors_of(expectation.fake)]
    forms = {f"output {number}": fake for number, fake in enumerate(fakes)}
    forms |= {f"argument {name!r}": case.arguments[name].to("meta") for name in op.mutates}
    bounds = {
        name: op.tolerance.bound(value, forms[name].dtype, case)
        for name, value in expectation.values.items()
    }
    return Expected(expectation.values, bounds, forms)


def measured(name: str, run: Run, outputs: Sequence[str], case: Case) -> Expected:
    """Run another reference; return results with bounds from the reference's rounding error.

    Args:
        name: of the task, for errors.
        outputs: names of the outputs; empty numbers them.
    Raises: ConfigError: the reference fails, or returns another number of outputs.
    """
    narrow = [tensor.clone() for tensor in _run(name, run, case.arguments)]
    if outputs and len(narrow) != len(outputs):
        raise ConfigError(
            f"The reference of {name!r} returned {len(narrow)} outputs on {case.label!r}, but its "
            f"definition has {len(outputs)}: {', '.join(outputs)}. Correct the definition."
        )
    wide = _wide_results(run, case.arguments, narrow)
    names = outputs or [f"output {number}" for number in range(len(narrow))]
    values = {
        name: _as_expected(tensor) for name, tensor in zip(names, wide or narrow, strict=True)
    }
    narrow_values = dict(zip(names, narrow, strict=True))
    wide_values = dict(zip(names, wide, strict=True)) if wide else {}
    bounds = {
        name: _bound(values[name], tensor, wide_values.get(name))
        for name, tensor in narrow_values.items()
    }
    forms = {
        name: torch.empty_like(tensor, device="meta") for name, tensor in narrow_values.items()
    }
    return Expected(values, bounds, forms, "own dtype" if wide is None else "float64")


def _run(name: str, run: Run, arguments: Mapping[str, Any]) -> Sequence[Tensor]:
    with torch.random.fork_rng(devices=[]):
        state = torch.random.get_rng_state()
        try:
            with torch.no_grad():
                results = run(_copies(arguments), False)
        except foreign_errors() as error:
            raise ConfigError(
                f"The reference of {name!r} failed: {described(error)}. Correct the definition, or "
                "the workload that has these inputs."
            ) from error
        if not torch.equal(torch.random.get_rng_state(), state):
            raise ConfigError(
                f"The reference of {name!r} draws random numbers, so it has no expected values. "
                "Pass the random numbers as an input."
            )
        return results


def _wide_results(
    run: Run, arguments: Mapping[str, Any], narrow: Sequence[Tensor]
) -> Sequence[Tensor] | None:
    """Run a reference in float64; return None if the reference cannot run in float64.

    Args:
        narrow: results of the run in the dtypes of the arguments.

    A reference that demands the dtypes of its arguments gets those, and computes in float64.
    """
    for widen_arguments in (True, False):
        # Made outside of the block, where a copy in bfloat16 would be one in float64.
        copies = _copies(arguments, widen_arguments)
        try:
            with torch.no_grad(), _widened():
                wide = [tensor.clone() for tensor in run(copies, True)]
        except foreign_errors():
            continue  # the narrow run succeeded, so the reference lacks only float64
        if [tensor.shape for tensor in wide] == [tensor.shape for tensor in narrow]:
            return wide
    return None


def _copies(arguments: Mapping[str, Any], widen: bool = False) -> dict[str, Any]:
    """Copy the tensors, which a reference may overwrite; if ``widen``, floats as float64."""
    return {
        name: value.to(
            torch.float64 if widen and value.is_floating_point() else value.dtype, copy=True
        )
        if isinstance(value, Tensor)
        else value
        for name, value in arguments.items()
    }


class _Widening(TorchFunctionMode):
    """Replaces the dtypes float32, bfloat16 and float16 by float64 in calls of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS:
            return args[0].double()
        # ``view`` with a dtype reinterprets bits.
        if func is not Tensor.view:
            args, kwargs = _pytree.tree_map(_wide_dtype, (args, kwargs))
        return func(*args, **kwargs)


def _wide_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


@contextlib.contextmanager
def _widened() -> Iterator[None]:
    """Make torch create and convert floats as float64 in the block."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening():
            yield
    finally:
        torch.set_default_dtype(default)


def _as_expected(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _bound(value: Tensor, narrow: Tensor, wide: Tensor | None) -> Tensor:
    """Return the error bound of each element of one output.

    Args:
        narrow: result of the run in the dtypes of the arguments.
        wide: result of the run in float64, before its conversion to ``value``; None without one.
    """
    if not narrow.is_floating_point():
        return (value.double() - narrow.double()).abs()
    finfo = torch.finfo(narrow.dtype)
    roundoff, smallest = finfo.eps / 2, finfo.smallest_normal * finfo.eps
    # A reference that rounds to float8 does so in float64 too, and near a tie to the other side.
    roundings = 1 if wide is not None and wide.dtype == torch.float64 else 2
    magnitude = value.abs().nan_to_num(0.0, 0.0)
    is_finite = value.isfinite()
    mean_square = magnitude.square().sum() / max(1, int(is_finite.sum()))
    scale = magnitude + mean_square.sqrt()
    rounding = roundings * (roundoff * magnitude + smallest)
    narrow64 = narrow.double()
    if wide is None:
        relative = 2 * roundoff  # an assumption: nothing was measured
    else:
        error = ((narrow64 - value).abs() - rounding).clamp(min=0) / scale
        is_comparable = is_finite & narrow64.isfinite() & (scale > 0)
        relative = float(error[is_comparable].max()) if is_comparable.any() else 0.0
    error_bound = max(_FACTOR * relative, _FLOOR) * scale + rounding
    # float64 has a value where the narrow dtype overflows: any result is allowed there.
    return error_bound.masked_fill(is_finite & ~narrow64.isfinite(), torch.inf)
