"""The modules that an adapter's settings target; PEFT ignores matrices of all others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interposer.errors import CheckpointError

_ALL = "all-linear"
_NUMBERED = re.compile(r".*?\.[^.]*\.(?P<index>\d+)\.")


@dataclass(frozen=True, slots=True)
class TargetModules:
    """The fields of adapter_config.json by which PEFT selects modules.

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
        """Read the fields from ``settings`` of the file at ``path``.

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
        """Return the field that excludes a module from the targets; "" if the module is a target.

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
    """Return a field that is a pattern or a list of names; null is an empty list.

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
