"""The settings of an adapter, read from PEFT's adapter_config.json and checked."""

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
# How the matrices were trained.
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
# Others change the weights of the base model, to which an adapter then belongs.
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
_LARGEST_RANK = 2**14


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The numbers by which the product of both matrices is made and scaled.

    Attributes:
        base: name or path of the model that it was trained for, empty where none is stated.
        ranks, alphas: of modules whose name a key matches, in place of ``rank`` and ``alpha``.
        by_root: the scale is alpha / sqrt(rank), not alpha / rank. Source: arXiv:2312.03732.
        modules: that were adapted.
        parameters: ends of the names of parameters that were adapted in place of modules.
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
        """Return the settings in a folder.

        Raises: CheckpointError: there are none, one is not usable, or asks for what is not
            computed.
        """
        path = folder / FILE
        said = read_json(path)
        _check_kind(path, said)
        rank, alpha = said.get("r", 8), said.get("lora_alpha", 8)
        _check_number(path, "r", rank, whole=True)
        _check_number(path, "lora_alpha", alpha)
        patterns = {}
        for name in ("rank_pattern", "alpha_pattern"):
            patterns[name] = said.get(name) or {}
            if not isinstance(patterns[name], dict):
                raise CheckpointError(path, f"{name} is {patterns[name]!r}, must be an object")
            for key, value in patterns[name].items():
                _check_number(path, f"{name}[{key!r}]", value, whole=name == "rank_pattern")
                try:
                    re.compile(key)
                except re.error as error:
                    reason = f"{name} has the key {key!r}, which is no pattern: {error}"
                    raise CheckpointError(path, reason) from None
        parameters = said.get("target_parameters") or ()
        if isinstance(parameters, str) or not all(isinstance(name, str) for name in parameters):
            reason = f"target_parameters is {parameters!r:.100}, must be a list of names"
            raise CheckpointError(path, reason)
        by_root = said.get("use_rslora")
        if by_root is not None and not isinstance(by_root, bool):
            reason = f"use_rslora is {by_root!r:.100}, must be true or false"
            raise CheckpointError(path, reason)
        base = said.get("base_model_name_or_path")
        return cls(
            path,
            base if isinstance(base, str) else "",
            rank,
            alpha,
            patterns["rank_pattern"],
            patterns["alpha_pattern"],
            bool(by_root),
            TargetModules.read(path, said),
            tuple(parameters),
        )

    def targets(self, parameter: str) -> bool:
        """Say whether a parameter was adapted in place of its module, as PEFT finds it."""
        return any(parameter == one or parameter.endswith(f".{one}") for one in self.parameters)

    def rank_of(self, module: str) -> int:
        """Return the rank that the matrices of a module have."""
        return int(_matching(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor of the product of a module's matrices."""
        rank, alpha = self.rank_of(module), _matching(self.alphas, module, self.alpha)
        return float(alpha / (math.sqrt(rank) if self.by_root else rank))


def _check_kind(path: Path, said: dict[str, Any]) -> None:
    """Raise CheckpointError for an adapter of another kind, or with parts that are not computed."""
    kind = said.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(path, f"peft_type is {kind!r}; only 'LORA' is computed", _MERGE)
    for name, value in said.items():
        if name in _READ or name in _OF_TRAINING:
            continue
        if not any(value is one or value == one for one in _NEUTRAL):
            reason = f"{name} is {value!r:.100}, which is not computed"
            raise CheckpointError(path, reason, _HINTS.get(name, _MERGE))
    init = said.get("init_lora_weights")
    if not any(init is one or init == one for one in _INITS):
        reason = f"init_lora_weights is {init!r:.100}, which changes weights of the base model"
        raise CheckpointError(path, reason, _HINTS["init_lora_weights"])


def _check_number(path: Path, name: str, value: Any, whole: bool = False) -> None:
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not (0 < value <= _LARGEST_RANK if whole else value > 0):
        allowed = f"an integer from 1 to {_LARGEST_RANK}" if whole else "a number above 0"
        raise CheckpointError(path, f"{name} is {value!r:.100}, must be {allowed}")


def _matching(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first key that matches the end of a name, as PEFT finds it."""
    for key, value in patterns.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default
