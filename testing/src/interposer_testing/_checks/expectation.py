"""The reference's result of a case, and the comparison of a call with it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from interposer import Case, CustomOp
from interposer_testing._checks.call import Call, Given, Subject, tensors_of
from interposer_testing._checks.comparison import compare_form, compare_value
from interposer_testing._checks.fault import Fault


@dataclass(frozen=True, slots=True)
class Expectation:
    """The reference's result of a case.

    Attributes:
        fake: the result's form, on the meta device.
        device_type: where the result has to be.
        values: outputs and mutated arguments by name, float64 where they are floats.
    """

    op: CustomOp[..., Any]
    case: Case
    fake: Any
    device_type: str
    values: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, op: CustomOp[..., Any], case: Case, given: Given) -> Expectation:
        """Run the reference in float64; ``given`` is what a call got, for the form alone."""
        reference = Subject(op, op.reference)
        wide = {name: _widened(value) for name, value in case.arguments.items()}
        outputs = tensors_of(op.reference(*reference.positional(wide)))
        values = {f"output {number}": _widened(tensor) for number, tensor in enumerate(outputs)}
        values |= {f"argument {name!r}": wide[name] for name in op.mutates}
        fake = _fake(op, given.arguments)
        devices = (v.device.type for v in given.arguments.values() if isinstance(v, torch.Tensor))
        return cls(op, case, fake, next(devices, "cpu"), values)

    def faults(self, call: Call) -> Iterator[Fault]:
        """Yield everything in which ``call`` departs from the reference and its declarations."""
        yield from self.departures(call)
        for name, operand in call.given.operands.items():
            where = f"argument {name!r}"
            if not operand.is_changed():
                continue
            if name not in self.op.mutates and operand.is_written():
                yield Fault("mutation", where, "it is written, but not declared in mutates")
            if operand.strays():
                yield Fault("guard", where, f"{operand.strays()} elements beside it are written")
        if shared := call.aliases():
            for one, other in sorted(shared - self._allowed()):
                yield Fault("alias", one, f"it shares memory with {other}")

    def departures(self, call: Call) -> Iterator[Fault]:
        """Yield where the form or the values of the result are not those of the reference."""
        op, case = self.op, self.case
        misshapen = list(compare_form(call.result, self.fake, self.device_type))
        yield from misshapen
        if any(fault.check in ("structure", "shape") for fault in misshapen):
            return
        exact = op.tolerance.roundings == 0 and case.reduction == 0
        actual = call.values(op.mutates)
        for where, expected in self.values.items():
            bound = op.tolerance.bound(expected, actual[where].dtype, case)
            yield from compare_value(where, actual[where], expected, bound, exact=exact)

    def _allowed(self) -> set[tuple[str, str]]:
        """Return the aliases of results in a call of the reference with the case's own dtypes."""
        reference = Subject(self.op, self.op.reference)
        return reference.call(reference.given(self.case)).aliases()


# Results without numbers; the same form comes again with other numbers, and for other candidates.
_fakes: MutableMapping[CustomOp[..., Any], dict[Hashable, Any]] = WeakKeyDictionary()
_MOST_FAKES = 256


def _fake(op: CustomOp[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return the form of the result, derived by the ops of the reference in milliseconds.

    What is returned is for reading.
    """
    form: Hashable = tuple(
        (name, type(v), (v.shape, v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v)
        for name, v in arguments.items()
    )
    found = _fakes.setdefault(op, {})
    try:
        if form in found:
            return found[form]
    except TypeError:  # an argument is a list
        form = None
    fake = op.reference(*Subject(op, op.reference).positional(_on_meta(arguments)))
    if form is not None and len(found) < _MOST_FAKES:
        found[form] = fake
    return fake


def _on_meta(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without their numbers.

    Fake tensors would say the same, and take five times as long; ``opcheck`` tries those.
    """
    return {
        name: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta")
        if isinstance(v, torch.Tensor)
        else v
        for name, v in arguments.items()
    }


def _widened(value: Any) -> Any:
    """Return a copy of float64 where the value is a float tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(torch.float64 if value.dtype.is_floating_point else value.dtype, copy=True)
