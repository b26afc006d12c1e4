"""Reading adapters that PEFT saved: matrices of low rank by the module that they belong to.

Dimensions: R rank, I inputs, O outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from interposer.errors import CheckpointError
from interposer_models._adapters.places import AdapterPlace, AdapterPlaces
from interposer_models._adapters.settings import AdapterSettings
from interposer_models._checkpoint.checkpoint import reading
from interposer_models._checkpoint.hub import HubModel

WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.lora_(?P<table>embedding_)?(?P<side>[AB])(?(table)|\.weight)"
)
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of one place.

    Attributes:
        a: ``[R, I]``.
        b: ``[O, R]``, times the scale of the adapter.
    """

    a: Tensor
    b: Tensor


Adapter = Mapping[AdapterPlace, Matrices]


def adapter_folder(path: str | Path) -> Path:
    """Return the folder of an adapter, downloaded where ``path`` names one on the hub.

    Raises: CheckpointError: there is none.
    """
    named = HubModel.named(path)
    folder = Path(path) if named is None else named.adapter()
    if not folder.is_dir():
        raise CheckpointError(
            folder,
            "is not a directory" if folder.exists() else "does not exist",
            "give the folder of an adapter of PEFT, or its name on a hub",
        )
    return folder


def read_adapter(
    folder: Path,
    places: AdapterPlaces,
    dtype: torch.dtype,
    device: str,
) -> Adapter:
    """Return the matrices of the adapter in a folder, by place.

    The scale is applied in float32, before both are rounded to ``dtype``.

    Raises: CheckpointError: it is incomplete, of another model, or asks for what is not computed.
    """
    settings = AdapterSettings.read(folder)
    file = folder / WEIGHTS
    if not file.is_file():
        mend = "save it as safetensors, as PEFT does; adapter_model.bin is pickled, which runs code"
        raise CheckpointError(file, "is missing", mend)
    found: dict[str, dict[str, Tensor]] = {}
    with reading(file), safe_open(file, framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - it is no mapping
            matched = _KEY.fullmatch(key)
            if matched is None:
                raise CheckpointError(
                    file,
                    f"holds {key!r}, which is no matrix of LoRA",
                    "train without what it belongs to, or merge the adapter by PEFT",
                )
            tensor = tensors.get_tensor(key)
            table = matched["table"] is not None
            found.setdefault(matched["module"], {})[matched["side"]] = tensor
            _check_table(file, key, table, _place(file, matched["module"], places))
    if not found:
        raise CheckpointError(file, "holds no matrix", "copy it again")
    adapter: dict[AdapterPlace, Matrices] = {}
    for module, sides in found.items():
        if missing := {"A", "B"} - sides.keys():
            reason = f"lacks the matrix {missing.pop()} of {module!r}"
            raise CheckpointError(file, reason, "copy it again")
        place = _place(file, module, places)
        _check_shapes(file, module, sides, place, settings)
        a, b = sides["A"].float(), sides["B"].float() * settings.scale_of(module)
        adapter[place] = Matrices(a.to(device, dtype), b.to(device, dtype))
    return adapter


def _place(file: Path, module: str, places: AdapterPlaces) -> AdapterPlace:
    place = places.find(module)
    if place is None:
        near = ", ".join(places.nearest(module)[:_NAMED])
        raise CheckpointError(
            file,
            f"adapts {module!r}, which is no linear, embedding or head of this model that takes "
            f"adapters. Such are, nearest first: {near}",
            "load the base model that it was trained for, or train with other target_modules",
        )
    return place


def _check_table(file: Path, key: str, is_table: bool, place: AdapterPlace) -> None:
    if is_table != place.is_table:
        kind = "an embedding" if place.is_table else "no embedding"
        raise CheckpointError(file, f"holds {key!r}, but the module is {kind} in this model")


def _check_shapes(
    file: Path,
    module: str,
    sides: Mapping[str, Tensor],
    place: AdapterPlace,
    settings: AdapterSettings,
) -> None:
    rank = settings.rank_of(module)
    for side, expected in (("A", [rank, place.inputs]), ("B", [place.outputs, rank])):
        given = sides[side]
        if not given.is_floating_point() or given.itemsize == 1:
            raise CheckpointError(
                file, f"holds the matrix {side} of {module!r} as {given.dtype}, expected floats"
            )
        if list(given.shape) != expected:
            base = f", which it was trained for: {settings.base}" if settings.base else ""
            raise CheckpointError(
                file,
                f"the matrix {side} of {module!r} has shape {list(given.shape)}; rank {rank} of "
                f"{settings.path.name} and {place.inputs} inputs and {place.outputs} outputs of "
                f"the model ask for {expected}",
                f"load the base model{base}",
            )
