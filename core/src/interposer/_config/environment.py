"""The environment, which no other module touches: its variables are fields of a configuration.

Nothing is written to it, but what a plugin changed while it was examined is put back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


def variables() -> Mapping[str, str]:
    """Return the variables of the environment by name."""
    return os.environ


def child_environment(**defaults: str) -> dict[str, str]:
    """Return the environment for a child process, with ``defaults`` where it sets nothing."""
    return {**defaults, **os.environ}


@contextmanager
def environment_guard() -> Iterator[list[str]]:
    """Put back every variable of the environment that changes inside a ``with`` block.

    The list that is yielded holds the names of those variables once the block has ended.
    """
    before = dict(os.environ)
    changed: list[str] = []
    try:
        yield changed
    finally:
        after = dict(os.environ)
        if after != before:
            names = sorted(before.keys() | after.keys())
            changed += [name for name in names if before.get(name) != after.get(name)]
            for name in changed:
                if name in before:
                    os.environ[name] = before[name]
                else:
                    del os.environ[name]
