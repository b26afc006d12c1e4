"""Dense projections of a foreign model: nn.Linear, and Conv1D with its transposed weight.

Dimensions: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_models._adapt.adaptation import Adaptation, kernel_name
from interposer_models._adapt.agreement import judge_calls, signs
from interposer_models._adapt.forwards import Forward, one_input, own_forward
from interposer_models._adapt.inner_forward import is_wrapped
from interposer_models._adapt.packed_weight import PackedWeight, Restore
from interposer_models._adapt.shards import is_sharded, local, local_parameters
from interposer_models._adapt.wrapped_forward import wrapped_forward
from interposer_ops.devices import host_memory
from interposer_ops.layers.embedding import LMHead
from interposer_ops.layers.linear import Linear, PlainLinear
from interposer_ops.linear import linear

_ROWS = 3

Call = tuple[Callable[..., Tensor], tuple[Any, ...]]


def bind_projection(
    adaptation: Adaptation, module: nn.Module, name: str, *, transposed: bool, is_head: bool
) -> str | Verdict:
    """Bind a projection whose weight no other module has.

    Args:
        transposed: its weight is ``[I, O]``.
        is_head: it makes the logits, and quantization treats it as such.
    """
    fit = adaptation.judge(module, sharded=True)
    if not fit:
        return fit
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None:
        return Verdict.refuse("its weight is no parameter of its own")
    wrapped = is_wrapped(module)
    if is_sharded(weight) and not wrapped:
        return Verdict.refuse("its weight is a part, and nothing says how to join what it returns")
    held = local(weight).detach()
    plain = held.T if transposed else held
    if wrapped:
        # Row parallel projections add it once, to the sum of what all processes return.
        bias = None
    layer = _layer(adaptation, name, plain, bias, is_head)
    call = call_of(layer)
    quantized = not isinstance(layer.method, PlainLinear)
    if quantized and type(module) is not nn.Linear and not transposed:
        return Verdict.refuse(
            "its forward is its own, and cannot be compared with quantized weights"
        )
    forward = one_input(*call, own_forward(module), weight.dtype, adaptation.device)
    if wrapped:
        forward = wrapped_forward(module, call, weight.dtype, adaptation.device)
    if not quantized:
        with local_parameters(module, bias=bias) if wrapped else nullcontext():
            verdict = judge_projection(module, forward, held, plain, bias)
        if not verdict:
            return verdict
    restore: Restore | None = None
    if not quantized:
        restore = restore_of(layer.method.bound, call[1])
        if restore is not None and transposed:
            restore = partial(_restore_transposed, restore)
    if quantized or restore is not None:
        packed = PackedWeight(weight, restore, f"{name}.weight")
        verdict = give_up(adaptation, [(module, "weight")], weight, packed)
        if not verdict:
            return verdict
    adaptation.bind_forward(module, name, forward, guarded=not wrapped)
    adaptation.layers[id(module),] = layer
    return bound_name(layer)


def give_up(
    adaptation: Adaptation,
    holders: list[tuple[nn.Module, str]],
    weight: Tensor,
    packed: PackedWeight,
) -> Verdict:
    """Let ``packed`` hold the numbers alone, once it gave them back bit for bit."""
    if packed.restore is not None:
        verdict = judge_restore(packed.restore, local(weight).detach())
        if not verdict:
            return verdict
    adaptation.changes.pack(holders, packed)
    return Verdict.accept()


def judge_restore(restore: Restore, plain: Tensor) -> Verdict:
    """Refuse a restore that gives other bits than ``plain`` has."""
    # Memory of the last weight of this size serves again, so that no new pages are cleared.
    on_host = plain.device.type == "cpu"
    found = host_memory.empty(plain.shape, plain.dtype) if on_host else torch.empty_like(plain)
    restore(found)
    if same_bits(found, plain):
        return Verdict.accept()
    return Verdict.refuse("what its kernel packed cannot be given back bit for bit")


def _layer(
    adaptation: Adaptation, name: str, plain: Tensor, bias: Tensor | None, is_head: bool
) -> Linear | LMHead:
    """Return the standard layer with these weights, finalized; it is no part of the model."""
    site = adaptation.site(name, plain.dtype)
    layer: Linear | LMHead
    with torch.device("meta"):
        if is_head and bias is None:
            layer = LMHead(site, *plain.shape)
        else:
            layer = Linear(site, plain.shape[1], plain.shape[0], bias is not None)
    fill(layer, weight=plain, bias=bias)
    return layer


def fill(layer: Any, **tensors: Tensor | None) -> None:
    """Put tensors in place of a layer's parameters on the meta device, and finalize it.

    Raises: ValueError: it has others.
    """
    for name, parameter in layer._parameters.items():
        if parameter is None:
            continue
        held = tensors.get(name)
        if held is None or held.shape != parameter.shape:
            raise ValueError(f"a layer of {type(layer).__name__} has the parameter {name!r} too")
        filled = nn.Parameter(held.detach().contiguous(), requires_grad=False)
        filled.__dict__.update(vars(parameter))
        layer._parameters[name] = filled
    layer.finalize()
    # What the kernel does not hold is the model's.
    for name in layer._parameters:
        layer._parameters[name] = None


def call_of(layer: Linear | LMHead) -> Call:
    """Return the kernel with its operands, or the forward of a class that replaces the layer."""
    if type(layer).forward in (Linear.forward, LMHead.forward) and layer.kernel is not None:
        return layer.kernel, layer.operands
    return layer.forward, ()


def bound_name(layer: Linear | LMHead) -> str:
    """Return what a layer was bound to."""
    if isinstance(layer.method, PlainLinear):
        return kernel_name(layer.method.bound.choice)
    return f"{type(layer.method).__module__.partition('.')[0]}/{type(layer.method).__name__}"


def restore_of(bound: Any, operands: tuple[Any, ...]) -> Restore | None:
    """Return what gives the plain weight back, None where it is still held or nothing does."""
    if bound.restore is None or len(operands) != 2:
        return None
    prepared = dict(zip(("weight", "bias"), operands, strict=True))

    def restore(into: Tensor) -> None:
        bound.restore(**prepared, into={"weight": into})

    return restore


def judge_projection(
    module: nn.Module, forward: Forward, weight: Tensor, plain: Tensor, bias: Tensor | None
) -> Verdict:
    """Refuse unless ``forward`` computes what the module does."""
    in_features = plain.shape[1]
    x = signs((_ROWS, in_features), weight.dtype, weight.device)
    largest, rounded = largest_sum(plain, bias)
    if type(module) is not nn.Linear:  # a forward of its own may treat batches in another way
        x = x.unsqueeze(0)
    original, sizes = own_forward(module), in_features + 1
    return judge_calls(linear.tolerance, original, forward, x, sizes, largest, rounded)


def largest_sum(plain: Tensor, bias: Tensor | None) -> tuple[float, float]:
    """Return the magnitude of what is added up for a row of signs, and of what may be rounded.

    Args:
        plain: ``[O, I]``.
    """
    # In the weight's own dtype, which is three times as fast; its rounding is allowed for.
    terms = torch.linalg.vector_norm(plain, 1, dim=1)
    largest = float(terms.max()) * (1 + torch.finfo(plain.dtype).eps) if terms.numel() else 0.0
    if bias is None or not bias.numel():
        return largest, 0.0
    # The product may be stored before the bias is added to it.
    return largest + float(bias.detach().abs().max()), largest


def _restore_transposed(restore: Restore, into: Tensor) -> None:
    dense = into.new_empty(into.shape[1], into.shape[0])
    restore(dense)
    into.copy_(dense.T)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Say whether two tensors hold the same bits, whatever numbers these are."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.itemsize]
    dense = expected.contiguous()
    return torch.equal(found.view(width), dense.view(width))
