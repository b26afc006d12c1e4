"""Weights that were packed where the model has plain ones: those of experts and routers.

bitsandbytes packs modules of the class ``torch.nn.Linear``. Experts and routers were such modules
in transformers 4; in transformers 5 they are parameters, which stay plain. No config tells which.
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
    """Yield ``tensors``, with float32 weights in place of the packed ones that have no method.

    All tensors of such a layer are held until the last one came.

    Args:
        places: names of the tensors that the model takes. Methods of packed layers take scales.
    Raises: CheckpointError: tensors contradict each other, or one lacks.
    """
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        layer, key = _owner(name)
        kind = settings.weights(layer) if layer else None
        if kind is None or not _is_packed(kind, layer, key, tensor, places):
            yield name, tensor
            continue
        parts = held.setdefault(layer, {})
        parts[key] = tensor
        if parts.keys() == set(_names(kind).values()):
            yield f"{layer}.weight", _weight(kind, layer, held.pop(layer))
    for layer, parts in held.items():
        kind = settings.weights(layer)
        assert kind is not None, "only such layers are held"
        yield f"{layer}.weight", _weight(kind, layer, parts)


def _owner(name: str) -> tuple[str, str]:
    """Return the layer and what its tensor is called below it; nothing if it is of no layer."""
    if ".weight." in name:
        layer, _, rest = name.partition(".weight.")
        return layer, f"weight.{rest}"
    layer, _, key = name.rpartition(".")
    return (layer, key) if key in _EIGHT_BIT.values() else ("", name)


def _names(kind: FourBit | EightBit) -> dict[str, str]:
    return names_of(kind) if isinstance(kind, FourBit) else _EIGHT_BIT


def _is_packed(
    kind: FourBit | EightBit, layer: str, key: str, tensor: torch.Tensor, places: Container[str]
) -> bool:
    names = _names(kind)
    scales = names["absmax" if isinstance(kind, FourBit) else "scales"]
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
        form = parts.get("weight_format")
        check_stored(layer, 0 if form is None else int(form), parts["SCB"])
        return parts["weight"].float() * scales_of(parts["SCB"])
    own = {fact: f"{layer}.{name}" for fact, name in names.items()}
    shape = QuantState.read(own["state"], parts[names["state"]]).shape
    if shape[1] % 2:
        raise CheckpointError(
            own["state"],
            f"has {shape[1]} inputs, whose codes of 4 bits are not whole bytes of a row",
            "leave the layer plain, by llm_int8_skip_modules",
        )
    stored = StoredWeight.read(
        kind, shape, {fact: parts[name] for fact, name in names.items()}, own
    )
    scales = stored.scales(stored.inputs_per_scale)
    return dequantize(stored.codes, scales, stored.codebook, torch.float32)
