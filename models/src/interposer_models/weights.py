"""Placing a checkpoint's tensors into a model that was built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from interposer import PluggableLayer
from interposer.errors import CheckpointError
from interposer_ops.layers.linear import Linear

__all__ = ["Progress", "load_weights"]

Progress = Callable[[int], None]
"""Told the bytes of every tensor that was placed."""

# Some writers store tables that are derived from the config.
_DERIVED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class _Target:
    """Entries ``start`` to ``stop`` along ``dim`` of a parameter; all of it if dim is None."""

    module: nn.Module
    parameter: str
    dim: int | None = None
    start: int = 0
    stop: int = 0


def load_weights(
    model: nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    path: object,
    device: str,
    progress: Progress | None = None,
) -> None:
    """Fill every parameter of ``model`` from ``tensors``, allocating each when it is first met.

    Raises: CheckpointError: a tensor is unknown, missing, stored twice, or of the wrong shape or
        kind of dtype. The model is unusable then and to be dropped.
    """
    targets = _targets(model)
    tied = {name for name in ("lm_head.weight",) if name not in targets}
    filled: set[str] = set()
    for name, tensor in tensors:
        if name in targets:
            if name in filled:
                raise CheckpointError(path, f"holds the tensor {name!r} twice")
            _place(name, tensor, targets[name], path, device)
            filled.add(name)
        elif name not in tied and not name.endswith(_DERIVED):
            raise CheckpointError(
                path, f"holds the tensor {name!r}, which the model has no place for"
            )
        if progress is not None:
            progress(tensor.nbytes)
    missing = sorted(set(targets) - filled)
    if missing:
        listed = ", ".join(repr(name) for name in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(path, f"lacks the tensor {listed}{more}", "copy the checkpoint again")


def _targets(model: nn.Module) -> dict[str, _Target]:
    """Return the place of every tensor by the name that checkpoints use."""
    targets: dict[str, _Target] = {}
    shared: set[int] = set()
    for module in model.modules():
        if not isinstance(module, PluggableLayer):
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in shared:
                continue
            shared.add(id(parameter))
            if isinstance(module, Linear):
                targets.update(_shards(module, name, parameter))
            else:
                targets[f"{module.prefix}.{name}"] = _Target(module, name)
    return targets


def _shards(layer: Linear, name: str, parameter: nn.Parameter) -> dict[str, _Target]:
    parent = layer.prefix.rpartition(".")[0]
    dim = getattr(parameter, "shard_dim", 0)
    total = sum(layer.parts.values())
    per_part = getattr(parameter, "per_part", False)
    start, shards = 0, {}
    for part, size in layer.parts.items():
        share, whole = (1, len(layer.parts)) if per_part else (size, total)
        rows = share * parameter.shape[dim] // whole
        shards[f"{parent}.{part}.{name}"] = _Target(layer, name, dim, start, start + rows)
        start += rows
    return shards


def _place(name: str, tensor: torch.Tensor, target: _Target, path: object, device: str) -> None:
    parameter = target.module._parameters[target.parameter]
    assert parameter is not None
    expected = list(parameter.shape)
    if target.dim is not None:
        expected[target.dim] = target.stop - target.start
    if expected == [1] and tensor.ndim == 0:
        tensor = tensor.reshape(1)
    if list(tensor.shape) != expected:
        raise CheckpointError(
            path, f"tensor {name!r} has shape {list(tensor.shape)}, the config asks for {expected}"
        )
    # Numbers of 8 bits mean something with their scales only, so nothing is rounded to them.
    if tensor.dtype != parameter.dtype and not (
        tensor.is_floating_point() and parameter.is_floating_point() and parameter.itemsize > 1
    ):
        raise CheckpointError(
            path, f"tensor {name!r} is stored as {tensor.dtype}, expected {parameter.dtype}"
        )
    if parameter.is_meta:
        # Swapping keeps the identity of a parameter that two layers share.
        allocated = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
        torch.utils.swap_tensors(parameter, allocated)
    rows = parameter.data
    if target.dim is not None:
        rows = rows.narrow(target.dim, target.start, target.stop - target.start)
    rows.copy_(tensor)
