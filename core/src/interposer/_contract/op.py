"""Custom ops: a plain PyTorch function that is the definition, and what follows from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import infer_schema
from torch.utils import _pytree

from interposer._contract.errors import RecordError
from interposer._contract.records import load_target

P = ParamSpec("P")
R = TypeVar("R")
Dims = Mapping[str, int | float | str | bool]


@dataclass(frozen=True, slots=True)
class Case:
    """One set of arguments to compare a kernel with the reference on.

    Attributes:
        label: what is special about it, unique within its op and dtype.
        arguments: by parameter name, in the op's order.
        dims: what a layer would state in its request for these arguments.
        reduction: number of float32 additions in a row behind one output element; 0 where
            elements are only copied.
        magnitude: bound of the absolute values that pass through these additions, in whatever
            order they are done: the largest sum of absolute terms.
        rounded: bound of the absolute values that a kernel may hold in the storage dtype on the
            way; 0 where none is larger than the output element that it ends in.
    """

    label: str
    arguments: Mapping[str, Any]
    dims: Dims = field(default_factory=dict)
    reduction: int = 1
    magnitude: float = 1.0
    rounded: float = 0.0


class CaseGenerator(Protocol):
    """Yields cases for one dtype, the same ones for the same seed."""

    def __call__(self, dtype: torch.dtype, seed: int) -> Iterator[Case]:
        """Return the cases with float tensors of ``dtype``."""


class CaseSampler(Protocol):
    """Draws arguments of the size that a model uses, the same ones for the same seed."""

    def __call__(self, dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
        """Return what a layer whose request states ``dims`` passes in a step of ``num_tokens``.

        The op's constants are the same for every ``num_tokens``. What the dims leave open is
        what is usual.
        """


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The distance that a kernel may have from the float64 reference.

    bound = roundings * (u(dtype) * max(|y|, rounded) + s(dtype))
            + reduction * (2 * u(float32) * magnitude + n)

    u is the unit roundoff, half the machine epsilon, and s the smallest subnormal. The first line
    allows ``roundings`` roundings to the storage dtype on the way, the result's own included. The
    second is the first-order bound of a float32 sum in any order: every addition, and the
    multiplication before it, adds an error of at most u(float32) times the partial sum; n is the
    smallest normal float32, which is lost where the hardware flushes subnormals to zero. Integers
    must be equal, and so must everything where neither rounds nor adds: the sign of a zero too.
    """

    roundings: int = 2

    def bound(self, expected: Tensor, dtype: torch.dtype, case: Case) -> Tensor:
        """Return the largest allowed absolute error for every element of ``expected``."""
        if not dtype.is_floating_point:
            return torch.zeros_like(expected)
        facts = torch.finfo(dtype)
        roundoff, smallest = facts.eps / 2, facts.smallest_normal * facts.eps
        stored = roundoff * expected.abs().clamp(min=case.rounded) + smallest
        single = torch.finfo(torch.float32)
        accumulated = case.reduction * (single.eps * case.magnitude + single.smallest_normal)
        return self.roundings * stored + accumulated


class CustomOp(Generic[P, R]):
    """A named op. Calling it runs the reference; layers bind a kernel instead.

    Attributes:
        reference: the plain PyTorch function that defines the op.
        schema: typed schema in torch.library's language, taken from the function's annotations.
        mutates: names of the arguments that are written in place.
        constants: names of the tensor arguments that don't change after the weights were loaded.
        batched: names of the arguments whose dimension 0 counts tokens, sequences or rows of a
            weight that the op treats one by one, or is 1 where one is for all of them; dimension 0
            of every output counts the same. Empty where the op has no such dimension, or treats
            its indices together.
        ragged: names of the arguments whose dimension 0 counts the tokens of sequences that lie one
            after the other, each with the name of the int64 argument that says where these start
            and, last, end. Then ``batched`` names what has a row for each sequence, and dimension 0
            of every output counts the tokens of the first of these arguments.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        name: str,
        mutates: tuple[str, ...],
        constants: tuple[str, ...],
        cases: CaseGenerator | str,
        tolerance: Tolerance,
        sample: CaseSampler | str | None = None,
        batched: tuple[str, ...] = (),
        ragged: Mapping[str, str] | None = None,
    ) -> None:
        self.reference = reference
        self.name = name
        self.mutates = mutates
        self.constants = constants
        self.tolerance = tolerance
        self._cases = cases
        self._sample = sample
        self.batched = batched
        self.ragged = dict(ragged or {})
        self.signature = inspect.signature(reference)
        named = {*mutates, *constants, *batched, *self.ragged, *self.ragged.values()}
        unknown = sorted(named - set(self.signature.parameters))
        if unknown:
            raise RecordError(
                f"op {name!r} declares {unknown}, which are not its parameters; "
                f"those are {', '.join(self.signature.parameters)}"
            )
        self.schema = name + infer_schema(reference, mutates_args=mutates)
        self.__doc__ = reference.__doc__

    @cached_property
    def cases(self) -> CaseGenerator:
        """The generator of cases."""
        return load_target(self._cases) if isinstance(self._cases, str) else self._cases

    @cached_property
    def sample(self) -> CaseSampler | None:
        """The sampler, or None where kernels are not measured."""
        return load_target(self._sample) if isinstance(self._sample, str) else self._sample

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the reference."""
        return self.reference(*args, **kwargs)

    def __repr__(self) -> str:
        return f"CustomOp({self.schema})"

    def allowing(self, extra_roundings: int) -> CustomOp[P, R]:
        """Return the op with a tolerance of so many roundings more, itself where they are 0."""
        if not extra_roundings:
            return self
        loosened = copy(self)
        loosened.tolerance = replace(
            self.tolerance, roundings=self.tolerance.roundings + extra_roundings
        )
        return loosened

    def fake(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return fake tensors of the shapes, dtypes and strides that the reference returns.

        Derived by running the reference on fake copies of the arguments, so that it cannot
        disagree with it. Nothing is computed and nothing is written.
        """
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:

            def to_fake(value: Any) -> Any:
                return mode.from_tensor(value) if isinstance(value, Tensor) else value

            fake_args, fake_kwargs = _pytree.tree_map(to_fake, (args, kwargs))
            return self.reference(*fake_args, **fake_kwargs)


def custom_op(
    name: str,
    *,
    cases: CaseGenerator | str,
    mutates: tuple[str, ...] = (),
    constants: tuple[str, ...] = (),
    tolerance: Tolerance | None = None,
    sample: CaseSampler | str | None = None,
    batched: tuple[str, ...] = (),
    ragged: Mapping[str, str] | None = None,
) -> Callable[[Callable[P, R]], CustomOp[P, R]]:
    """Turn a plain PyTorch function into the definition of the op ``name``.

    ``cases`` and ``sample`` may be import strings, which are loaded when somebody asks: what runs a
    model needs neither.
    """

    def define(reference: Callable[P, R]) -> CustomOp[P, R]:
        bounds = tolerance or Tolerance()
        return CustomOp(reference, name, mutates, constants, cases, bounds, sample, batched, ragged)

    return define
