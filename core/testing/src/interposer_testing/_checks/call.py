"""One call of a function under test, with arguments copied to guarded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from interposer import Case, CustomOp
from interposer_testing._checks.operand import Allocate, Fence, Operand
from interposer_testing._checks.remote_value import RemoteValue

Prepare = Callable[..., Mapping[str, Any]]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Subject:
    """A function under test, with its op and properties.

    Attributes:
        function: takes the op's arguments by position, with constants as ``prepare`` returns them.
        prepare: takes the op's constants by name and returns their replacements by the same names.
        properties: the declared properties, such as "deterministic".
        device: torch device on which the function runs.
        allocate: allocates the memory of arguments, for a function of another process.
    """

    op: CustomOp[..., Any]
    function: Callable[..., Any]
    prepare: Prepare | None = None
    properties: frozenset[str] = frozenset()
    device: str = "cpu"
    allocate: Allocate | None = None

    def given(self, case: Case, fence: Fence = "") -> CallArguments:
        """Copy the arguments of ``case`` to guarded memory, and prepare its constants."""
        operands = {
            name: Operand(value, self.device, fence, self.allocate)
            for name, value in case.arguments.items()
            if isinstance(value, torch.Tensor)
        }
        arguments = {**case.arguments, **{name: o.tensor for name, o in operands.items()}}
        return CallArguments(operands, arguments, self.prepared(arguments))

    def prepared(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the prepared constants by name; empty if the function has no ``prepare``.

        Raises: ValueError: ``prepare`` returned other names than those of the constants.
        """
        if self.prepare is None:
            return {}
        constants = self.op.constants
        replacements = self.prepare(**{name: arguments[name] for name in constants})
        if set(replacements) != set(constants):
            raise ValueError(f"prepare returned {sorted(replacements)}, not {sorted(constants)}")
        return replacements

    def positional(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the values of ``arguments`` in the order of the op's signature."""
        return self.op.signature.bind(**arguments).args

    def call(self, given: CallArguments, function: Callable[..., Any] | None = None) -> Call:
        """Call the function under test, or ``function`` instead; return the finished call."""
        callee = function or self.function
        return Call(given, callee(*self.positional({**given.arguments, **given.prepared})))


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of one call: tensors in guarded memory, and prepared constants.

    Attributes:
        operands: the tensor arguments, in guarded memory.
        arguments: all arguments by name, as in the case.
        prepared: prepared constants by name, which are passed instead of the originals.
    """

    operands: Mapping[str, Operand]
    arguments: Mapping[str, Any]
    prepared: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A finished call: arguments and result."""

    given: CallArguments
    result: Any

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The tensors of the result."""
        return tensors_of(self.result)

    def values(self, mutates: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Return the outputs and the mutated arguments by label, such as "output 0"."""
        values = {f"output {number}": tensor for number, tensor in enumerate(self.outputs)}
        # A kernel may return its result by writing to an argument, so compare such arguments too.
        return values | {f"argument {n!r}": self.given.operands[n].tensor for n in mutates}

    def aliases(self) -> set[tuple[str, str]]:
        """Return the pairs (output, argument or later output) that share memory."""
        outputs = [(f"output {number}", [tensor]) for number, tensor in enumerate(self.outputs)]
        operands, prepared = self.given.operands.items(), self.given.prepared.items()
        arguments = [(f"argument {name!r}", [o.tensor]) for name, o in operands]
        constants = [(f"prepared {name!r}", tensors_of(value)) for name, value in prepared]
        return {
            (output, alias)
            for index, (output, tensors) in enumerate(outputs)
            for alias, alias_tensors in [*outputs[index + 1 :], *arguments, *constants]
            if storages(tensors) & storages(alias_tensors)
        }


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested result or prepared constant, in order."""
    tensors = list[torch.Tensor]()
    for leaf in _pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif isinstance(leaf, RemoteValue):
            tensors += leaf.mirrored()
    return tensors


def storages(tensors: list[torch.Tensor]) -> set[int]:
    """Return the storage addresses of strided tensors; other layouts expose no address."""
    strided = [t for t in tensors if t.numel() and t.layout == torch.strided]
    return {tensor.untyped_storage().data_ptr() for tensor in strided}


def differences(
    first_values: Mapping[str, torch.Tensor], second_values: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str]]:
    """Yield (label, description) for values whose bits differ; any NaN equals any other NaN."""
    for where, first in first_values.items():
        second = second_values[where]
        if first.shape != second.shape or first.dtype != second.dtype:
            yield where, f"its form is {list(second.shape)} {second.dtype}, not {list(first.shape)}"
            continue
        bits = _BITS[first.dtype.itemsize]
        # Comparing bits distinguishes 0.0 from -0.0, unlike ``==``.
        is_wrong = first.contiguous().view(bits) != second.contiguous().view(bits)
        is_wrong &= ~(first.isnan() & second.isnan())
        if is_wrong.any():
            index = tuple(int(position) for position in is_wrong.nonzero()[0])
            values = f"{first[index].item()!r} and {second[index].item()!r} at {list(index)}"
            yield where, f"{values}; {int(is_wrong.sum())} of {is_wrong.numel()} differ"
