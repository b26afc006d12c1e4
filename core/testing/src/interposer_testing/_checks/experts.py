"""Check of a quantization scheme's routed experts, on random weights.

Dimensions: T tokens, E experts, H hidden size, I intermediate size, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from interposer import ExpertsMethod, ExpertsSpec, PluggableLayer, Site
from interposer_testing._checks.comparison import compare_value
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.parameter import random_parameter

EXPERTS_PREFIX = "model.layers.0.mlp.experts"
_PLAIN = ExpertsSpec(
    hidden_size=128, intermediate_size=64, num_experts=4, top_k=2, activation="silu"
)
_TOKENS = (1, 5, 0)
# The largest derivative of SiLU.
_MAX_SILU_SLOPE = 1.10

Matrices = tuple[torch.Tensor, torch.Tensor]


def check_experts(method: ExpertsMethod, site: Site, seed: int) -> Iterator[Fault]:
    """Check an MoE layer with SiLU, with and without biases, in both storage orders.

    Results must have the shape and dtype of the input and be finite. If the method can dequantize
    weights, results are also compared with a float64 MoE layer of the dequantized weights, within
    the error bound of float32 sums.
    """
    for alternating in (False, True):
        for biased in (False, True):
            spec = replace(_PLAIN, biased=biased, alternating=alternating, inputs_first=alternating)
            yield from _check_layer(method, site, spec, seed)


def _check_layer(
    method: ExpertsMethod, site: Site, spec: ExpertsSpec, seed: int
) -> Iterator[Fault]:
    generator = torch.Generator().manual_seed(seed)
    device = site.resolver.device.torch_device
    layer = nn.Module()
    with torch.device(device):
        method.create_weights(layer, site, spec)
    for parameter in layer.parameters():
        parameter.data.copy_(random_parameter(parameter, generator))
    matrices = method.dequantized(layer)
    biases = [layer._parameters.get(f"{name}_proj_bias") for name in ("gate_up", "down")]
    if spec.biased and None in biases and matrices is not None:
        yield Fault(
            "scheme", "create_weights", "the spec has biases, but no biases were registered"
        )
        return
    first, second = (None if b is None else b.detach().double().cpu() for b in biases)
    if first is not None and spec.alternating:
        # Gate and up projections alternate by row: separate them.
        first = torch.cat((first[:, ::2], first[:, 1::2]), 1)
    count, hidden, inner = spec.num_experts, spec.hidden_size, spec.intermediate_size
    shapes = [(count, 2 * inner, hidden), (count, hidden, inner)]
    if matrices is not None and [m.shape for m in matrices] != shapes:
        actual_shapes = [list(matrix.shape) for matrix in matrices]
        reason = f"{[*map(list, shapes)]} expected, got {actual_shapes}"
        yield Fault("scheme", "dequantized", reason)
        return
    if matrices is not None:
        matrices = matrices[0].detach().cpu(), matrices[1].detach().cpu()
    for module in layer.modules():
        if isinstance(module, PluggableLayer):
            module.finalize()
    kernel, operands = method.finalize(layer)
    for num_tokens in _TOKENS:
        x = torch.randn(num_tokens, hidden, generator=generator).to(site.dtype)
        order = torch.rand(num_tokens, count, generator=generator).argsort(-1)
        ids = order[:, : spec.top_k].to(torch.int32)
        weights = torch.rand(num_tokens, spec.top_k, generator=generator)
        where = f"{num_tokens} tokens"
        y = kernel(x.to(device), *operands, weights.to(device), ids.to(device), spec.activation)
        if not isinstance(y, torch.Tensor) or y.shape != x.shape or y.dtype != x.dtype:
            form = [*y.shape, y.dtype] if isinstance(y, torch.Tensor) else type(y)
            yield Fault("scheme", where, f"{[*x.shape, x.dtype]} expected, got {form}")
        elif not y.isfinite().all():
            yield Fault("scheme", where, "the result of finite weights and inputs is not finite")
        elif matrices is not None and num_tokens:
            expected, error_bound = _moe_layer(x, matrices, (first, second), weights, ids.long())
            for fault in compare_value(where, y, expected, error_bound):
                yield Fault("scheme", where, fault.reason, fault.error, fault.bound)


def _moe_layer(
    x: torch.Tensor,
    matrices: Matrices,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> Matrices:
    """Compute the MoE layer ``[T, H]`` in float64, and the error bound of a float32 layer.

    A float32 sum of n terms has an error of at most n eps times the sum of magnitudes; the
    activation adds a few eps. The error of the gate is multiplied by the slope of SiLU. The hidden
    activation and the result are rounded to the dtype of ``x``.
    """
    unit, step = torch.finfo(torch.float32).eps, torch.finfo(x.dtype).eps
    wide, wide_weights = x.double(), weights.double()
    expected = torch.zeros_like(wide)
    error_bound = torch.zeros_like(wide)
    for token, choice in torch.ones_like(ids).nonzero().tolist():
        expert, weight = ids[token, choice], wide_weights[token, choice]
        first, second = matrices[0][expert].double(), matrices[1][expert].double()
        offsets = [0.0 if bias is None else bias[expert] for bias in biases]
        magnitudes = [0.0 if bias is None else bias[expert].abs() for bias in biases]
        gate, up = (first @ wide[token] + offsets[0]).chunk(2)
        sums = (first.abs() @ wide[token].abs() + magnitudes[0]) * (first.shape[1] + 2) * unit
        gate_error, up_error = sums.chunk(2)
        act = functional.silu(gate)
        hidden = act * up
        error = _MAX_SILU_SLOPE * gate_error * up.abs() + (act.abs() + gate_error) * up_error
        error = error + (8 * unit + step) * hidden.abs()
        expected[token] += weight * (second @ hidden + offsets[1])
        terms = second.abs() @ hidden.abs() + magnitudes[1]
        second_error = (second.shape[1] + len(ids[token]) + 3) * unit
        error_bound[token] += weight * (second.abs() @ error + second_error * terms)
    return expected, error_bound + step * expected.abs()
