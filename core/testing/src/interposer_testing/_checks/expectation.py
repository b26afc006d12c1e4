"""The expected result of a case, computed by the reference, and the faults of a call."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from interposer import Case, CustomOp
from interposer_testing._checks.call import Call, CallArguments, Subject, tensors_of
from interposer_testing._checks.comparison import compare_form, compare_value
from interposer_testing._checks.fault import Fault


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected result of a case, with which results of calls are compared.

    Attributes:
        fake: tensors on the meta device with the expected structure, shapes, strides and dtypes.
        device_type: the expected device type.
        values: outputs and mutated arguments by label; floats are float64.
        bounds: largest absolute errors by label, instead of those of the op's tolerance.
        labels: names for faults, of outputs that are not called "output 0" and so on.
        any_strides: labels of the outputs that may have any strides.
    """

    op: CustomOp[..., Any]
    case: Case
    fake: Any
    device_type: str
    values: Mapping[str, torch.Tensor]
    bounds: Mapping[str, torch.Tensor] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    any_strides: frozenset[str] = frozenset()

    @classmethod
    def of(cls, op: CustomOp[..., Any], case: Case, given: CallArguments) -> Expectation:
        """Compute the expected result of a case with the reference in float64.

        Args:
            given: the arguments of the call under test, which determine the form of the result.
        """
        reference = Subject(op, op.reference)
        # Mutated arguments are changed in these copies, not in ``case``.
        wide = {name: _widened(value) for name, value in case.arguments.items()}
        outputs = tensors_of(op.reference(*reference.positional(wide)))
        values = {f"output {number}": _widened(tensor) for number, tensor in enumerate(outputs)}
        values |= {f"argument {name!r}": wide[name] for name in op.mutates}
        fake = fake_result(op, given.arguments)
        devices = (v.device.type for v in given.arguments.values() if isinstance(v, torch.Tensor))
        return cls(op, case, fake, next(devices, "cpu"), values)

    def faults(self, call: Call) -> Iterator[Fault]:
        """Yield the faults of ``call``: wrong form or values, undeclared writes and aliases."""
        yield from self.departures(call)
        for name, operand in call.given.operands.items():
            where = f"argument {name!r}"
            if not operand.is_changed():
                continue
            if name not in self.op.mutates and operand.is_written():
                yield Fault("mutation", where, "it is written, but not declared in mutates")
            if operand.strays():
                yield Fault(
                    "guard", where, f"{operand.strays()} elements outside of it are written"
                )
        if shared := call.aliases():
            for output, alias in sorted(shared - self._allowed()):
                reason = f"it shares memory with {self.labels.get(alias, alias)}"
                yield Fault("alias", self.labels.get(output, output), reason)

    def departures(self, call: Call) -> Iterator[Fault]:
        """Yield the differences of form and values between the result and the reference."""
        for fault in self._departures(call):
            if fault.check != "stride" or fault.where not in self.any_strides:
                yield replace(fault, where=self.labels.get(fault.where, fault.where))

    def _departures(self, call: Call) -> Iterator[Fault]:
        op, case = self.op, self.case
        form_faults = list(compare_form(call.result, self.fake, self.device_type))
        yield from form_faults
        if any(fault.check in ("structure", "shape") for fault in form_faults):
            return  # values of other shapes cannot be compared
        # An op without rounding and without sums must be exact, including the sign of zero.
        exact = op.tolerance.roundings == 0 and case.reduction == 0
        actual = call.values(op.mutates)
        for where, expected in self.values.items():
            error_bound = self._bound(where, actual[where].dtype)
            yield from compare_value(where, actual[where], expected, error_bound, exact=exact)

    def at_rounding_boundaries(self, call: Call) -> Expectation:
        """Return a copy that accepts neighbouring 8-bit numbers in a few elements of ``call``.

        The cases of an op that quantizes avoid values so close to a rounding boundary that float32
        errors decide between two numbers. Values mixed from several cases do not avoid them. The
        float32 error of a norm of H elements is about sqrt(H) u(float32) = 4e-6 for H = 4096, and
        8-bit floats are at least 2**-4 apart, both relative to the value. So about one element in
        8,000 may have the other number; eight times as many are accepted.
        """
        values, actual = dict(self.values), call.values(self.op.mutates)
        for where, expected in self.values.items():
            result = actual[where]
            if result.itemsize != 1 or result.dtype == torch.bool:
                continue
            distance = (_ordered(result) - _ordered(expected.to(result.dtype))).abs()
            num_different = int(distance.count_nonzero())
            if num_different <= max(1, result.numel() >> 10) and int(distance.max()) <= 1:
                values[where] = _widened(result)
        return replace(self, values=values)

    def errors(self, call: Call) -> dict[str, float]:
        """Return the largest error of each float result by its name, as a fraction of its bound.

        The result must have no departures.
        """
        actual, errors = call.values(self.op.mutates), dict[str, float]()
        for where, expected in self.values.items():
            if not expected.dtype.is_floating_point:
                continue
            error_bounds = self._bound(where, actual[where].dtype)
            error = (actual[where].cpu().double() - expected).abs()
            fraction = (error / error_bounds)[error.isfinite() & (error > 0)]
            name = self.labels.get(where, where)
            errors[name] = float(fraction.max()) if len(fraction) else 0.0
        return errors

    def _bound(self, where: str, dtype: torch.dtype) -> torch.Tensor:
        if self.bounds is not None:
            return self.bounds[where]
        return self.op.tolerance.bound(self.values[where], dtype, self.case)

    def _allowed(self) -> set[tuple[str, str]]:
        """Return the pairs of values that share memory in a reference call, as kernels may do."""
        reference = Subject(self.op, self.op.reference)
        return reference.call(reference.given(self.case)).aliases()


def result_faults(
    op: CustomOp[..., Any], case: Case, arguments: Mapping[str, Any], result: Any
) -> list[Fault]:
    """Compare form and values of a result with the reference of an op.

    Args:
        case: arguments of the call, as they were before it.
        arguments: mutated arguments by name, as the call left them; others are ignored.
        result: result of the call, on the CPU.
    """
    inputs = Subject(op, op.reference).given(case)
    for name in op.mutates:
        inputs.operands[name].tensor.copy_(arguments[name])
    return list(Expectation.of(op, case, inputs).departures(Call(inputs, result)))


# Fake results by op and form of the arguments: many cases and candidates share a form.
_fakes: MutableMapping[CustomOp[..., Any], dict[Hashable, Any]] = WeakKeyDictionary()
_MAX_FAKES = 256


def fake_result(op: CustomOp[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Run the reference on meta tensors; the cached result must not be changed."""
    form: Hashable = tuple(
        (name, type(v), (v.shape, v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v)
        for name, v in arguments.items()
    )
    fakes = _fakes.setdefault(op, {})
    try:
        if form in fakes:
            return fakes[form]
    except TypeError:  # an argument is a list, which is not hashable
        form = None
    fake = op.reference(*Subject(op, op.reference).positional(on_meta(arguments)))
    if form is not None and len(fakes) < _MAX_FAKES:
        fakes[form] = fake
    return fake


def on_meta(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the tensors in ``arguments`` by meta tensors of the same form.

    Fake tensors would give the same result but take five times as long.
    """
    return {
        name: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta")
        if isinstance(v, torch.Tensor)
        else v
        for name, v in arguments.items()
    }


def _ordered(numbers: torch.Tensor) -> torch.Tensor:
    """Map 8-bit numbers to integers in the same order, in which neighbours differ by 1."""
    if not numbers.dtype.is_floating_point:
        return numbers.int()
    bits = numbers.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def _widened(value: Any) -> Any:
    """Copy a tensor, floats as float64; return other values unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(torch.float64 if value.dtype.is_floating_point else value.dtype, copy=True)
