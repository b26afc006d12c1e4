"""The sources of a configuration outside this process: two files, and variables by name."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_config_path

from interposer._config.file_access import irregular
from interposer._config.rules import parse_rules
from interposer._contract.errors import ConfigError, UnknownNameError

_OWN = "interposer.toml"
_SHARED = "pyproject.toml"
_PREFIX = "INTERPOSER_"
_RULES = ("kernels", "layers", "attention")
_VARIABLES = {
    _PREFIX + name.upper(): name
    for name in (*_RULES, "platform", "plugins", "disable", "strict", "cache_dir")
}


class ConfigFile(NamedTuple):
    """The fields of a ``Config`` as a file states them, not validated."""

    path: Path
    fields: dict[str, Any]


def read_project_file(folder: Path) -> ConfigFile | None:
    """Return the file of the nearest of ``folder`` and its parents that has one.

    A folder has one as ``interposer.toml`` or as the table ``[tool.interposer]`` of
    ``pyproject.toml``. A folder with ``.git`` is the last one that is looked at.

    Raises: ConfigError: a folder has both, or a file cannot be read.
    """
    for place in (folder, *folder.parents):
        own, shared = _read(place / _OWN), _read_shared(place / _SHARED)
        if own is not None and shared is not None:
            raise ConfigError(
                f"{place} has {_OWN} and also [tool.interposer] in {_SHARED}. Try: keep one of them"
            )
        found = own or shared
        if found is not None or os.path.lexists(place / ".git"):
            return found
    return None


def read_user_file() -> ConfigFile | None:
    """Return ``config.toml`` of the user's configuration directory, if there is one.

    Raises: ConfigError: it cannot be read.
    """
    try:
        # A user without a home has a path that still starts with "~".
        folder = user_config_path("interposer", appauthor=False).expanduser()
    except RuntimeError:
        return None
    return _read(folder / "config.toml")


def _read_shared(path: Path) -> ConfigFile | None:
    file = _read(path, only_with="interposer")
    tool = file.fields.get("tool") if file is not None else None
    if not isinstance(tool, dict) or "interposer" not in tool:
        return None
    fields = tool["interposer"]
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: tool.interposer is {fields!r}, must be a table")
    return ConfigFile(path, fields)


def _read(path: Path, only_with: str = "") -> ConfigFile | None:
    if fault := irregular(path):
        raise ConfigError(f"{path} cannot be read: it {fault}. Try: remove it, or start elsewhere")
    try:
        text = path.read_text(encoding="utf-8")
        # A file of other tools is none of our business, broken or not.
        return ConfigFile(path, tomllib.loads(text)) if only_with in text else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # In a folder that may not be searched, as the home of another user, there is no file.
        if isinstance(error, PermissionError) and not os.path.lexists(path):
            return None
        raise ConfigError(f"{path} cannot be read: {error}") from error


def read_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that variables of an environment set; an empty one sets nothing.

    Raises: ConfigError: a variable of this prefix is unknown, or its value cannot be used.
    """
    fields: dict[str, Any] = {}
    for variable in sorted(name for name in environment if name.startswith(_PREFIX)):
        if variable not in _VARIABLES:
            raise UnknownNameError("environment variable", variable, _VARIABLES)
        name, text = _VARIABLES[variable], environment[variable]
        items = [item.strip() for item in text.split(",") if item.strip()]
        if items:
            fields[name] = _value(variable, name, text, items)
    return fields


def _value(variable: str, name: str, text: str, items: list[str]) -> Any:
    match name:
        case "cache_dir":
            return text
        case "disable":
            return items
        case "plugins":
            return items[0] if items in (["all"], ["none"]) else items
        case "platform":
            return parse_rules([f"{name}={item}" for item in items], variable)[name]
        case "strict" if items not in (["0"], ["1"]):
            raise ConfigError(f"{variable} is {text!r}, must be 1 or 0")
        case "strict":
            return items == ["1"]
    return parse_rules(items, variable)
