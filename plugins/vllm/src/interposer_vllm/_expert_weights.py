"""Experts that vLLM loaded, as a method here takes them.

vLLM holds the first projections of all experts as ``w13_weight``, ``w13_weight_scale`` and so on,
and the second ones as ``w2_weight``. What comes behind is what the checkpoint calls the tensor.

Dimensions: E experts, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from interposer.errors import ConfigError
from interposer_ops.layers.experts import Experts
from interposer_ops.layers.linear import Linear
from interposer_vllm._stored_weights import fill, filled, form_of

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
    unread = {name: held for name, held in loaded.items() if held is not None}
    read: set[str] = set()
    for name, own in _own(experts):
        source = _source(name, own)
        read.add(source)
        held = unread.get(source)
        experts.register_parameter(name, filled(own, _form(source, own, held)))
    for expert, linear in _layers(experts):
        side = _side(linear, experts)
        parts = {
            name.removeprefix(side): held[expert]
            for name, held in unread.items()
            if name.startswith(side)
        }
        read.update(side + name for name in parts)
        fill(linear, parts)
    if strays := unread.keys() - read:
        raise ConfigError(f"vLLM holds {', '.join(sorted(strays))} besides, which no method reads")


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


def _own(experts: Experts) -> list[tuple[str, nn.Parameter]]:
    return [(name, own) for name, own in experts._parameters.items() if own is not None]


def _layers(experts: Experts) -> Iterator[tuple[int, Linear]]:
    """Return the linear layers of each expert, of methods that have some."""
    for name, pair in experts.named_children():
        assert isinstance(pair, nn.ModuleList)  # as ``LinearExperts`` adds them
        for layer in pair:
            assert isinstance(layer, Linear)
            yield int(name), layer


def _source(name: str, own: nn.Parameter) -> str:
    """Return what vLLM calls the parameter ``name`` of a method for all experts at once."""
    side = _SECOND if name.startswith("down") else _FIRST
    plain = "bias" if name.endswith("_bias") else "weight"
    return side + str(getattr(own, "expert_tensor", plain))


def _side(layer: Linear, experts: Experts) -> str:
    own = layer.prefix.rpartition(".")[2]
    gate, up, down = experts.spec.projections or ("", "", "")
    if own in (gate, up):
        raise ConfigError(f"its {gate} and {up} have numbers of their own, which vLLM holds as one")
    return _SECOND if own == down else _FIRST


def _form(source: str, own: nn.Parameter, held: Tensor | None) -> Tensor:
    """Return ``held`` in the shape and dtype of ``own``.

    Where matrices of an expert follow each other in ``own``, ``[E, 2 R, C]``, vLLM may hold them
    beside each other, ``[E, R, 2 C]``.
    """
    parts = len(getattr(own, "expert_parts", ()))
    if held is not None and parts > 1 and own.ndim == held.ndim == 3:
        count, rows, columns = own.shape
        if held.shape == (count, rows // parts, columns * parts):
            held = held.unflatten(2, (parts, columns)).transpose(1, 2).flatten(1, 2)
    return form_of(source.partition("_")[2], own, held)
