"""Reads LoRA adapters that PEFT saved: settings, target modules, and low-rank matrices.

``AdapterPlaces`` finds the layers that adapters can be attached to, by the module names of PEFT.

Dimensions: R rank, I inputs, O outputs, V vocabulary, H hidden size, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from interposer import CheckpointFile
from interposer.errors import CheckpointError, ConfigError, nearest_first
from interposer_engine._checkpoint.files import (
    Checkpoint,
    HubModel,
    check_folder,
    read_json,
    reading,
)
from interposer_engine._checkpoint.weight_check import WeightCheck
from interposer_engine._lora.weight_copies import BaseCopies
from interposer_ops.layers.embedding import Embedding, LMHead
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.moe.experts import Experts, gates_first
from interposer_ops.layers.moe.router import Router
from interposer_ops.layers.tensor_parallel.sharding import Shard

Adaptable = Linear | LMHead | Embedding | Router | Experts

_ROOT = "model."
# MoE modules have these names in transformers from version 5 on.
_MOE = re.compile(r"\.[^.]+\.(experts|gate)(?=\.|$)")


@dataclass(frozen=True, eq=False, slots=True)
class AdapterPlace:
    """A place where an adapter's matrices apply: a linear layer, expert, LM head or embedding.

    Attributes:
        part: number of the projection in a merged layer, from 0.
        offset: first output of the projection in the layer's outputs.
        inputs: I, or V of an embedding.
        outputs: O, or H of an embedding.
        experts: E; None for a layer without experts.
        is_last: the projection is the second matmul of the experts.
        columns, row: this rank's shards of outputs and inputs; None if not sharded.
    """

    layer: Adaptable
    part: int
    offset: int
    inputs: int
    outputs: int
    experts: int | None = None
    is_last: bool = False
    columns: Shard | None = None
    row: Shard | None = None

    @property
    def stored(self) -> tuple[int, int]:
        """Numbers of inputs and outputs of the stored adapter, over all ranks."""
        inputs = self.inputs if self.row is None else self.row.whole
        return inputs, self.outputs if self.columns is None else self.columns.whole

    @property
    def is_table(self) -> bool:
        """Say whether the layer is an embedding, whose inputs are token ids."""
        return isinstance(self.layer, Embedding)


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """The places of a layer's experts, by the names of fused and of separate projections."""

    layer: Experts
    gate_up: AdapterPlace
    gate: AdapterPlace
    up: AdapterPlace
    down: AdapterPlace

    @classmethod
    def of(cls, layer: Experts) -> ExpertPlaces:
        """Return the places of a layer's experts."""
        spec = layer.spec
        hidden, intermediate, num_experts = (
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_experts,
        )
        return cls(
            layer,
            AdapterPlace(layer, 0, 0, hidden, 2 * intermediate, num_experts),
            AdapterPlace(layer, 1, 0, hidden, intermediate, num_experts),
            AdapterPlace(layer, 2, intermediate, hidden, intermediate, num_experts),
            AdapterPlace(layer, 0, 0, intermediate, hidden, num_experts, is_last=True),
        )

    @property
    def parameters(self) -> Mapping[str, AdapterPlace]:
        """Adapter places of the parameters that stack all experts' matrices, by parameter name."""
        return {"gate_up_proj": self.gate_up, "down_proj": self.down}

    @property
    def projections(self) -> Mapping[str, AdapterPlace]:
        """Adapter places of one expert's matrices, by the names in checkpoints."""
        names = self.layer.spec.projections
        return (
            {} if names is None else dict(zip(names, (self.gate, self.up, self.down), strict=True))
        )


class AdapterPlaces:
    """The adapter places of a model, found by the modules' names in transformers."""

    def __init__(self, model: nn.Module) -> None:
        self._places = dict(_places(model))
        # A layer that shards every expert sums up shards internally, where no adapter can add.
        self._experts = {
            layer.prefix: ExpertPlaces.of(layer)
            for layer in model.modules()
            if isinstance(layer, Experts) and not hasattr(layer, "shard")
        }
        # Translates names of checkpoint tensors to the model's names.
        self._renamed: Callable[[str], str | None] = getattr(model, "renamed", str)
        frame = getattr(model.config, "frame", None)
        self._decoder = None if frame is None else frame.decoder
        self._aliases = {
            _MOE.sub(r".mlp.\1", name): name for name in (*self._experts, *self._places)
        }

    def find(self, module: str) -> AdapterPlace | None:
        """Return the place of a module such as ``model.layers.0.self_attn.q_proj``, or None."""
        names = self.names(module)
        return next((place for name in names if (place := self._places.get(name))), None)

    def experts(self, module: str) -> ExpertPlaces | None:
        """Return the adapter places of experts such as ``model.layers.0.mlp.experts``, or None."""
        names = self.names(module)
        return next((places for name in names if (places := self._experts.get(name))), None)

    def expert(self, module: str) -> tuple[AdapterPlace, int] | None:
        """Return place and expert number of a module such as ``...mlp.experts.3.up_proj``, or None.

        None if the model has no such expert.
        """
        experts, _, projection = module.rpartition(".")
        experts, _, number = experts.rpartition(".")
        places = self.experts(experts) if number.isdecimal() else None
        place = None if places is None else places.projections.get(projection)
        if places is None or place is None or int(number) >= places.layer.spec.num_experts:
            return None
        return place, int(number)

    def has_table(self, module: str) -> bool:
        """Say whether a module is the embedding or the LM head."""
        place = self.find(module)
        return place is not None and isinstance(place.layer, Embedding | LMHead)

    def nearest(self, module: str) -> list[str]:
        """Return the names of all adapter places, those most similar to ``module`` first."""
        matrices = (
            f"{name}.{parameter}"
            for name, places in self._experts.items()
            for parameter in places.parameters
        )
        return nearest_first(module, [*self._places, *matrices])

    def names(self, module: str) -> Iterator[str]:
        """Yield the names that a module of transformers may have in interposer's model."""
        name = (self._renamed(f"{module}.weight") or "").removesuffix(".weight")
        yield name
        yield self._aliases.get(name, "")
        if self._decoder and module.startswith(_ROOT):
            # transformers calls every decoder "model", whatever its checkpoints call it.
            name = f"{self._decoder}.{module.removeprefix(_ROOT)}"
            yield name
            yield self._aliases.get(name, "")


def _places(model: nn.Module) -> Iterator[tuple[str, AdapterPlace]]:
    expert_layers = [layer for layer in model.modules() if isinstance(layer, Experts)]
    of_experts = {part for layer in expert_layers for part in layer.modules()}
    for layer in model.modules():
        if layer in of_experts:
            continue  # experts that are linear layers: see ExpertPlaces
        if isinstance(layer, Linear):
            parent, dot, _ = layer.prefix.rpartition(".")
            offset = 0
            for part, (name, outputs) in enumerate(layer.parts.items()):
                columns = getattr(layer, "shards", {}).get(name)
                row = getattr(layer, "shard", None)
                sizes = offset, layer.in_features, outputs
                place = AdapterPlace(layer, part, *sizes, columns=columns, row=row)
                yield f"{parent}{dot}{name}", place
                offset += outputs
        elif isinstance(layer, LMHead):
            yield layer.prefix, AdapterPlace(layer, 0, 0, layer.hidden_size, layer.vocab_size)
        elif isinstance(layer, Embedding):
            yield layer.prefix, AdapterPlace(layer, 0, 0, layer.vocab_size, layer.hidden_size)
        elif isinstance(layer, Router) and type(layer).forward is Router.forward:
            dims = dict(layer.bound.choice.request.dims)
            inputs, outputs = int(dims["in_features"]), int(dims["out_features"])
            yield layer.prefix, AdapterPlace(layer, 0, 0, inputs, outputs)


_ALL = "all-linear"
_NUMBERED = re.compile(r".*?\.[^.]*\.(?P<index>\d+)\.")


@dataclass(frozen=True, slots=True)
class TargetModules:
    """The fields of adapter_config.json by which PEFT selects the modules to adapt.

    Attributes:
        targets: a pattern for complete names, or a set of names and ends of names.
        excluded: the same for modules that are excluded.
        layers: numbers of the layers to which ``targets`` applies; None means all.
        containers: patterns for the module that contains the layers; empty means any.
    """

    targets: str | frozenset[str]
    excluded: str | frozenset[str]
    layers: frozenset[int] | None
    containers: tuple[str, ...]

    @classmethod
    def read(cls, path: Path, settings: Mapping[str, Any]) -> TargetModules:
        """Read the target-module fields from ``settings`` of the file at ``path``.

        Raises: CheckpointError: a field has another type.
        """
        layers = settings.get("layers_to_transform")
        layer_numbers = layers if isinstance(layers, list) else [] if layers is None else [layers]
        if any(type(layer) is not int for layer in layer_numbers):
            reason = f"layers_to_transform is {layers!r:.100}, must be an integer or a list of them"
            raise CheckpointError(path, reason)
        containers = _names(path, settings, "layers_pattern")
        return cls(
            _names(path, settings, "target_modules"),
            _names(path, settings, "exclude_modules"),
            frozenset(layer_numbers) if layer_numbers else None,
            (containers,) if isinstance(containers, str) and containers else tuple(containers),
        )

    def field_against(self, module: str) -> str:
        """Return the field by which a module is no target of the adapter; "" if the module is one.

        Source: ``peft.tuners.tuners_utils.check_target_module_exists``.
        """
        if self.excluded and _matches(self.excluded, module):
            return "exclude_modules"
        # "all-linear" means every linear layer except the head.
        if self.targets == _ALL:
            return "target_modules" if module.rpartition(".")[2] == "lm_head" else ""
        if not _matches(self.targets, module):
            return "target_modules"
        if isinstance(self.targets, str) or module in self.targets or self.layers is None:
            return ""
        patterns = [
            re.compile(rf"(?:^|.*?\.){container}\.(?P<index>\d+)\.")
            for container in self.containers
        ]
        matches = (pattern.match(module) for pattern in patterns or [_NUMBERED])
        match = next(filter(None, matches), None)
        is_target = match is not None and int(match["index"]) in self.layers
        return "" if is_target else "layers_to_transform"


def _names(path: Path, settings: Mapping[str, Any], field: str) -> str | frozenset[str]:
    """Return a field's pattern or list of names; an empty list for null.

    Raises: CheckpointError: the field is neither, or an invalid pattern.
    """
    value = settings.get(field)
    if value is None:
        return frozenset()
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            reason = f"{field} is {value!r:.100}, which is no pattern: {error}"
            raise CheckpointError(path, reason) from None
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(path, f"{field} is {value!r:.100}, must be a text or a list of names")
    return frozenset(value)


def _matches(names: str | frozenset[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return module in names or any(module.endswith(f".{name}") for name in names)


FILE = "adapter_config.json"
# Fields that affect training only.
_OF_TRAINING = frozenset({
    "auto_mapping", "base_model_name_or_path", "eva_config", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "task_type",
})  # fmt: skip
_READ = frozenset({
    "alpha_pattern", "exclude_modules", "layers_pattern", "layers_to_transform", "lora_alpha",
    "peft_type", "r", "rank_pattern", "target_modules", "target_parameters", "use_rslora",
})  # fmt: skip
_NEUTRAL: tuple[Any, ...] = (None, False, "none", [], {})
# Other initializations change the weights of the base model.
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
_HINTS = {
    "bias": "train with bias='none'",
    "init_lora_weights": (
        "save it again by save_pretrained(folder, path_initial_model_for_weight_conversion=...) "
        "of PEFT"
    ),
    "modules_to_save": "train without it, or merge the adapter by merge_and_unload() of PEFT",
}
_MERGE = "merge it by merge_and_unload() of PEFT, and load the merged model"
_MAX_RANK = 2**14


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Rank and scale of an adapter's matrices, and the modules that the adapter changes.

    Attributes:
        base: name or path of the base model, empty if not stated.
        ranks, alphas: values for modules whose name matches a key; ``rank`` and ``alpha`` for
            others.
        by_root: the scale is alpha / sqrt(rank) instead of alpha / rank. Source: arXiv:2312.03732.
        modules: the adapted modules.
        parameters: names, or ends of names, of parameters that were adapted instead of modules.
    """

    path: Path
    base: str
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    by_root: bool
    modules: TargetModules
    parameters: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> AdapterSettings:
        """Read the adapter's settings from adapter_config.json in a folder.

        Raises: CheckpointError: the file is missing, or a setting is invalid or not supported.
        """
        path = folder / FILE
        fields = read_json(path)
        _check_kind(path, fields)
        rank, alpha = fields.get("r", 8), fields.get("lora_alpha", 8)
        _check_number(path, "r", rank, is_integer=True)
        _check_number(path, "lora_alpha", alpha)
        patterns = {}
        for name in ("rank_pattern", "alpha_pattern"):
            patterns[name] = fields.get(name) or {}
            if not isinstance(patterns[name], dict):
                raise CheckpointError(path, f"{name} is {patterns[name]!r}, must be an object")
            for key, value in patterns[name].items():
                _check_number(path, f"{name}[{key!r}]", value, is_integer=name == "rank_pattern")
                try:
                    re.compile(key)
                except re.error as error:
                    reason = f"{name} has the key {key!r}, which is no pattern: {error}"
                    raise CheckpointError(path, reason) from None
        parameters = fields.get("target_parameters") or ()
        if isinstance(parameters, str) or not all(isinstance(name, str) for name in parameters):
            reason = f"target_parameters is {parameters!r:.100}, must be a list of names"
            raise CheckpointError(path, reason)
        by_root = fields.get("use_rslora")
        if by_root is not None and not isinstance(by_root, bool):
            reason = f"use_rslora is {by_root!r:.100}, must be true or false"
            raise CheckpointError(path, reason)
        base = fields.get("base_model_name_or_path")
        return cls(
            path,
            base if isinstance(base, str) else "",
            rank,
            alpha,
            patterns["rank_pattern"],
            patterns["alpha_pattern"],
            bool(by_root),
            TargetModules.read(path, fields),
            tuple(parameters),
        )

    def targets(self, parameter: str) -> bool:
        """Say whether the adapter targets a parameter instead of its module, by PEFT's rules."""
        return any(parameter == name or parameter.endswith(f".{name}") for name in self.parameters)

    def rank_of(self, module: str) -> int:
        """Return the rank R of the adapter matrices of a module."""
        return int(_value_for(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor by which the low-rank product of a module is multiplied."""
        rank, alpha = self.rank_of(module), _value_for(self.alphas, module, self.alpha)
        return float(alpha / (math.sqrt(rank) if self.by_root else rank))


def _check_kind(path: Path, fields: dict[str, Any]) -> None:
    """Raise CheckpointError for an adapter of another kind, or with unsupported settings."""
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(path, f"peft_type is {kind!r}; only 'LORA' is computed", _MERGE)
    for name, value in fields.items():
        if name in _READ or name in _OF_TRAINING:
            continue
        if not any(value is neutral or value == neutral for neutral in _NEUTRAL):
            reason = f"{name} is {value!r:.100}, which is not supported"
            raise CheckpointError(path, reason, _HINTS.get(name, _MERGE))
    init = fields.get("init_lora_weights")
    if not any(init is supported or init == supported for supported in _INITS):
        reason = f"init_lora_weights is {init!r:.100}, which changes weights of the base model"
        raise CheckpointError(path, reason, _HINTS["init_lora_weights"])


def _check_number(path: Path, name: str, value: Any, is_integer: bool = False) -> None:
    kinds = (int,) if is_integer else (int, float)
    if type(value) not in kinds or not (0 < value <= _MAX_RANK if is_integer else value > 0):
        allowed = f"an integer from 1 to {_MAX_RANK}" if is_integer else "a number above 0"
        raise CheckpointError(path, f"{name} is {value!r:.100}, must be {allowed}")


def _value_for(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of a module name, as in PEFT."""
    for key, value in patterns.items():
        if re.match(rf"(.*\.)?({key})$", module):  # PEFT's own expression
            return value
    return default


WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.lora_(?P<table>embedding_)?(?P<side>[AB])(?(table)|\.weight)"
)
_COPY = re.compile(r"base_model\.model\.(?P<module>.+?)(\.base_layer)?\.weight")
_MAX_LISTED = 3
_WRAPPER = ".base_layer"


@dataclass(frozen=True, slots=True)
class Matrices:
    """The two low-rank matrices of one adapter place.

    Attributes:
        a: ``[R, I]``; with experts ``[E, R, I]``.
        b: ``[O, R]``, multiplied by the adapter's scale; with experts ``[E, O, R]``.
    """

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        """The rank R of both matrices."""
        return self.a.shape[-2]


Adapter = Mapping[AdapterPlace, Matrices]


def adapter_folder(path: str | Path) -> Path:
    """Return the folder of an adapter, downloaded first if ``path`` is a name on the hub.

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
    """Read several adapters for a model from their folders, by adapter name.

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
    """Read the matrices of an adapter from its folder, by adapter place.

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
                "so PEFT would ignore them",
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
    """The adapter place to which the matrices of a stored module belong.

    Attributes:
        name: name of the module or parameter in the adapter's settings.
        expert: the expert of the matrices; None for matrices of all experts, or without experts.
    """

    place: AdapterPlace
    name: str
    expert: int | None = None

    @property
    def is_stacked(self) -> bool:
        """Say whether the matrices of all experts are stored as one tensor."""
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
    """Stack the matrices of all experts, with zeros for experts that have no matrices."""
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
    """Return both low-rank matrices in float32, the second one multiplied by the scale."""
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
