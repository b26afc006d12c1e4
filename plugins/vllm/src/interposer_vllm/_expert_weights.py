"""Conversion of experts that vLLM loaded into the parameters of an ``Experts`` layer.

vLLM's names start with ``w13_`` for the first projections of all experts (gate and up) and with
``w2_`` for the second; the checkpoint's name of the tensor follows, as in ``w13_weight_scale``.

Shapes: E experts, P matrices per projection, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from interposer.errors import ConfigError
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.moe.experts import Experts
from interposer_vllm._stored_weights import empty_layer, fill

__all__ = ["fill_experts", "finalize_experts"]

_FIRST, _SECOND = "w13_", "w2_"


def fill_experts(experts: Experts, loaded: Mapping[str, Tensor | None]) -> None:
    """Put the tensors that vLLM loaded into the parameters or linear layers of ``experts``.

    A tensor of the right shape and dtype is not copied.

    Args:
        experts: built on the meta device.
        loaded: vLLM's parameters by name, each ``[E, ...]``.
    Raises: ConfigError: vLLM stores the experts in another layout.
    """
    tensors_by_projection = {
        projection: {
            name.removeprefix(projection): tensor
            for name, tensor in loaded.items()
            if name.startswith(projection) and tensor is not None
        }
        for projection in (_FIRST, _SECOND)
    }
    unread = {name for name, tensor in loaded.items() if tensor is not None}
    unread -= {
        projection + name
        for projection, tensors in tensors_by_projection.items()
        for name in tensors
    }
    if unread:
        raise ConfigError(f"vLLM also stores {', '.join(sorted(unread))}, which no method reads")
    layers = list(_layers(experts))
    for expert, layer in layers:
        tensors = tensors_by_projection[_projection_of(layer, experts)]
        fill(layer, {name: tensor[expert] for name, tensor in tensors.items()})
    if not layers:
        for projection, tensors in tensors_by_projection.items():
            _fill_at_once(experts, projection, tensors)


def finalize_experts(experts: Experts) -> list[Tensor]:
    """Prepare the filled experts, and return all tensors that kernels read.

    Raises: CheckpointError: a parameter has invalid values.
    """
    layers = [layer for _, layer in _layers(experts)]
    for module in (*layers, experts):
        module.finalize()
    return [tensor for module in (*layers, experts) for tensor in _tensors(module.operands)]


def _tensors(operands: Any) -> Iterator[Tensor]:
    if isinstance(operands, Tensor):
        yield operands
    elif isinstance(operands, tuple | list):
        for operand in operands:
            yield from _tensors(operand)


def _layers(experts: Experts) -> Iterator[tuple[int, Linear]]:
    """Yield (expert number, linear layer); nothing if one kernel computes all experts."""
    for name, pair in experts.named_children():
        assert isinstance(pair, nn.ModuleList)  # as ``LinearExperts`` adds them
        for layer in pair:
            assert isinstance(layer, Linear)
            yield int(name), layer


def _projection_of(layer: Linear, experts: Experts) -> str:
    last_part = layer.prefix.rpartition(".")[2]
    gate, up, down = experts.spec.projections or ("", "", "")
    # A method with separate gate and up layers cannot take vLLM's fused w13.
    if last_part in (gate, up):
        raise ConfigError(f"its {gate} and {up} are separate layers, but vLLM fuses them")
    return _SECOND if last_part == down else _FIRST


def _fill_at_once(experts: Experts, projection: str, loaded: Mapping[str, Tensor]) -> None:
    """Fill the parameters ``[E, ...]`` of one projection of all experts."""
    is_second = projection == _SECOND
    names = [
        name
        for name, parameter in experts._parameters.items()
        if parameter is not None and name.startswith("down") == is_second
    ]
    holder = empty_layer({projection: 1})
    for name in names:
        holder.register_parameter(_tensor_name(name, experts), experts.get_parameter(name))
    stacked = {
        name: _stack_matrices(holder._parameters.get(name), tensor)
        for name, tensor in loaded.items()
    }
    fill(holder, stacked)
    for name in names:
        experts.register_parameter(name, holder.get_parameter(_tensor_name(name, experts)))


def _tensor_name(name: str, experts: Experts) -> str:
    """Return the checkpoint's name of the tensors that a parameter holds."""
    plain = "bias" if name.endswith("_bias") else "weight"
    return str(getattr(experts.get_parameter(name), "expert_tensor", plain))


def _stack_matrices(declared: Tensor | None, loaded: Tensor) -> Tensor:
    """Return ``loaded`` with the P matrices of an expert stacked along rows, as in ``declared``.

    vLLM may concatenate matrices along columns, ``[E, R, P C]``; ``declared`` has ``[E, P R, C]``.
    """
    parts = len(getattr(declared, "expert_parts", ()))
    if declared is None or parts < 2 or declared.ndim != 3:
        return loaded
    count, rows, columns = declared.shape
    if loaded.shape != (count, rows // parts, columns * parts):
        return loaded
    stacked: Tensor = loaded.unflatten(2, (parts, columns)).transpose(1, 2).flatten(1, 2)
    return stacked
