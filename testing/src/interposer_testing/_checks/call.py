"""One call of a function under test, with arguments in memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from interposer import Case, CustomOp
from interposer_testing._checks.operand import Fence, Operand

Prepare = Callable[..., Mapping[str, Any]]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Subject:
    """A function under test with what is known of it.

    Attributes:
        function: takes the op's arguments by position; constants as ``prepare`` returned them.
        prepare: takes the op's constants by name and returns their replacements by the same names.
        properties: what it promises.
        device: where it runs.
    """

    op: CustomOp[..., Any]
    function: Callable[..., Any]
    prepare: Prepare | None = None
    properties: frozenset[str] = frozenset()
    device: str = "cpu"

    def given(self, case: Case, fence: Fence = "") -> Given:
        """Return copies of the arguments of ``case`` with the constants prepared."""
        operands = {
            name: Operand(value, self.device, fence)
            for name, value in case.arguments.items()
            if isinstance(value, torch.Tensor)
        }
        arguments = {**case.arguments, **{name: o.tensor for name, o in operands.items()}}
        return Given(operands, arguments, self.prepared(arguments))

    def prepared(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the replacements of the constants among ``arguments``, nothing without a change.

        Raises: ValueError: ``prepare`` returned other names than those of the constants.
        """
        if self.prepare is None:
            return {}
        constants = self.op.constants
        found = self.prepare(**{name: arguments[name] for name in constants})
        if set(found) != set(constants):
            raise ValueError(f"prepare returned {sorted(found)}, not {sorted(constants)}")
        return found

    def positional(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return ``arguments`` in the op's order."""
        return self.op.signature.bind(**arguments).args

    def call(self, given: Given, function: Callable[..., Any] | None = None) -> Call:
        """Return the finished call of the function, or of another one in its place."""
        called = function or self.function
        return Call(given, called(*self.positional({**given.arguments, **given.prepared})))


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of one call.

    Attributes:
        operands: the tensors among the arguments, in memory that is watched.
        arguments: all of them as in the case.
        prepared: what is passed for the constants instead, where they are prepared.
    """

    operands: Mapping[str, Operand]
    arguments: Mapping[str, Any]
    prepared: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A finished call with the memory that it had been given."""

    given: Given
    result: Any

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The tensors of the result."""
        return tensors_of(self.result)

    def values(self, mutates: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Return the outputs and the mutated arguments by where they are found."""
        values = {f"output {number}": tensor for number, tensor in enumerate(self.outputs)}
        return values | {f"argument {n!r}": self.given.operands[n].tensor for n in mutates}

    def aliases(self) -> set[tuple[str, str]]:
        """Return the pairs of an output and an argument or later output that share memory."""
        outputs = [(f"output {number}", [tensor]) for number, tensor in enumerate(self.outputs)]
        operands, prepared = self.given.operands.items(), self.given.prepared.items()
        arguments = [(f"argument {name!r}", [o.tensor]) for name, o in operands]
        replaced = [(f"prepared {name!r}", tensors_of(value)) for name, value in prepared]
        return {
            (output, other)
            for number, (output, tensors) in enumerate(outputs)
            for other, rivals in [*outputs[number + 1 :], *arguments, *replaced]
            if storages(tensors) & storages(rivals)
        }


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a result, or of a prepared constant."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storages(tensors: list[torch.Tensor]) -> set[int]:
    """Return the addresses of memory behind ``tensors``; packed layouts have none that is known."""
    strided = [t for t in tensors if t.numel() and t.layout == torch.strided]
    return {tensor.untyped_storage().data_ptr() for tensor in strided}


def differences(
    ones: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str]]:
    """Yield each difference of two sets of values, bit by bit; any NaN equals any other."""
    for where, one in ones.items():
        other = others[where]
        if one.shape != other.shape or one.dtype != other.dtype:
            yield where, f"its form is {list(other.shape)} {other.dtype}, not {list(one.shape)}"
            continue
        bits = _BITS[one.dtype.itemsize]
        wrong = one.contiguous().view(bits) != other.contiguous().view(bits)
        wrong &= ~(one.isnan() & other.isnan())
        if wrong.any():
            place = tuple(int(index) for index in wrong.nonzero()[0])
            found = f"{one[place].item()!r} and {other[place].item()!r} at {list(place)}"
            yield where, f"{found}; {int(wrong.sum())} of {wrong.numel()} differ"
