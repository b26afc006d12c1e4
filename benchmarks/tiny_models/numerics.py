"""The distance between the outputs of two runs, and the distance that is allowed.

The ops' own tolerances say how far a kernel may be from its reference. So noise of that size is
added to what every linear, norm and convolution of the model returns, as kernels that err as much
as they may would do, and the outputs that come of it say how far an adapted model may be from the
model. A model that amplifies errors is allowed more, and its row shows it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from interposer import Case, Tolerance
from interposer_ops.linear import linear
from interposer_ops.norms import layer_norm, rms_norm

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PRODUCTS = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
"""Modules whose outputs are sums of products of their weight and their input."""


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an output, with their names; caches are no outputs."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from tensors(each, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for at, each in enumerate(value):
            yield from tensors(each, f"{name}.{at}")


def run(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the outputs of a model, by name; whatever is random is the same every time."""
    torch.manual_seed(0)
    with torch.no_grad():
        return {name: tensor.clone() for name, tensor in tensors(model(**copy.deepcopy(inputs)))}


def deviation(these: Mapping[str, Tensor], those: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest difference of every output; infinity where they cannot be compared."""
    if these.keys() != those.keys():
        return {"outputs": float("inf")}
    return {name: distance(these[name], those[name]) for name in these}


def distance(this: Tensor, that: Tensor) -> float:
    """Return the largest difference of two tensors, which may be NaN in the same places."""
    if this.shape != that.shape or this.dtype != that.dtype:
        return float("inf")
    if not this.numel() or torch.equal(this, that):
        return 0.0
    wide, other = this.double(), that.double()
    same = (wide == other) | (wide.isnan() & other.isnan())
    apart = torch.where(same, 0.0, (wide - other).abs())
    return float(apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def equal(these: Mapping[str, Tensor], those: Mapping[str, Tensor]) -> bool:
    """Return whether two runs gave the same numbers, to the bit."""
    return not any(deviation(these, those).values())


def allowed(
    model: nn.Module,
    inputs: Mapping[str, Any],
    rms_norms: set[nn.Module],
    exact: Mapping[str, Tensor],
    draws: int = 3,
) -> dict[str, float]:
    """Return how far every output gets from ``exact`` by errors within the ops' tolerances."""
    largest = dict.fromkeys(exact, 0.0)
    for seed in range(draws):
        with noisy(model, rms_norms, seed):
            found = deviation(run(model, inputs), exact)
        if found.keys() != largest.keys():  # the number of outputs depends on their values
            return dict.fromkeys([*largest, *found], float("inf"))
        largest = {name: max(largest[name], found[name]) for name in largest}
    return largest


@contextmanager
def watching(
    pairs: Iterable[tuple[str, nn.Module, nn.Module]],
) -> Iterator[dict[str, float]]:
    """Compare what modules return with what their originals do, of the same inputs.

    Yields the names of those that are further apart than two kernels may be, each as far off as
    its op allows, with how many times as far.
    """
    strays: dict[str, float] = {}

    def watch(name: str, original: nn.Module, arguments: Any, result: Any) -> None:
        expected = original(*arguments)
        if not isinstance(expected, Tensor) or not expected.is_floating_point():
            return
        tolerance, case = error_of(original, arguments[0], expected)
        bound = 2 * tolerance.bound(expected.double(), expected.dtype, case)
        apart = (result.double() - expected.double()).abs()
        times = float((apart / bound).nan_to_num(nan=0.0).max()) if apart.numel() else 0.0
        if times > 1:
            strays[name] = max(times, strays.get(name, 0.0))

    with ExitStack() as hooks:
        for name, module, original in pairs:
            handle = module.register_forward_hook(
                lambda _, arguments, result, name=name, original=original: watch(
                    name, original, arguments, result
                )
            )
            hooks.callback(handle.remove)
        yield strays


@contextmanager
def noisy(model: nn.Module, rms_norms: set[nn.Module], seed: int) -> Iterator[None]:
    """Let the linears, norms and convolutions of a model err, each by what its op may."""
    generator = torch.Generator().manual_seed(seed)

    def err(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> Any:
        if not isinstance(result, Tensor) or not arguments or not result.is_floating_point():
            return None
        tolerance, case = error_of(module, arguments[0], result)
        bound = tolerance.bound(result.float(), result.dtype, case)
        sign = torch.rand(result.shape, generator=generator) * 2 - 1
        return result + (sign * bound).to(result.dtype)

    with ExitStack() as hooks:
        for module in model.modules():
            # What another class does with its weight, its name does not say.
            known = type(module).__module__.startswith(("torch.", "transformers.pytorch_utils"))
            if (known and isinstance(module, (*PRODUCTS, nn.LayerNorm))) or module in rms_norms:
                handle = module.register_forward_hook(err)
                hooks.callback(handle.remove)
        yield


def error_of(module: Any, x: Tensor, result: Tensor) -> tuple[Tolerance, Case]:
    """Return the tolerance of the op that computes ``module``, and what it depends on here."""
    if isinstance(module, PRODUCTS):
        weight, bias = module.weight, module.bias
        sizes = ("out_features", "out_channels", "nf")  # whichever the class calls it
        outputs = next(getattr(module, name) for name in sizes if hasattr(module, name))
        inner = weight.numel() // max(outputs, 1)
        terms = magnitude(module, x)
        return linear.tolerance, Case(
            "",
            {},
            reduction=inner + (bias is not None),
            magnitude=terms,
            rounded=terms if bias is not None else 0.0,
        )
    if not isinstance(module, nn.LayerNorm):
        return rms_norm.tolerance, Case("", {}, reduction=x.shape[-1], magnitude=peak(result))
    # What is subtracted from a row may be larger than what is left of it.
    rows = x.double()
    spread = peak(rows.abs().amax(-1) / rows.std(-1, correction=0))
    if module.weight is not None:
        spread *= peak(module.weight)
    return layer_norm.tolerance, Case("", {}, reduction=x.shape[-1], magnitude=spread)


def magnitude(module: Any, x: Tensor) -> float:
    """Return the largest sum of absolute terms behind an output of ``module``."""
    x, weight = x.detach().abs(), module.weight.detach().abs()
    bias = None if module.bias is None else module.bias.detach().abs()
    if isinstance(module, nn.Linear):
        return peak(functional.linear(x, weight, bias))
    if isinstance(module, Conv1D):
        return peak(functional.linear(x, weight.T, bias))
    if not isinstance(module, TRANSPOSED):
        return peak(module._conv_forward(x, weight, bias))
    call = getattr(functional, f"conv_transpose{len(module.kernel_size)}d")
    place = (module.stride, module.padding, module.output_padding, module.groups, module.dilation)
    return peak(call(x, weight, bias, *place))


def peak(values: Tensor) -> float:
    """Return the largest absolute value that is finite; 0 if there is none."""
    finite = values.detach().double().abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(finite.max()) if finite.numel() else 0.0
