"""Dequantization of experts and routers, whose weights are packed only in the checkpoint.

bitsandbytes packs every ``torch.nn.Linear``. Experts and routers were ``nn.Linear`` in transformers
4; in transformers 5 they are parameters, which stay plain. No config field tells the two apart.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch

from interposer.errors import CheckpointError
from interposer_nf4._codebook_linear import dequantize
from interposer_nf4._eight_bit import check_stored, scales_of
from interposer_nf4._quant_state import QuantState
from interposer_nf4._settings import EightBit, FourBit, Settings
from interposer_nf4._stored_weight import StoredWeight, names_of

_EIGHT_BIT = {"weight": "weight", "scales": "SCB", "format": "weight_format"}
_OPTIONAL = "format"  # early releases did not store it

Tensors = Iterator[tuple[str, torch.Tensor]]


def restored_weights(settings: Settings, tensors: Tensors, places: Container[str]) -> Tensors:
    """Yield ``tensors``, with packed weights dequantized to float32 where the model is unquantized.

    The tensors of a packed layer are buffered until the layer is complete.

    Args:
        places: names of the tensors that the model takes; packed layers of the model take scales.
    Raises: CheckpointError: tensors are missing or contradict each other.
    """
    pending: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        layer, key = _owner(name)
        kind = settings.weights(layer) if layer else None
        if kind is None or not _is_packed(kind, layer, key, tensor, places):
            yield name, tensor
            continue
        parts = pending.setdefault(layer, {})
        parts[key] = tensor
        if parts.keys() == set(_names(kind).values()):
            yield f"{layer}.weight", _weight(kind, layer, pending.pop(layer))
    # Incomplete layers: an optional tensor is missing, or _weight reports the error.
    for layer, parts in pending.items():
        kind = settings.weights(layer)
        assert kind is not None, "only quantized layers are pending"
        yield f"{layer}.weight", _weight(kind, layer, parts)


def _owner(name: str) -> tuple[str, str]:
    """Split a tensor name into layer and rest; the layer is "" if the name does not match."""
    if ".weight." in name:
        layer, _, suffix = name.partition(".weight.")
        return layer, f"weight.{suffix}"
    layer, _, key = name.rpartition(".")
    return (layer, key) if key in _EIGHT_BIT.values() else ("", name)


def _names(kind: FourBit | EightBit) -> dict[str, str]:
    """Return the tensor names of a packed layer, by role."""
    return names_of(kind) if isinstance(kind, FourBit) else _EIGHT_BIT


def _is_packed(
    kind: FourBit | EightBit, layer: str, key: str, tensor: torch.Tensor, places: Container[str]
) -> bool:
    names = _names(kind)
    scales = names["absmax" if isinstance(kind, FourBit) else "scales"]
    # If the model takes the scales of a layer, a linear method reads the packed weight.
    if f"{layer}.weight" not in places or f"{layer}.{scales}" in places:
        return False
    if key != "weight":
        return key in names.values()
    if isinstance(kind, EightBit):
        return tensor.dtype == torch.int8
    # Bytes may be stored as numbers of another dtype, but always as one column.
    return tensor.ndim == 2 and tensor.shape[1] == 1


def _weight(kind: FourBit | EightBit, layer: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    names = _names(kind)
    for fact, name in names.items():
        if name not in parts and fact != _OPTIONAL:
            raise CheckpointError(
                f"{layer}.{name}",
                "is missing, but the weight is packed",
                "copy the checkpoint again",
            )
    if isinstance(kind, EightBit):
        weight_format = parts.get("weight_format")
        check_stored(layer, 0 if weight_format is None else int(weight_format), parts["SCB"])
        return parts["weight"].float() * scales_of(parts["SCB"])
    full_names = {fact: f"{layer}.{name}" for fact, name in names.items()}
    shape = QuantState.read(full_names["state"], parts[names["state"]]).shape
    if shape[1] % 2:
        raise CheckpointError(
            full_names["state"],
            f"has {shape[1]} inputs, whose codes of 4 bits are not whole bytes of a row",
            "leave the layer plain, by llm_int8_skip_modules",
        )
    stored = StoredWeight.read(
        kind, shape, {fact: parts[name] for fact, name in names.items()}, full_names
    )
    scales = stored.scales(stored.inputs_per_scale)
    return dequantize(stored.packed, scales, stored.codebook, torch.float32)
