"""Binding of routers: leaf modules that choose the experts of each token.

Dimensions: T tokens, H hidden size, E experts, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_models._adapt.adaptation import Adaptation, kernel_name
from interposer_models._adapt.agreement import check_agreement, random_normals
from interposer_models._adapt.forwards import Forward, class_forward
from interposer_models._adapt.packed_weight import PackedWeight, Restore
from interposer_models._adapt.projections import Call, find_restore, release_weight
from interposer_models._adapt.router_candidates import Routing, find_routing
from interposer_ops.linear import linear

_TOKENS = 16
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]


def bind_router(adaptation: Adaptation, module: nn.Module, name: str) -> str | Verdict:
    """Bind a router's projection and top-k choice to kernels.

    Logits are rounded as in the class, so that the same experts are chosen except for ties.

    Returns: the names of both kernels.
    """
    verdict = adaptation.check_module(module)
    if not verdict:
        return verdict
    routing = find_routing(module)
    if routing is None:
        return Verdict.refuse("no known op matches its class")
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    x = random_normals((_TOKENS, weight.shape[1]), weight.dtype, weight.device)
    with torch.no_grad():
        expected = class_forward(module)(x)
    logits = expected[routing.order[0]]
    # Some classes compute logits in float32 from bfloat16 weights; others round them to bfloat16
    # first.
    dtype = _logits_dtype(logits, weight.dtype)
    site = adaptation.site(name, dtype)
    bound_kernel = site.bind_kernel(
        linear, in_features=weight.shape[1], out_features=weight.shape[0], biased=bias is not None
    )
    topk = site.bind_kernel(routing.op, **routing.dims())
    # The kernel computes in the logits' dtype, so that weights are converted once here.
    prepared = bound_kernel.prepared(
        weight=weight.detach().to(dtype), bias=None if bias is None else bias.detach().to(dtype)
    )
    operands = prepared["weight"], prepared["bias"]
    correction = _tensor(module, routing.correction)
    prepared_correction = topk.prepared(bias=correction)["bias"] if routing.correction else None

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        return routing.choose(topk.function, logits, prepared_correction)

    call: Call = bound_kernel.function, operands
    forward = _forward(module, routing, call, choose, (dtype, expected, adaptation.device))
    with torch.no_grad():
        choice = choose(logits.to(dtype))
        bounds = _logit_bounds(weight, bias, x)
        verdict = _check_choice(routing, expected, forward(x), choice, bounds, weight.dtype)
    if not verdict:
        return verdict
    restore = _find_restore(find_restore(bound_kernel, operands), operands[0], weight, dtype)
    if restore is not None:
        packed = PackedWeight(weight, restore, f"{name}.weight")
        verdict = release_weight(adaptation, [(module, "weight")], weight, packed)
        if not verdict:
            return verdict
    adaptation.bind_forward(module, name, forward)
    return f"{kernel_name(bound_kernel.choice)}, {kernel_name(topk.choice)}"


def _forward(
    module: nn.Module,
    routing: Routing,
    call: Call,
    choose: Choose,
    context: tuple[torch.dtype, tuple[Tensor, ...], torch.device],
) -> Forward:
    computed, expected, device = context
    original, (kernel, operands) = class_forward(module), call
    weight = module._parameters["weight"]
    assert weight is not None
    dtype, hidden = weight.dtype, weight.shape[1]
    dtypes = [expected[at].dtype for at in routing.order]
    correction = _tensor(module, routing.correction)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            (x,) = args
            has_shape = x.shape[-1] == hidden and (x.ndim == 2 or (routing.flattens and x.ndim > 2))
            is_plain = x.dtype is dtype and x.device == device and not x.requires_grad
            # The correction bias is a buffer, which code of the user may replace.
            if has_shape and is_plain and _tensor(module, routing.correction) is correction:
                logits = kernel(x.reshape(-1, hidden).to(computed), *operands)
                results = zip(routing.order, (logits, *choose(logits)), dtypes, strict=True)
                results_by_position = {
                    at: result.to(dtype_out) for at, result, dtype_out in results
                }
                return tuple(results_by_position[at] for at in range(len(results_by_position)))
        return original(*args, **kwargs)

    return forward


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    buffer = module._buffers.get(name)
    return module._parameters.get(name) if buffer is None else buffer


def _logits_dtype(logits: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to which the class rounded the logits."""
    exact = torch.equal(logits, logits.to(dtype).to(logits.dtype))
    return dtype if exact else torch.promote_types(dtype, torch.float32)


def _find_restore(
    restore: Restore | None, operand: Any, weight: Tensor, dtype: torch.dtype
) -> Restore | None:
    """Return a function that restores the weight, None if the kernel reads the original."""
    if restore is not None:
        return partial(_restore_narrowed, restore, dtype)
    if isinstance(operand, Tensor) and operand.data_ptr() != weight.data_ptr():
        return partial(_copy_into, operand)
    return None


def _restore_narrowed(restore: Restore, packed_dtype: torch.dtype, into: Tensor) -> None:
    dense = into.new_empty(into.shape, dtype=packed_dtype)
    restore(dense)
    into.copy_(dense)


def _copy_into(weight: Tensor, into: Tensor) -> None:
    into.copy_(weight)


def _logit_bounds(weight: Tensor, bias: Tensor | None, x: Tensor) -> tuple[int, float, float]:
    """Return the number of terms of a logit, and the largest sum of magnitudes.

    The third value is that sum without the bias, or 0 if there is no bias.
    """
    largest_matmul = float((x.abs().double() @ weight.detach().abs().double().T).max())
    largest = largest_matmul + (0.0 if bias is None else float(bias.detach().abs().max()))
    return weight.shape[1] + 1, largest, 0.0 if bias is None else largest_matmul


def _check_choice(
    routing: Routing,
    expected: tuple[Tensor, ...],
    actual: tuple[Tensor, ...],
    choice: tuple[Tensor, Tensor],
    bounds: tuple[int, float, float],
    dtype: torch.dtype,
) -> Verdict:
    """Refuse other logits, or another choice from the same logits.

    Args:
        choice: weights and ids that the kernel makes of the class's own logits.
        bounds: reduction, magnitude and rounded magnitude of a logit, as of a ``Case``.
        dtype: the model's.
    """
    for class_result, kernel_result in zip(expected, actual, strict=True):
        if (class_result.shape, class_result.dtype) != (kernel_result.shape, kernel_result.dtype):
            return Verdict.refuse("it returns tensors of other shapes or dtypes than its class")
    logits, weights, ids = (expected[at] for at in routing.order)
    verdict = check_agreement(linear.tolerance, logits, actual[routing.order[0]], *bounds)
    if not verdict:
        return verdict
    # Among experts with equal logits either may be chosen, so logits are compared instead of ids.
    ordered = []
    for expert_ids, expert_weights in ((ids, weights), (choice[1], choice[0])):
        ranked = logits.gather(-1, expert_ids.long()).sort(-1)
        ordered.append((ranked.values, expert_weights.gather(-1, ranked.indices)))
    (best, class_result), (own_best, kernel_result) = ordered
    if not torch.equal(best, own_best):
        return Verdict.refuse("it chooses other experts from the same logits")
    rounded = _logits_dtype(weights, dtype)
    return check_agreement(
        routing.op.tolerance,
        class_result.to(rounded),
        kernel_result.to(rounded),
        logits.shape[-1],
        routing.scale,
    )
