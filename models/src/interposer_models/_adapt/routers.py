"""Routers of a foreign model: leaves that choose the experts of each token.

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
from interposer_models._adapt.agreement import judge_agreement, normals
from interposer_models._adapt.forwards import Forward, own_forward
from interposer_models._adapt.packed_weight import PackedWeight, Restore
from interposer_models._adapt.projections import Call, give_up, restore_of
from interposer_models._adapt.router_candidates import Routing, find_routing
from interposer_ops.linear import linear

_TOKENS = 16
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]


def bind_router(adaptation: Adaptation, module: nn.Module, name: str) -> str | Verdict:
    """Bind the projection of a router and its choice; it returns what its class does.

    Logits are rounded as the class rounds them, so that the same experts are chosen but for ties.

    Returns: the names of both kernels.
    """
    fit = adaptation.judge(module)
    if not fit:
        return fit
    routing = find_routing(module)
    if routing is None:
        return Verdict.refuse("no op is known that computes what its class does")
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    x = normals((_TOKENS, weight.shape[1]), weight.dtype, weight.device)
    with torch.no_grad():
        expected = own_forward(module)(x)
    logits = expected[routing.order[0]]
    dtype = _computed_in(logits, weight.dtype)
    site = adaptation.site(name, dtype)
    bound = site.bind_kernel(
        linear, in_features=weight.shape[1], out_features=weight.shape[0], biased=bias is not None
    )
    chosen = site.bind_kernel(routing.op, **routing.dims())
    prepared = bound.prepared(
        weight=weight.detach().to(dtype), bias=None if bias is None else bias.detach().to(dtype)
    )
    operands = prepared["weight"], prepared["bias"]
    correction = _held(module, routing.correction)
    constant = chosen.prepared(bias=correction)["bias"] if routing.correction else None

    def choose(found: Tensor) -> tuple[Tensor, Tensor]:
        return routing.choose(chosen.function, found, constant)

    call: Call = bound.function, operands
    forward = _forward(module, routing, call, choose, (dtype, expected, adaptation.device))
    with torch.no_grad():
        chosen_here = choose(logits.to(dtype))
        sums = _sums(weight, bias, x)
        verdict = _judge(routing, expected, forward(x), chosen_here, sums, weight.dtype)
    if not verdict:
        return verdict
    restore = _restore(restore_of(bound, operands), operands[0], weight, dtype)
    if restore is not None:
        packed = PackedWeight(weight, restore, f"{name}.weight")
        verdict = give_up(adaptation, [(module, "weight")], weight, packed)
        if not verdict:
            return verdict
    adaptation.bind_forward(module, name, forward)
    return f"{kernel_name(bound.choice)}, {kernel_name(chosen.choice)}"


def _forward(
    module: nn.Module,
    routing: Routing,
    call: Call,
    choose: Choose,
    known: tuple[torch.dtype, tuple[Tensor, ...], torch.device],
) -> Forward:
    computed, expected, device = known
    original, (kernel, operands) = own_forward(module), call
    weight = module._parameters["weight"]
    assert weight is not None
    dtype, hidden = weight.dtype, weight.shape[1]
    dtypes = [expected[at].dtype for at in routing.order]
    correction = _held(module, routing.correction)

    def forward(*args: Any, **named: Any) -> Any:
        if len(args) == 1 and not named:
            (x,) = args
            shaped = x.shape[-1] == hidden and (x.ndim == 2 or (routing.flattens and x.ndim > 2))
            plain = x.dtype is dtype and x.device == device and not x.requires_grad
            # Its bias is a buffer, which may be exchanged.
            if shaped and plain and _held(module, routing.correction) is correction:
                logits = kernel(x.reshape(-1, hidden).to(computed), *operands)
                results = zip(routing.order, (logits, *choose(logits)), dtypes, strict=True)
                made = {at: result.to(wanted) for at, result, wanted in results}
                return tuple(made[at] for at in range(len(made)))
        return original(*args, **named)

    return forward


def _held(module: nn.Module, name: str) -> Tensor | None:
    found = module._buffers.get(name)
    return module._parameters.get(name) if found is None else found


def _computed_in(logits: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that logits were rounded to, whatever the class made of them then."""
    exact = torch.equal(logits, logits.to(dtype).to(logits.dtype))
    return dtype if exact else torch.promote_types(dtype, torch.float32)


def _restore(
    restore: Restore | None, held: Any, weight: Tensor, dtype: torch.dtype
) -> Restore | None:
    """Return what gives the weight back, None where the kernel reads that one."""
    if restore is not None:
        return partial(_narrowed, restore, dtype)
    if isinstance(held, Tensor) and held.data_ptr() != weight.data_ptr():
        return partial(_copied, held)
    return None


def _narrowed(restore: Restore, held_in: torch.dtype, into: Tensor) -> None:
    dense = into.new_empty(into.shape, dtype=held_in)
    restore(dense)
    into.copy_(dense)


def _copied(held: Tensor, into: Tensor) -> None:
    into.copy_(held)


def _sums(weight: Tensor, bias: Tensor | None, x: Tensor) -> tuple[int, float, float]:
    """Return how many terms a logit has, their largest sum of magnitudes, and it without a bias."""
    product = float((x.abs().double() @ weight.detach().abs().double().T).max())
    largest = product + (0.0 if bias is None else float(bias.detach().abs().max()))
    return weight.shape[1] + 1, largest, 0.0 if bias is None else product


def _judge(
    routing: Routing,
    expected: tuple[Tensor, ...],
    found: tuple[Tensor, ...],
    chosen: tuple[Tensor, Tensor],
    sums: tuple[int, float, float],
    dtype: torch.dtype,
) -> Verdict:
    """Refuse other logits, and another choice from the same logits.

    Args:
        chosen: weights and ids that the kernel makes of the class's own logits.
        sums: reduction, magnitude and what is rounded of a logit, as of a ``Case``.
        dtype: the model's.
    """
    for theirs, own in zip(expected, found, strict=True):
        if (theirs.shape, theirs.dtype) != (own.shape, own.dtype):
            return Verdict.refuse("it returns tensors of other shapes or dtypes than its class")
    logits, weights, ids = (expected[at] for at in routing.order)
    verdict = judge_agreement(linear.tolerance, logits, found[routing.order[0]], *sums)
    if not verdict:
        return verdict
    # Experts whose logits are equal have equal weights, and either may be chosen.
    ordered = []
    for each, held in ((ids, weights), (chosen[1], chosen[0])):
        ranked = logits.gather(-1, each.long()).sort(-1)
        ordered.append((ranked.values, held.gather(-1, ranked.indices)))
    (best, theirs), (own_best, own) = ordered
    if not torch.equal(best, own_best):
        return Verdict.refuse("it chooses other experts from the same logits")
    rounded = _computed_in(weights, dtype)
    return judge_agreement(
        routing.op.tolerance, theirs.to(rounded), own.to(rounded), logits.shape[-1], routing.scale
    )
