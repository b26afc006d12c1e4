"""Settings of an adapter, read from PEFT's adapter_config.json and checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interposer.errors import CheckpointError
from interposer_models._adapters.target_modules import TargetModules
from interposer_models._checkpoint.checkpoint import read_json

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
    """Rank and scale of an adapter's matrices, and the modules that were adapted.

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
        """Read the settings in a folder.

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
        """Say whether a parameter was adapted instead of its module, by PEFT's rules."""
        return any(parameter == name or parameter.endswith(f".{name}") for name in self.parameters)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's matrices."""
        return int(_matching(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor by which the product of a module's matrices is multiplied."""
        rank, alpha = self.rank_of(module), _matching(self.alphas, module, self.alpha)
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
            reason = f"{name} is {value!r:.100}, which is not computed"
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


def _matching(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of a name, as PEFT does."""
    for key, value in patterns.items():
        if re.match(rf"(.*\.)?({key})$", module):  # PEFT's own expression
            return value
    return default
