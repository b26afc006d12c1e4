"""The fields of a configuration as variables of the environment spell them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer._config.rules import parse_rules
from interposer._contract.errors import ConfigError, UnknownNameError

_PREFIX = "INTERPOSER_"
_IN_ENVIRONMENT = (
    "platform",
    "kernels",
    "layers",
    "attention",
    "plugins",
    "disable",
    "strict",
    "cache_dir",
)


def read_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that variables set; an empty variable sets nothing.

    Raises: ConfigError: a variable of this prefix is unknown, or its value cannot be used.
    """
    fields: dict[str, Any] = {}
    known = {_PREFIX + name.upper(): name for name in _IN_ENVIRONMENT}
    for variable in sorted(environment):
        if not variable.startswith(_PREFIX):
            continue
        if variable not in known:
            raise UnknownNameError("environment variable", variable, known)
        name, text = known[variable], environment[variable]
        items = [item.strip() for item in text.split(",") if item.strip()]
        if not items:
            continue
        match name:
            case "platform":
                fields[name] = parse_rules([f"{name}={item}" for item in items], variable)[name]
            case "disable":
                fields[name] = items
            case "plugins":
                fields[name] = items[0] if items in (["all"], ["none"]) else items
            case "strict":
                if items not in (["0"], ["1"]):
                    raise ConfigError(f"{variable} is {text!r}, must be 1 or 0")
                fields[name] = items == ["1"]
            case "cache_dir":
                fields[name] = text
            case _:
                fields[name] = parse_rules(items, variable)
    return fields
