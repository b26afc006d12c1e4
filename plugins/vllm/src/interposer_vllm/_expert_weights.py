"""Experts that vLLM loaded, as a method here takes them.

vLLM holds the first projections of all experts as ``w13_weight``, ``w13_weight_scale`` and so on,
and the second ones as ``w2_weight``. What comes behind is what the checkpoint calls the tensor.

Dimensions: E experts, P matrices of one projection, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from interposer.errors import ConfigError
from interposer_ops.layers.experts import Experts
from interposer_ops.layers.linear import Linear
from interposer_vllm._stored_weights import empty_layer, fill

__all__ = ["fill_experts", "finalized"]

_FIRST, _SECOND = "w13_", "w2_"


def fill_experts(experts: Experts, loaded: Mapping[str, Tensor | None]) -> None:
    """Put what vLLM loaded into the parameters, or the linear layers, that a method created.

    Nothing is copied that has the right form.

    Args:
        experts: built, without memory.
        loaded: by vLLM's name, each ``[E, ...]``.
    Raises: ConfigError: vLLM stores them in another form.
    """
    sides = {
        side: {
            name.removeprefix(side): held
            for name, held in loaded.items()
            if name.startswith(side) and held is not None
        }
        for side in (_FIRST, _SECOND)
    }
    strays = {name for name, held in loaded.items() if held is not None}
    strays -= {side + name for side, held in sides.items() for name in held}
    if strays:
        raise ConfigError(f"vLLM holds {', '.join(sorted(strays))} besides, which no method reads")
    layers = list(_layers(experts))
    for expert, layer in layers:
        held = sides[_side_of(layer, experts)]
        fill(layer, {name: each[expert] for name, each in held.items()})
    if not layers:
        for side, held in sides.items():
            _fill_at_once(experts, side, held)


def finalized(experts: Experts) -> list[Tensor]:
    """Prepare filled experts, their linear layers first, and return what all of them then hold.

    Raises: CheckpointError: a parameter holds what no weight can be computed with.
    """
    layers = [layer for _, layer in _layers(experts)]
    for module in (*layers, experts):
        module.finalize()
    return [tensor for module in (*layers, experts) for tensor in _tensors(module.operands)]


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, tuple | list):
        for each in held:
            yield from _tensors(each)


def _layers(experts: Experts) -> Iterator[tuple[int, Linear]]:
    """Return the linear layers of each expert, of methods that have some."""
    for name, pair in experts.named_children():
        assert isinstance(pair, nn.ModuleList)  # as ``LinearExperts`` adds them
        for layer in pair:
            assert isinstance(layer, Linear)
            yield int(name), layer


def _side_of(layer: Linear, experts: Experts) -> str:
    own = layer.prefix.rpartition(".")[2]
    gate, up, down = experts.spec.projections or ("", "", "")
    if own in (gate, up):
        raise ConfigError(f"its {gate} and {up} have numbers of their own, which vLLM holds as one")
    return _SECOND if own == down else _FIRST


def _fill_at_once(experts: Experts, side: str, held: Mapping[str, Tensor]) -> None:
    """Fill the parameters that hold a projection of all experts, as if it were one layer."""
    is_second = side == _SECOND
    names = [
        name
        for name, own in experts._parameters.items()
        if own is not None and name.startswith("down") == is_second
    ]
    whole = empty_layer({side: 1})
    for name in names:
        whole.register_parameter(_tensor_of(name, experts), experts.get_parameter(name))
    forms = {name: _behind(whole._parameters.get(name), each) for name, each in held.items()}
    fill(whole, forms)
    for name in names:
        experts.register_parameter(name, whole.get_parameter(_tensor_of(name, experts)))


def _tensor_of(name: str, experts: Experts) -> str:
    """Return what the checkpoint calls the tensors in a parameter."""
    plain = "bias" if name.endswith("_bias") else "weight"
    return str(getattr(experts.get_parameter(name), "expert_tensor", plain))


def _behind(own: Tensor | None, held: Tensor) -> Tensor:
    """Return ``held`` with the matrices of an expert behind each other, as in ``own``.

    ``[E, P R, C]`` is then the shape of ``own``; vLLM may hold them beside each other,
    ``[E, R, P C]``.
    """
    parts = len(getattr(own, "expert_parts", ()))
    if own is None or parts < 2 or own.ndim != 3:
        return held
    count, rows, columns = own.shape
    if held.shape != (count, rows // parts, columns * parts):
        return held
    behind: Tensor = held.unflatten(2, (parts, columns)).transpose(1, 2).flatten(1, 2)
    return behind
