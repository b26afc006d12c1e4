"""The check of a quantization scheme: a layer with random weights.

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
# One rounding of the dequantized weight, one of the result.
_TOLERANCE = Tolerance(roundings=2)


def check_scheme(
    scheme_class: type[QuantizationScheme],
    settings: Mapping[str, Any],
    registry: Registry,
    device: Device,
    dtype: torch.dtype,
    seed: int,
) -> list[Fault]:
    """Check a linear layer that the scheme builds from ``settings``, with random parameters.

    If the scheme leaves the linear layer unquantized, the experts are checked instead. Integer
    parameters are drawn from the full range, floats from 0.5 to 1.5, the usual range of scales.
    Results must be finite and have the shape and dtype of a linear layer.

    If the method can dequantize the weight, results are compared with the float64 matmul of that
    weight and the input, rounded as in the method. The error bound is that of a kernel with
    weights and sums in float32. If the method is ``dequantizable``, the matmul with the dequantized
    weight in ``dtype`` must satisfy the same bound. Exceptions of the scheme are passed on.
    """
    scheme = scheme_class.parse(settings)
    resolver = Resolver(
        registry, device, Config(canary="off", tables=False), scheme if _is_scheme(scheme) else None
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
            f"the example quantizes neither the linear layer {_PREFIX} nor the experts "
            f"{EXPERTS_PREFIX}, so nothing can be checked"
        )
        return [Fault("scheme", "linear_method", reason)]
    for bias in (False, True):
        faults = list(_check_method(method, site, bias, seed))
        if faults:
            return faults
    return []


def _is_scheme(scheme: object) -> bool:
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
    bias_parameter = layer._parameters.get("bias")
    offsets = None if bias_parameter is None else bias_parameter.detach().double().cpu()
    if bias and offsets is None:
        yield Fault(
            "scheme",
            "create_weights",
            "the layer has a bias, but no parameter 'bias' was registered",
        )
        return
    weight = None if weight is None else weight.detach().cpu()
    if weight is not None and weight.shape != (_OUT_FEATURES, _IN_FEATURES):
        shape = [_OUT_FEATURES, _IN_FEATURES]
        yield Fault("scheme", "dequantized", f"{shape} expected, got {list(weight.shape)}")
        return
    inputs = [
        torch.randn(*shape, _IN_FEATURES, generator=generator).to(torch_device, site.dtype)
        for shape in _SHAPES
    ]
    rounded_inputs = [method.dequantized_input(layer, x).detach().double().cpu() for x in inputs]
    shapes = [[list(x.shape) for x in tensors] for tensors in (inputs, rounded_inputs)]
    if shapes[0] != shapes[1]:
        reason = f"{shapes[0]} expected, got {shapes[1]}"
        yield Fault("scheme", "dequantized_input", reason)
        return
    is_dequantizable = method.dequantizable()
    kernel, operands = method.finalize(layer)
    for x, rounded_input in zip(inputs, rounded_inputs, strict=True):
        yield from _check_result("", kernel(x, *operands), x, rounded_input, weight, offsets)
        if is_dequantizable and weight is not None:
            result = _dequantized_matmul(x, weight, offsets)
            yield from _check_result(
                "dequantized, ", result, x, rounded_input, weight, offsets, rounded=1.0
            )


def _dequantized_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: Any) -> torch.Tensor:
    """Apply the linear layer with the weight rounded to the dtype of ``x``."""
    result = x.double().cpu() @ weight.to(x.dtype).double().T
    return (result if offsets is None else result + offsets).to(x.device, x.dtype)


def _check_result(
    prefix: str,
    result: Any,
    x: torch.Tensor,
    rounded_input: torch.Tensor,
    weight: torch.Tensor | None,
    offsets: torch.Tensor | None,
    rounded: float = 0.0,
) -> Iterator[Fault]:
    """Check form and values of the linear layer's result for ``x`` ``[..., I]``.

    Args:
        rounded_input: ``x`` as the method rounds it, in float64.
        rounded: fraction of the terms of the sum that were rounded to the dtype of ``x``.
    """
    where, shape = f"{prefix}input {list(x.shape)}", (*x.shape[:-1], _OUT_FEATURES)
    if not isinstance(result, torch.Tensor) or result.shape != shape or result.dtype != x.dtype:
        form = [*result.shape, result.dtype] if isinstance(result, torch.Tensor) else type(result)
        yield Fault("scheme", where, f"{[*shape, x.dtype]} expected, got {form}")
        return
    if not result.isfinite().all():
        yield Fault("scheme", where, "the result of finite weights and inputs is not finite")
    elif weight is not None and x.numel():
        bias = torch.zeros(_OUT_FEATURES) if offsets is None else offsets
        expected = rounded_input @ weight.double().T + bias
        # The sum of absolute terms bounds the rounding error of the sum.
        magnitude = float((rounded_input.abs() @ weight.double().abs().T + bias.abs()).max())
        case = Case("", {}, {}, _IN_FEATURES + 1, magnitude, rounded * magnitude)
        error_bound = _TOLERANCE.bound(expected, x.dtype, case)
        for fault in compare_value(where, result, expected, error_bound):
            yield Fault("scheme", where, fault.reason, fault.error, fault.bound)


Examples = Callable[[], Mapping[str, Mapping[str, Any]]]
"""A function that returns settings of checkpoints by label: the target of
``SchemeEntry.examples``."""
