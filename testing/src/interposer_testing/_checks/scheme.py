"""The check of a quantization scheme: a layer that it builds, on random weights.

Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from interposer import (
    Case,
    Config,
    Device,
    LinearMethod,
    QuantizationScheme,
    Registry,
    Resolver,
    Site,
    Tolerance,
)
from interposer_testing._checks.comparison import compare_value
from interposer_testing._checks.experts import EXPERTS_PREFIX, check_experts
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.parameter import random_parameter

_PREFIX = "model.layers.0.self_attn.q_proj"
_IN_FEATURES = 512
_OUT_FEATURES = 96
_SHAPES = ((1,), (5,), (2, 3), (0,))
# One for the dequantized weight, one for the result.
_TOLERANCE = Tolerance(roundings=2)


def check_scheme(
    scheme_class: type[QuantizationScheme],
    settings: Mapping[str, Any],
    registry: Registry,
    device: Device,
    dtype: torch.dtype,
    seed: int,
) -> list[Fault]:
    """Return the faults of a linear layer that the scheme builds from ``settings``.

    Where that is plain, experts are built instead. Parameters are filled with random numbers:
    integers over their whole range, floats between 0.5 and 1.5, so that they may be scales. Results
    must have the shape and dtype of a projection and be finite. Where the method states the weight
    that its parameters stand for, they must be the product with it in float64 besides, of the input
    that the method rounds to where it does, within the bound of a product that holds weights and
    sums in float32; where it states none, values are not checked. Where the method says that it is
    ``dequantizable``, the product with that weight, rounded to ``dtype``, is compared in the same
    way. What the scheme raises is passed on.
    """
    scheme = scheme_class.parse(settings)
    resolver = Resolver(
        registry, device, Config(canary="off", tables=False), scheme if _is_one(scheme) else None
    )
    if resolver.scheme is None:
        return [Fault("scheme", "parse", f"it returned {scheme!r:.100}, not a QuantizationScheme")]
    site = Site(resolver, _PREFIX, dtype)
    method = scheme.linear_method(_PREFIX, (_PREFIX.rpartition(".")[2],))
    if method is None:
        experts = scheme.experts_method(EXPERTS_PREFIX)
        if experts is not None:
            return list(check_experts(experts, replace(site, prefix=EXPERTS_PREFIX), seed))
        reason = (
            f"the example leaves the linear layer {_PREFIX} plain, and the experts "
            f"{EXPERTS_PREFIX} too, so that nothing is tried"
        )
        return [Fault("scheme", "linear_method", reason)]
    for bias in (False, True):
        faults = list(_check_method(method, site, bias, seed))
        if faults:
            return faults
    return []


def _is_one(scheme: object) -> bool:
    return isinstance(scheme, QuantizationScheme)


def _check_method(method: LinearMethod, site: Site, bias: bool, seed: int) -> Iterator[Fault]:
    generator = torch.Generator().manual_seed(seed)
    torch_device = site.resolver.device.torch_device
    layer = nn.Module()
    with torch.device(torch_device):
        method.create_weights(layer, site, _IN_FEATURES, _OUT_FEATURES, bias)
    for parameter in layer.parameters():
        parameter.data.copy_(random_parameter(parameter, generator))
    weight = method.dequantized(layer)
    offset = layer._parameters.get("bias")
    offsets = None if offset is None else offset.detach().double().cpu()
    if bias and offsets is None:
        yield Fault("scheme", "create_weights", "no parameter 'bias' was registered, though asked")
        return
    weight = None if weight is None else weight.detach().cpu()
    if weight is not None and weight.shape != (_OUT_FEATURES, _IN_FEATURES):
        wanted = [_OUT_FEATURES, _IN_FEATURES]
        yield Fault("scheme", "dequantized", f"{wanted} expected, got {list(weight.shape)}")
        return
    inputs = [
        torch.randn(*shape, _IN_FEATURES, generator=generator).to(torch_device, site.dtype)
        for shape in _SHAPES
    ]
    multiplied = [method.dequantized_input(layer, x).detach().double().cpu() for x in inputs]
    shapes = [[list(x.shape) for x in listed] for listed in (inputs, multiplied)]
    if shapes[0] != shapes[1]:
        reason = f"{shapes[0]} expected, got {shapes[1]}"
        yield Fault("scheme", "dequantized_input", reason)
        return
    dequantizable = method.dequantizable()
    kernel, operands = method.finalize(layer)
    for x, factors in zip(inputs, multiplied, strict=True):
        yield from _check_result("", kernel(x, *operands), x, factors, weight, offsets)
        if dequantizable and weight is not None:
            plain = _plain_product(x, weight, offsets)
            yield from _check_result("dequantized, ", plain, x, factors, weight, offsets, 1.0)


def _plain_product(x: torch.Tensor, weight: torch.Tensor, offsets: Any) -> torch.Tensor:
    """Return the product with the weight as a layer in the dtype of ``x`` holds it."""
    product = x.double().cpu() @ weight.to(x.dtype).double().T
    return (product if offsets is None else product + offsets).to(x.device, x.dtype)


def _check_result(
    how: str,
    found: Any,
    x: torch.Tensor,
    factors: torch.Tensor,
    weight: torch.Tensor | None,
    offsets: torch.Tensor | None,
    rounded: float = 0.0,
) -> Iterator[Fault]:
    """Yield what is wrong with the projection of ``x`` ``[..., I]``, or with its form.

    Its values are those of the product of ``factors``, which ``x`` is rounded to.

    Args:
        rounded: the share of what is added that was rounded to the dtype of ``x`` before.
    """
    where, shape = f"{how}input {list(x.shape)}", (*x.shape[:-1], _OUT_FEATURES)
    if not isinstance(found, torch.Tensor) or found.shape != shape or found.dtype != x.dtype:
        form = [*found.shape, found.dtype] if isinstance(found, torch.Tensor) else type(found)
        yield Fault("scheme", where, f"{[*shape, x.dtype]} expected, got {form}")
        return
    if not found.isfinite().all():
        yield Fault("scheme", where, "the result of finite weights and inputs is not finite")
    elif weight is not None and x.numel():
        added = torch.zeros(_OUT_FEATURES) if offsets is None else offsets
        expected = factors @ weight.double().T + added
        terms = factors.abs() @ weight.double().abs().T + added.abs()
        largest = float(terms.max())
        case = Case("", {}, {}, _IN_FEATURES + 1, largest, rounded * largest)
        bound = _TOLERANCE.bound(expected, x.dtype, case)
        for fault in compare_value(where, found, expected, bound):
            yield Fault("scheme", where, fault.reason, fault.error, fault.bound)


Examples = Callable[[], Mapping[str, Mapping[str, Any]]]
"""Settings of checkpoints by label, as ``SchemeEntry.examples`` names them."""
