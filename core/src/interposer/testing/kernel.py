"""The check of one kernel on one case, against the reference of its op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from interposer.op import Case, CustomOp
from interposer.testing.comparison import compare_form, compare_value
from interposer.testing.fault import Fault
from interposer.testing.operand import Operand, poisoned_memory

__all__ = ["check_kernel"]

Prepare = Callable[..., Mapping[str, Any]]


def check_kernel(
    op: CustomOp[..., Any],
    function: Callable[..., Any],
    case: Case,
    *,
    prepare: Prepare | None = None,
    device: str = "cpu",
) -> list[Fault]:
    """Return everything in which ``function`` departs from the reference of ``op`` on ``case``.

    It is called twice with equal arguments, first with uninitialised memory poisoned. Checked are
    values and mutated arguments against the reference in float64, the form of the result against
    the fake kernel, that nothing undeclared is written, that results share no memory with
    arguments unless the reference's do, and that a second call leaves the first result alone.
    What ``function`` raises is passed on.

    Args:
        function: takes the op's arguments by position; constants as ``prepare`` returned them.
        prepare: takes the op's constants by name and returns their replacements by the same names.
        device: where to run; the reference runs in host memory.
    """
    with poisoned_memory():
        first = _Call.run(op, function, case, prepare, device)
    kept = [tensor.clone() for tensor in first.outputs]
    second = _Call.run(op, function, case, prepare, device)
    expectation = _Expectation.of(op, case, first)
    faults = list(_check_call(op, case, first, expectation))
    if not faults:
        faults += _check_call(op, case, second, expectation)
    if _storages(first.outputs) & _storages(second.outputs):
        reason = "a second call returns the memory of the first result"
        faults.append(Fault("alias", "second call", reason))
    elif not all(map(_is_same, kept, first.outputs)):
        faults.append(Fault("alias", "second call", "it changes the first result"))
    return faults


@dataclass(frozen=True, slots=True)
class _Call:
    """A finished call with the memory that it had been given."""

    operands: Mapping[str, Operand]
    prepared: Mapping[str, Any]
    result: Any

    @classmethod
    def run(
        cls,
        op: CustomOp[..., Any],
        function: Callable[..., Any],
        case: Case,
        prepare: Prepare | None,
        device: str,
    ) -> _Call:
        operands = {
            name: Operand(value, device)
            for name, value in case.arguments.items()
            if isinstance(value, torch.Tensor)
        }
        arguments = {**case.arguments, **{name: o.tensor for name, o in operands.items()}}
        prepared: Mapping[str, Any] = {}
        if prepare is not None:
            prepared = prepare(**{name: arguments[name] for name in op.constants})
            if set(prepared) != set(op.constants):
                raise ValueError(f"prepare returned {sorted(prepared)}, not {sorted(op.constants)}")
        return cls(operands, prepared, function(*_positional(op, {**arguments, **prepared})))

    @property
    def outputs(self) -> list[torch.Tensor]:
        return _tensors(self.result)

    def aliases(self) -> set[tuple[str, str]]:
        """Return the pairs of an output and an argument or later output that share memory."""
        outputs = [(f"output {number}", [tensor]) for number, tensor in enumerate(self.outputs)]
        arguments = [(f"argument {name!r}", [o.tensor]) for name, o in self.operands.items()]
        prepared = [
            (f"prepared {name!r}", _tensors(value)) for name, value in self.prepared.items()
        ]
        return {
            (output, other)
            for number, (output, tensors) in enumerate(outputs)
            for other, rivals in [*outputs[number + 1 :], *arguments, *prepared]
            if _storages(tensors) & _storages(rivals)
        }


@dataclass(frozen=True, slots=True)
class _Expectation:
    """What the reference says about a case.

    Attributes:
        fake: the result's form.
        values: outputs and mutated arguments by name, float64 where they are floats.
        aliases: of a call with the case's own dtypes.
    """

    fake: Any
    values: Mapping[str, torch.Tensor]
    aliases: set[tuple[str, str]]

    @classmethod
    def of(cls, op: CustomOp[..., Any], case: Case, call: _Call) -> _Expectation:
        given = {**case.arguments, **{name: o.tensor for name, o in call.operands.items()}}
        wide = {name: _widened(value) for name, value in case.arguments.items()}
        outputs = _tensors(op.reference(*_positional(op, wide)))
        values = {f"output {number}": tensor for number, tensor in enumerate(outputs)}
        values |= {f"argument {name!r}": wide[name] for name in op.mutates}
        own = _Call.run(op, op.reference, case, None, "cpu")
        return cls(op.fake(*_positional(op, given)), values, own.aliases())


def _check_call(
    op: CustomOp[..., Any], case: Case, call: _Call, expectation: _Expectation
) -> Iterator[Fault]:
    misshapen = list(compare_form(call.result, expectation.fake))
    yield from misshapen
    if not any(fault.check in ("structure", "shape") for fault in misshapen):
        actual = {f"output {number}": tensor for number, tensor in enumerate(call.outputs)}
        actual |= {f"argument {name!r}": call.operands[name].tensor for name in op.mutates}
        for where, expected in expectation.values.items():
            bound = op.tolerance.bound(expected, actual[where].dtype, case)
            yield from compare_value(where, actual[where], expected, bound)
    for name, operand in call.operands.items():
        where = f"argument {name!r}"
        if name not in op.mutates and operand.is_changed():
            yield Fault("mutation", where, "it is written, but not declared in mutates")
        elif operand.strays():
            yield Fault("mutation", where, f"{operand.strays()} elements beside it are written")
    for one, other in sorted(call.aliases() - expectation.aliases):
        yield Fault("alias", one, f"it shares memory with {other}")


def _positional(op: CustomOp[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    return op.signature.bind(**arguments).args


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _widened(value: Any) -> Any:
    """Return a copy of float64 where the value is a float tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(torch.float64 if value.dtype.is_floating_point else value.dtype, copy=True)


def _storages(tensors: list[torch.Tensor]) -> set[int]:
    """Return the addresses of memory behind ``tensors``; packed layouts have none that is known."""
    strided = [t for t in tensors if t.numel() and t.layout == torch.strided]
    return {tensor.untyped_storage().data_ptr() for tensor in strided}


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
