"""The policy in force, entry by entry, each with the source that decided it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from interposer._config.config import Config, config_sources
from interposer._config.rules import Rule
from interposer._contract.platform import Placement


@dataclass(frozen=True, slots=True)
class Setting:
    """One entry of the policy: a field, its key if it is a mapping, and where it is from."""

    field: str
    key: str
    value: str
    source: str

    def __str__(self) -> str:
        return f"{self.field}.{self.key}" if self.key else self.field


def settings(config: Config, placement: Placement | None = None) -> tuple[Setting, ...]:
    """Return what ``config`` sets, in the order of its fields.

    What no source of the moment says was an argument, or is a default of the platform.
    """
    sources = config_sources()
    found = []
    for name in Config.model_fields:
        if name in config.model_fields_set:
            value = getattr(config, name)
            entries = value if isinstance(value, Mapping) else {"": value}
            for key, entry in entries.items():
                origins = (s.name for s in sources if _set_by(s.config, name, key) == entry)
                found.append(Setting(name, key, _text(entry), next(origins, "argument")))
        if name == "kernels" and placement is not None:
            source = f"platform {placement.platform.name}"
            for op, kernel in placement.default_kernels.items():
                rule = config.kernels.get(op)
                if rule is None or not (rule.pin or rule.prefer):
                    found.append(Setting(name, op, _text(Rule(prefer=(kernel,))), source))
    return tuple(found)


def _set_by(config: Config, name: str, key: str) -> Any:
    """Return what ``config`` itself sets, or this function, which equals nothing."""
    if name not in config.model_fields_set:
        return _set_by
    value = getattr(config, name)
    return value.get(key, _set_by) if isinstance(value, Mapping) else value


def _text(value: Any) -> str:
    match value:
        case None:
            return "all"
        case bool():
            return "yes" if value else "no"
        case Set():
            return ", ".join(sorted(value)) or "none"
        case _:
            return str(value)
