"""The forward and backward pass of an op as one op, with an error bound for the gradients.

The bound of a gradient follows the rule of ``Tolerance``. A forward pass has counted sums and
stated magnitudes, a gradient has neither, so they are measured: the reference runs in float64
several times, and every value (argument, result of an operator, in both passes) is changed by the
relative amount h, up or down at random. Fused operators are decomposed, so that the terms within
them change too. For element i of a gradient g in the storage dtype,

    m_i = max(|g_i|, largest change of g_i over the runs / h)
    bound = roundings * (u(dtype) * m_i + s(dtype) * k) + 64 * (u(float32) * m_i + n * k)
    k = max(1, largest |g_i|)

m is the size of the intermediate values that reach g_i, which is far above |g_i| where they cancel.
Of large gradients there is one run, and m_i is at least the root mean square of all changes / h.
The first term allows as many roundings to the storage dtype as the op's result has. The second is
the random-walk error of a float32 sum of 4,096 terms one after another. u, s and n are those of
``Tolerance``; k is there because a factor that is lost below n may stand before large factors. A
gradient is not compared if the reference's own, in the dtype of the arguments, has NaN or infinity:
at special values, formulas that are equal elsewhere differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from inspect import Parameter, Signature
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from interposer import Case, CustomOp
from interposer.errors import ConfigError
from interposer_testing._checks.call import CallArguments, Subject, tensors_of
from interposer_testing._checks.expectation import Expectation, fake_result
from interposer_testing._judge.remote import RemoteFunction
from interposer_testing._judge.worker import Differentiated

_NUM_RUNS = 8
_CHANGE = 2.0**-30
# From here on, runs take seconds.
_MANY_ELEMENTS = 1 << 17
# Square root of the number of terms of a float32 sum.
_SUM_ROUNDINGS = 64
_SINGLE = torch.finfo(torch.float32)


class TrainingStep:
    """An op that takes a gradient for each output of another op, and returns gradients as well.

    Attributes:
        op: takes the arguments of the original op, followed by the gradients of its outputs, None
            for an integer output. Returns the outputs, followed by the gradients of those
            arguments that are ``differentiable`` and not None.
        places: number of arguments of the original op, and indices of those with gradients.
        output_gradients: names of the arguments that follow those of the original op.
    """

    def __init__(self, op: CustomOp[..., Any]) -> None:
        """Derive the training step of ``op``.

        Raises: ConfigError: the op declares no gradient.
        """
        if not op.differentiable:
            raise ConfigError(
                f"The op {op.name!r} declares no gradient, so no backward pass can be compared. "
                "Try: declare its differentiable arguments, or test the forward pass alone"
            )
        self._forward = op
        names = list(op.signature.parameters)
        self.places = len(names), [names.index(name) for name in op.differentiable]
        result = get_type_hints(op.reference)["return"]
        self._num_outputs = 1 if result is Tensor else len(get_args(result))
        self.output_gradients = tuple(f"output_gradient_{n}" for n in range(self._num_outputs))
        self.op = self._derived()

    def _derived(self) -> CustomOp[..., Any]:
        forward = self._forward
        step = Differentiated(forward.reference, *self.places)

        def reference(*args: Any, **kwargs: Any) -> list[Tensor]:
            return step(*signature.bind(*args, **kwargs).args)  # type: ignore[return-value]

        types = get_type_hints(forward.reference)
        parameters = [
            p.replace(annotation=types[n]) for n, p in forward.signature.parameters.items()
        ]
        parameters += [
            Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Tensor | None)
            for name in self.output_gradients
        ]
        signature = Signature(parameters, return_annotation=list[Tensor])
        reference.__signature__ = signature  # type: ignore[attr-defined]
        reference.__annotations__ = {p.name: p.annotation for p in parameters} | {
            "return": list[Tensor]
        }
        reference.__doc__ = f"Compute {forward.name!r} and its gradients."
        name = f"{forward.name}_with_gradients"
        return CustomOp(reference, name, (), forward.constants, forward.cases, forward.tolerance)

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs the forward and backward pass of ``function``."""
        if isinstance(function, RemoteFunction):
            return function.differentiated(*self.places)
        return Differentiated(function, *self.places)

    def case(self, case: Case, generator: torch.Generator) -> Case:
        """Add random gradients of the outputs, dense or strided as autograd may pass them."""
        call = self._forward.signature.bind(**case.arguments)
        call.apply_defaults()
        outputs = tensors_of(fake_result(self._forward, call.arguments))
        gradients = [_drawn(output, generator) for output in outputs]
        added = dict(zip(self.output_gradients, gradients, strict=True))
        return replace(case, arguments={**call.arguments, **added})

    def expectation(self, case: Case, inputs: CallArguments) -> Expectation:
        """Run the reference on a case of this op, and bound the errors of the gradients.

        Args:
            inputs: the arguments of the call under test, which determine the form of the result.
        """
        expectation = Expectation.of(self.op, case, inputs)
        exact = list(expectation.values.values())
        rounded = _outputs(self.op, case, {})
        scales = [*exact[: self._num_outputs], *self._scales(case, exact[self._num_outputs :])]
        names = [n for n in self._forward.differentiable if case.arguments[n] is not None]
        labels = {
            f"output {number}": f"gradient of {name!r}"
            for number, name in enumerate(names, self._num_outputs)
        }
        values, bounds = dict[str, Tensor](), dict[str, Tensor]()
        for (label, value), result, scale in zip(
            expectation.values.items(), rounded, scales, strict=True
        ):
            if label not in labels:
                bounds[label] = self.op.tolerance.bound(value, result.dtype, case)
            elif value.isfinite().all() and result.isfinite().all():
                bounds[label] = self._bound(value, scale, result.dtype)
            else:
                continue
            values[label] = value
        return replace(
            expectation, values=values, bounds=bounds, labels=labels, any_strides=frozenset(labels)
        )

    def _scales(self, case: Case, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Estimate the size of the intermediate values that contribute to each gradient element."""
        scales = [gradient.abs() for gradient in gradients]
        wide = {
            name: value.double()
            for name, value in case.arguments.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        is_large = any(gradient.numel() > _MANY_ELEMENTS for gradient in gradients)
        for run in range(1 if is_large else _NUM_RUNS):
            changes = _Changes(torch.Generator().manual_seed(run))
            arguments = {name: changes.changed(value) for name, value in wide.items()}
            with changes:
                changed = _outputs(self.op, case, arguments)[self._num_outputs :]
            for scale, gradient, changed_gradient in zip(scales, gradients, changed, strict=True):
                difference = ((changed_gradient - gradient).abs() / _CHANGE).nan_to_num(torch.inf)
                torch.maximum(scale, difference, out=scale)
                if is_large:
                    scale.clamp_(min=float(difference.square().mean().sqrt()))
        return scales

    def _bound(self, gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        finfo, peak = torch.finfo(dtype), 1.0
        if gradient.numel():
            peak = max(1.0, float(gradient.abs().max()))
        roundoff, smallest = finfo.eps / 2, finfo.smallest_normal * finfo.eps
        stored = self.op.tolerance.roundings * (roundoff * scale + smallest * peak)
        summed = _SINGLE.eps / 2 * scale + _SINGLE.smallest_normal * peak
        return stored + _SUM_ROUNDINGS * summed


@lru_cache(maxsize=32)
def training_step(op: CustomOp[..., Any]) -> TrainingStep:
    """Return the training step of an op, derived once."""
    return TrainingStep(op)


class _Changes(TorchDispatchMode):
    """Changes every float result of an operator by a small relative amount, up or down."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _parts():
            with self:
                return _parts()[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        # Views and arguments that are written have values of their own already.
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return result
        return _pytree.tree_map_only(Tensor, self.changed, result)

    def changed(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        ups = torch.randint(0, 2, tensor.shape, generator=self._generator, dtype=tensor.dtype)
        return tensor * (1 + _CHANGE * (2 * ups - 1))


@cache
def _parts() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of the fused operators whose terms may cancel."""
    # Slow to import, and only needed here.
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    fused = (
        *(aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward),
        *(aten.sigmoid_backward, aten.tanh_backward),
        *(aten._softmax, aten._softmax_backward_data),
        *(aten._log_softmax, aten._log_softmax_backward_data),
        *(aten.native_layer_norm, aten.native_layer_norm_backward),
    )
    return get_decompositions(fused)


def _outputs(op: CustomOp[..., Any], case: Case, replaced: dict[str, Tensor]) -> list[Tensor]:
    arguments = {**case.arguments, **replaced}
    return tensors_of(op.reference(*Subject(op, op.reference).positional(arguments)))


def _drawn(output: Tensor, generator: torch.Generator) -> Tensor | None:
    """Draw the gradient of an output: dense, with gaps, or one number for all elements."""
    if not output.is_floating_point():
        return None
    numbers = torch.randn((*output.shape, 2), generator=generator).to(output.dtype)
    match int(torch.randint(4, (), generator=generator)):
        case 0:
            return numbers[..., 0]
        case 1 if output.numel():
            return numbers.flatten()[0].expand(output.shape)
    return numbers[..., 0].contiguous()
