"""Linear layers of transformers models: nn.Linear, and Conv1D with a transposed weight.

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
from interposer_adapt._adaptation import Adaptation, kernel_name
from interposer_adapt._agreement import check_calls, random_signs
from interposer_adapt._forwards import Forward, class_forward, forward_one_input, is_wrapped
from interposer_adapt._packed_weight import PackedWeight, Restore, wrapped_forward
from interposer_adapt._shards import is_sharded, local_parameters, local_part
from interposer_ops.devices import host_memory
from interposer_ops.layers.embedding import LMHead
from interposer_ops.layers.linear import Linear, PlainLinear
from interposer_ops.linear import linear

_ROWS = 3

Call = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""A kernel and the operands after its input."""


def bind_projection(
    adaptation: Adaptation, module: nn.Module, name: str, *, transposed: bool, is_head: bool
) -> str | Verdict:
    """Bind a linear layer that shares its weight with no other module to a kernel.

    Args:
        transposed: the weight is ``[I, O]``.
        is_head: the projection computes logits; quantization schemes select heads separately.
    """
    verdict = adaptation.check_module(module, sharded=True)
    if not verdict:
        return verdict
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None:
        return Verdict.refuse("its weight is no parameter of its own")
    wrapped = is_wrapped(module)
    if is_sharded(weight) and not wrapped:
        return Verdict.refuse(
            "its weight is a shard, and no wrapper joins the results of all processes"
        )
    stored = local_part(weight).detach()
    plain = stored.T if transposed else stored
    if wrapped:
        # Row-parallel projections add the bias once, to the all-reduced sum.
        bias = None
    layer = _layer(adaptation, name, plain, bias, is_head)
    call = kernel_call(layer)
    quantized = not isinstance(layer.method, PlainLinear)
    # A subclass's forward is only trusted after a comparison, which quantization error would fail.
    if quantized and type(module) is not nn.Linear and not transposed:
        return Verdict.refuse(
            "its class overrides forward, which cannot be compared with quantized weights"
        )
    forward = forward_one_input(*call, class_forward(module), weight.dtype, adaptation.device)
    if wrapped:
        forward = wrapped_forward(module, call, weight.dtype, adaptation.device)
    if not quantized:
        with local_parameters(module, bias=bias) if wrapped else nullcontext():
            verdict = check_projection(module, forward, stored, plain, bias)
        if not verdict:
            return verdict
    restore: Restore | None = None
    if not quantized:
        restore = find_restore(layer.method.bound, call[1])
        if restore is not None and transposed:
            restore = partial(_restore_transposed, restore)
    if quantized or restore is not None:
        packed = PackedWeight(weight, restore, f"{name}.weight")
        verdict = release_weight(adaptation, [(module, "weight")], weight, packed)
        if not verdict:
            return verdict
    adaptation.bind_forward(module, name, forward, guarded=not wrapped)
    adaptation.layers_by_modules[id(module),] = layer
    return layer_kernel_name(layer)


def release_weight(
    adaptation: Adaptation,
    holders: list[tuple[nn.Module, str]],
    weight: Tensor,
    packed: PackedWeight,
) -> Verdict:
    """Replace a weight by ``packed``, after checking that the weight can be restored exactly."""
    if packed.restore is not None:
        verdict = check_restore(packed.restore, local_part(weight).detach())
        if not verdict:
            return verdict
    adaptation.changes.pack(holders, packed)
    return Verdict.accept()


def check_restore(restore: Restore, plain: Tensor) -> Verdict:
    """Refuse a restore function whose result is not bit-identical to ``plain``."""
    # The allocator reuses the last weight's memory, so that the kernel need not clear new pages.
    on_host = plain.device.type == "cpu"
    restored = host_memory.empty(plain.shape, plain.dtype) if on_host else torch.empty_like(plain)
    restore(restored)
    if same_bits(restored, plain):
        return Verdict.accept()
    return Verdict.refuse("its kernel cannot restore the packed weight bit for bit")


def _layer(
    adaptation: Adaptation, name: str, plain: Tensor, bias: Tensor | None, is_head: bool
) -> Linear | LMHead:
    """Return a finalized standard layer with the given weights, which is no part of the model."""
    site = adaptation.site(name, plain.dtype)
    layer: Linear | LMHead
    with torch.device("meta"):
        if is_head and bias is None:
            layer = LMHead(site, *plain.shape)
        else:
            layer = Linear(site, plain.shape[1], plain.shape[0], bias is not None)
    set_weights(layer, weight=plain, bias=bias)
    return layer


def set_weights(layer: Any, **tensors: Tensor | None) -> None:
    """Replace a layer's parameters on the meta device by tensors, and finalize the layer.

    Raises: ValueError: a tensor is missing or has another shape.
    """
    for name, parameter in layer._parameters.items():
        if parameter is None:
            continue
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != parameter.shape:
            raise ValueError(f"a layer of {type(layer).__name__} has the parameter {name!r} too")
        filled = nn.Parameter(tensor.detach().contiguous(), requires_grad=False)
        # Keeps the attributes that the layer set on its parameter.
        filled.__dict__.update(vars(parameter))
        layer._parameters[name] = filled
    layer.finalize()
    # The kernel holds its own constants; the plain tensors belong to the model.
    for name in layer._parameters:
        layer._parameters[name] = None


def kernel_call(layer: Linear | LMHead) -> Call:
    """Return a layer's kernel with operands, or the forward of a plugin's replacement layer."""
    if type(layer).forward in (Linear.forward, LMHead.forward) and layer.kernel is not None:
        return layer.kernel, layer.operands
    return layer.forward, ()


def layer_kernel_name(layer: Linear | LMHead) -> str:
    """Return the name of the kernel, or of the quantization method, that a layer uses."""
    if isinstance(layer.method, PlainLinear):
        return kernel_name(layer.method.bound.choice)
    return f"{type(layer.method).__module__.partition('.')[0]}/{type(layer.method).__name__}"


def find_restore(bound_kernel: Any, operands: tuple[Any, ...]) -> Restore | None:
    """Return a function that restores the weight; None if the kernel packs nothing or is lossy."""
    if bound_kernel.restore is None or len(operands) != 2:
        return None
    prepared = dict(zip(("weight", "bias"), operands, strict=True))

    def restore(into: Tensor) -> None:
        bound_kernel.restore(**prepared, into={"weight": into})

    return restore


def check_projection(
    module: nn.Module, forward: Forward, weight: Tensor, plain: Tensor, bias: Tensor | None
) -> Verdict:
    """Refuse unless ``forward`` computes the same linear layer as the module's class."""
    in_features = plain.shape[1]
    x = random_signs((_ROWS, in_features), weight.dtype, weight.device)
    largest, rounded = largest_row_sum(plain, bias)
    if type(module) is not nn.Linear:  # a subclass may treat batches in another way
        x = x.unsqueeze(0)
    original, sizes = class_forward(module), in_features + 1
    return check_calls(linear.tolerance, original, forward, x, sizes, largest, rounded)


def largest_row_sum(plain: Tensor, bias: Tensor | None) -> tuple[float, float]:
    """Return bounds on the outputs for inputs of 1 and -1: of the result, and of the matmul alone.

    Args:
        plain: ``[O, I]``.
    """
    # Summed in the weight's dtype, which is three times as fast as float32; the factor below
    # allows for its rounding.
    terms = torch.linalg.vector_norm(plain, 1, dim=1)
    largest = float(terms.max()) * (1 + torch.finfo(plain.dtype).eps) if terms.numel() else 0.0
    if bias is None or not bias.numel():
        return largest, 0.0
    # The matmul's result may be rounded before the bias is added.
    return largest + float(bias.detach().abs().max()), largest


def _restore_transposed(restore: Restore, into: Tensor) -> None:
    dense = into.new_empty(into.shape[1], into.shape[0])
    restore(dense)
    into.copy_(dense.T)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Return True if two tensors hold the same bits, NaNs included."""
    integer_dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        expected.itemsize
    ]
    dense = expected.contiguous()
    return torch.equal(actual.view(integer_dtype), dense.view(integer_dtype))
