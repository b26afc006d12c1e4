"""Custom ops: a PyTorch function that defines an op, with schema, fake version and cases."""

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
    """One set of arguments on which a kernel is compared with the reference.

    Attributes:
        label: the special feature of this case, unique within op and dtype.
        arguments: by parameter name, in the op's order.
        dims: the dims that a layer would request for these arguments.
        reduction: number of sequential float32 additions that produce one output element; 0 if
            elements are only copied.
        magnitude: bound of the absolute values in these additions in any order: the largest sum of
            absolute terms.
        rounded: bound of the absolute intermediate values that a kernel may hold in the storage
            dtype; 0 if none is larger than the output element that results from it.
    """

    label: str
    arguments: Mapping[str, Any]
    dims: Dims = field(default_factory=dict)
    reduction: int = 1
    magnitude: float = 1.0
    rounded: float = 0.0


class CaseGenerator(Protocol):
    """Generator of cases for one dtype; the same seed yields the same cases."""

    def __call__(self, dtype: torch.dtype, seed: int) -> Iterator[Case]:
        """Yield the cases with float tensors of ``dtype``."""


class CaseSampler(Protocol):
    """Function that draws arguments of a model's size; the same seed draws the same arguments."""

    def __call__(self, dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
        """Draw the arguments of an op for a layer with ``dims`` and a step of ``num_tokens``.

        The op's constants must be the same for every ``num_tokens``. Sizes that the dims leave open
        should have usual values.
        """


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest allowed distance of a kernel's result from the float64 reference.

    bound = roundings * (u(dtype) * max(|y|, rounded) + s(dtype))
            + reduction * (2 * u(float32) * magnitude + n)

    u is the unit roundoff, half the machine epsilon, and s the smallest subnormal. The first line
    allows ``roundings`` roundings to the storage dtype, including the rounding of the result. The
    second line is the first-order bound of a float32 sum in any order: every addition, and the
    multiplication before it, adds an error of at most u(float32) times the partial sum; n is the
    smallest normal float32, which is lost if the hardware flushes subnormals to zero. Integers must
    be equal. Floats must be equal, including the sign of zero, where a case neither rounds nor
    adds.
    """

    roundings: int = 2

    def bound(self, expected: Tensor, dtype: torch.dtype, case: Case) -> Tensor:
        """Compute the largest allowed absolute error for every element of ``expected``."""
        if not dtype.is_floating_point:
            return torch.zeros_like(expected)
        finfo = torch.finfo(dtype)
        roundoff, smallest = finfo.eps / 2, finfo.smallest_normal * finfo.eps
        stored = roundoff * expected.abs().clamp(min=case.rounded) + smallest
        single = torch.finfo(torch.float32)
        # ``eps`` is 2 * u: one unit roundoff for the addition, one for the multiplication.
        accumulated = case.reduction * (single.eps * case.magnitude + single.smallest_normal)
        return self.roundings * stored + accumulated


class CustomOp(Generic[P, R]):
    """An op with a PyTorch reference: a call runs the reference, but layers bind a kernel.

    Selection is for inference: layers call the bound kernel also where an argument requires a
    gradient. Only a kernel that promises to be ``differentiable`` then has a right backward pass;
    any other may drop the gradient without an error.

    Attributes:
        reference: the plain PyTorch function that defines the op.
        schema: typed schema in torch.library's language, inferred from the function's annotations.
        mutates: names of the arguments that are written in place.
        constants: names of the tensor arguments that do not change after the weights were loaded.
        batched: names of the arguments whose dimension 0 counts tokens, sequences or independent
            rows of a weight, or has size 1 and is broadcast. Dimension 0 of every output has the
            same size. Empty if the op has no such dimension, or dependent rows.
        ragged: names of the arguments whose dimension 0 counts the tokens of concatenated
            sequences, each with the name of the int64 argument that holds the sequence starts and,
            last, the end. ``batched`` then names the arguments with one row per sequence, and
            dimension 0 of every output counts the tokens of the first ragged argument.
        differentiable: names of the float arguments whose gradients are the autograd of the
            reference. Empty if the op has no gradient.
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
        differentiable: tuple[str, ...] = (),
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
        self.differentiable = differentiable
        self.signature = inspect.signature(reference)
        declared_names = {*mutates, *constants, *batched, *self.ragged, *self.ragged.values()}
        declared_names |= {*differentiable}
        unknown = sorted(declared_names - set(self.signature.parameters))
        if unknown:
            raise RecordError(
                f"op {name!r} declares {unknown}, which are not its parameters; "
                f"those are {', '.join(self.signature.parameters)}"
            )
        if differentiable and mutates:
            raise RecordError(
                f"op {name!r} writes {', '.join(mutates)}, so it cannot declare a gradient. "
                "Try: leave out differentiable"
            )
        self.schema = name + infer_schema(reference, mutates_args=mutates)
        self.__doc__ = reference.__doc__

    @cached_property
    def cases(self) -> CaseGenerator:
        """The generator of cases; an import string is loaded on first use."""
        return load_target(self._cases) if isinstance(self._cases, str) else self._cases

    @cached_property
    def sample(self) -> CaseSampler | None:
        """The sampler of arguments; None if kernels of this op are not measured."""
        return load_target(self._sample) if isinstance(self._sample, str) else self._sample

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the reference on the arguments."""
        return self.reference(*args, **kwargs)

    def __repr__(self) -> str:
        return f"CustomOp({self.schema})"

    def allowing(self, extra_roundings: int) -> CustomOp[P, R]:
        """Return a copy with a tolerance of ``extra_roundings`` more roundings; for 0, this op."""
        if not extra_roundings:
            return self
        loosened = copy(self)
        loosened.tolerance = replace(
            self.tolerance, roundings=self.tolerance.roundings + extra_roundings
        )
        return loosened

    def fake(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return fake tensors of the shapes, dtypes and strides that the reference returns.

        The reference runs on fake copies of the arguments, so the result always agrees with the
        reference. Nothing is computed and nothing is written.
        """
        # Real tensors are refused, because a reference that creates one would compute.
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
    differentiable: tuple[str, ...] = (),
) -> Callable[[Callable[P, R]], CustomOp[P, R]]:
    """Turn a plain PyTorch function into the definition of the op ``name``.

    ``cases`` and ``sample`` may be import strings, which are loaded on first use: running a model
    needs neither.
    """

    def define(reference: Callable[P, R]) -> CustomOp[P, R]:
        bounds = tolerance or Tolerance()
        return CustomOp(
            reference,
            name,
            mutates,
            constants,
            cases,
            bounds,
            sample,
            batched,
            ragged,
            differentiable,
        )

    return define
