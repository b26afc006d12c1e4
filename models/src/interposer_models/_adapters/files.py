"""Reads adapters that PEFT saved: low-rank matrices by module.

Dimensions: R rank, I inputs, O outputs, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from interposer import CheckpointFile
from interposer.errors import CheckpointError, ConfigError
from interposer_models._adapters.places import AdapterPlace, AdapterPlaces
from interposer_models._adapters.settings import AdapterSettings
from interposer_models._adapters.weight_copies import BaseCopies
from interposer_models._checkpoint.checkpoint import Checkpoint, reading
from interposer_models._checkpoint.hub import HubModel
from interposer_models._checkpoint.regular_files import check_folder
from interposer_models._checkpoint.weight_check import WeightCheck
from interposer_ops.layers.experts import gates_first

WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.lora_(?P<table>embedding_)?(?P<side>[AB])(?(table)|\.weight)"
)
_COPY = re.compile(r"base_model\.model\.(?P<module>.+?)(\.base_layer)?\.weight")
_MAX_LISTED = 3
_WRAPPER = ".base_layer"


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of one place.

    Attributes:
        a: ``[R, I]``; with experts ``[E, R, I]``.
        b: ``[O, R]``, multiplied by the adapter's scale; with experts ``[E, O, R]``.
    """

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        """R."""
        return self.a.shape[-2]


Adapter = Mapping[AdapterPlace, Matrices]


def adapter_folder(path: str | Path) -> Path:
    """Return the folder of an adapter, after downloading it if ``path`` is a name on the hub.

    Raises: CheckpointError: the folder does not exist.
    """
    hub_model = HubModel.named(path)
    folder = Path(path) if hub_model is None else hub_model.adapter()
    if not folder.is_dir():
        raise CheckpointError(
            folder,
            "is not a directory" if folder.exists() else "does not exist",
            "give the folder of an adapter of PEFT, or its name on a hub",
        )
    return folder


def read_adapters(
    paths: Mapping[str, str | Path],
    model: nn.Module,
    dtype: torch.dtype,
    device: str,
    checkpoint: Checkpoint | CheckpointFile | None = None,
    check: WeightCheck | None = None,
) -> dict[str, Adapter]:
    """Read the adapters for a model, by name.

    Raises: ConfigError: ``paths`` is not a mapping. CheckpointError: as ``read_adapter``.
    """
    if not isinstance(paths, Mapping):
        raise ConfigError(f"adapters is {paths!r:.100}, must be a mapping of names to folders")
    if not paths:
        return {}
    places, copies = AdapterPlaces(model), BaseCopies(checkpoint, model)
    return {
        name: read_adapter(adapter_folder(path), places, copies, dtype, device, check)
        for name, path in paths.items()
    }


def read_adapter(
    folder: Path,
    places: AdapterPlaces,
    copies: BaseCopies,
    dtype: torch.dtype,
    device: str,
    check: WeightCheck | None = None,
) -> Adapter:
    """Read the matrices of the adapter in a folder, by place.

    The scale is applied in float32, before both matrices are rounded to ``dtype``.

    Args:
        check: checks every matrix for NaN and infinity; None for no check.
    Raises: CheckpointError: the adapter is incomplete, unsupported, or belongs to another model.
    """
    check_folder(folder)
    settings = AdapterSettings.read(folder)
    file = folder / WEIGHTS
    if not file.is_file():
        mend = "save it as safetensors, as PEFT does; adapter_model.bin is pickled, which runs code"
        raise CheckpointError(file, "is missing", mend)
    matrices_by_module: dict[str, dict[str, Tensor]] = {}
    with reading(file), safe_open(file, framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - the file is not a mapping
            match = _KEY.fullmatch(key)
            copy_match = _COPY.fullmatch(key) if match is None else None
            # PEFT can save copies of the embedding and the head next to the matrices.
            if copy_match is not None and places.has_table(copy_match["module"]):
                names = places.names(copy_match["module"])
                copies.check(file, key, names, tensors.get_tensor(key))
                continue
            if match is None:
                raise CheckpointError(
                    file,
                    f"holds {key!r}, which is no matrix of LoRA",
                    "train without what it belongs to, or merge the adapter by PEFT",
                )
            tensor = tensors.get_tensor(key)
            if check is not None:
                check.check(key, tensor, file)
            is_table = match["table"] is not None
            matrices_by_module.setdefault(match["module"], {})[match["side"]] = tensor
            _check_table(
                file, key, is_table, _target(file, match["module"], places, settings).place
            )
    if not matrices_by_module:
        raise CheckpointError(file, "holds no matrix", "copy it again")
    adapter: dict[AdapterPlace, Matrices] = {}
    single_experts: dict[AdapterPlace, dict[int, Matrices]] = {}
    for module, sides in matrices_by_module.items():
        if missing := {"A", "B"} - sides.keys():
            reason = f"lacks the matrix {missing.pop()} of {module!r}"
            raise CheckpointError(file, reason, "copy it again")
        target = _target(file, module, places, settings)
        matrices = _matrices(file, module, sides, target, settings)
        if target.name == module and (field := settings.modules.field_against(module)):
            raise CheckpointError(
                file,
                f"holds matrices of {module!r}, which {field} of {settings.path.name} leaves out, "
                "so that PEFT would ignore them",
                f"restore the {field} that it was trained with",
            )
        rounded = Matrices(matrices.a.to(device, dtype), matrices.b.to(device, dtype))
        if target.expert is None:
            adapter[target.place] = rounded
        else:
            single_experts.setdefault(target.place, {})[target.expert] = rounded
    for place, experts in single_experts.items():
        adapter[place] = _of_experts(place, experts)
    return adapter


@dataclass(frozen=True, slots=True)
class _Target:
    """The place that the matrices of a module belong to.

    Attributes:
        name: name of the module or parameter in the adapter's settings.
        expert: the expert of the matrices; None for matrices of all experts, or without experts.
    """

    place: AdapterPlace
    name: str
    expert: int | None = None

    @property
    def is_stacked(self) -> bool:
        """Say whether the matrices of all experts are stored as one."""
        return self.place.experts is not None and self.expert is None


def _target(file: Path, module: str, places: AdapterPlaces, settings: AdapterSettings) -> _Target:
    stem = module
    # Each wrapper of PEFT adds ".base_layer" to the name.
    while stem.endswith(_WRAPPER):
        stem = stem.removesuffix(_WRAPPER)
    if (layer := places.experts(stem)) is not None:
        # PEFT wraps the module once more for each further targeted parameter.
        targeted = [name for name in layer.parameters if settings.targets(f"{stem}.{name}")]
        depth = (len(module) - len(stem)) // len(_WRAPPER)
        if depth < len(targeted):
            name = targeted[-1 - depth]
            return _Target(layer.parameters[name], f"{stem}.{name}")
    elif (expert_place := places.expert(module)) is not None:
        place, expert = expert_place
        return _Target(place, module, expert)
    name = f"{module}.weight"
    return _Target(_place(file, module, places), name if settings.targets(name) else module)


def _of_experts(place: AdapterPlace, experts: Mapping[int, Matrices]) -> Matrices:
    """Stack the matrices of all experts; zeros for experts without matrices."""
    rank = max(matrices.rank for matrices in experts.values())
    template = next(iter(experts.values())).a
    num_experts = place.experts or 0
    a = template.new_zeros(num_experts, rank, place.inputs)
    b = template.new_zeros(num_experts, place.outputs, rank)
    for expert, matrices in experts.items():
        a[expert, : matrices.rank] = matrices.a
        b[expert, :, : matrices.rank] = matrices.b
    return Matrices(a, b)


def _place(file: Path, module: str, places: AdapterPlaces) -> AdapterPlace:
    place = places.find(module)
    if place is None:
        nearest = ", ".join(places.nearest(module)[:_MAX_LISTED])
        raise CheckpointError(
            file,
            f"adapts {module!r}, which is no linear, embedding or head of this model that takes "
            f"adapters. Such are, nearest first: {nearest}",
            "load the base model that it was trained for, or train with other target_modules",
        )
    return place


def _check_table(file: Path, key: str, is_table: bool, place: AdapterPlace) -> None:
    if is_table != place.is_table:
        kind = "an embedding" if place.is_table else "no embedding"
        raise CheckpointError(file, f"holds {key!r}, but the module is {kind} in this model")


def _matrices(
    file: Path,
    module: str,
    sides: Mapping[str, Tensor],
    target: _Target,
    settings: AdapterSettings,
) -> Matrices:
    """Return both matrices in float32, the second one multiplied by the scale."""
    place, rank = target.place, settings.rank_of(target.name)
    num_experts = place.experts if target.is_stacked and place.experts else 1
    of_experts = f" of each of {num_experts} experts" if target.is_stacked else ""
    inputs, outputs = place.stored
    expected = {"A": [num_experts * rank, inputs], "B": [outputs, rank * num_experts]}
    for side, matrix in sides.items():
        if not matrix.is_floating_point() or matrix.itemsize == 1:
            raise CheckpointError(
                file, f"holds the matrix {side} of {module!r} as {matrix.dtype}, expected floats"
            )
        if list(matrix.shape) != expected[side]:
            base = f", which it was trained for: {settings.base}" if settings.base else ""
            raise CheckpointError(
                file,
                f"the matrix {side} of {module!r} has shape {list(matrix.shape)}; rank {rank} of "
                f"{settings.path.name} and {inputs} inputs and {outputs} outputs of "
                f"the model{of_experts} ask for {expected[side]}",
                f"load the base model{base}",
            )
    # float32, so that the scale does not round twice.
    a, b = sides["A"].float(), sides["B"].float() * settings.scale_of(target.name)
    if place.row is not None:
        a = place.row.of(a, 1)
    if place.columns is not None:
        b = place.columns.of(b, 0)
    if not target.is_stacked:
        return Matrices(a, b)
    # PEFT stores the first matrix by expert, then rank; the second one by rank, then expert.
    a, b = a.view(num_experts, rank, -1), b.view(-1, rank, num_experts).permute(2, 0, 1)
    layer: Any = place.layer
    if layer.spec.alternating and not place.is_last:
        b = gates_first(b)
    return Matrices(a, b)
