"""The configuration sources outside this process: two files, and environment variables."""

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

_OWN_FILE = "interposer.toml"
_SHARED_FILE = "pyproject.toml"
_PREFIX = "INTERPOSER_"
_RULE_FIELDS = ("kernels", "layers", "attention")
_VARIABLES = {
    _PREFIX + name.upper(): name
    for name in (*_RULE_FIELDS, "platform", "plugins", "disable", "strict", "cache_dir")
}


class ConfigFile(NamedTuple):
    """The fields of a ``Config`` as written in a file, not validated."""

    path: Path
    fields: dict[str, Any]


def read_project_file(folder: Path) -> ConfigFile | None:
    """Read the project file of ``folder`` or of the nearest parent with one.

    A project file is ``interposer.toml``, or ``pyproject.toml`` with the table
    ``[tool.interposer]``. The search ends at a folder with ``.git``.

    Raises: ConfigError: a folder has both, or a file cannot be read.
    """
    for place in (folder, *folder.parents):
        own_file, shared_file = _read(place / _OWN_FILE), _read_shared(place / _SHARED_FILE)
        if own_file is not None and shared_file is not None:
            raise ConfigError(
                f"{place} has {_OWN_FILE} and also [tool.interposer] in {_SHARED_FILE}. "
                "Try: keep one of them"
            )
        file = own_file or shared_file
        # The root of a repository ends the search; ``.git`` may be a file or a broken link.
        if file is not None or os.path.lexists(place / ".git"):
            return file
    return None


def read_user_file() -> ConfigFile | None:
    """Read ``config.toml`` of the user's configuration directory, if it exists.

    Raises: ConfigError: the file cannot be read.
    """
    try:
        # Without a home folder, the path still starts with "~", and expanduser raises.
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
        # A pyproject.toml that never mentions interposer may be broken; other tools report that.
        return ConfigFile(path, tomllib.loads(text)) if only_with in text else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # A folder without search permission, such as another user's home, counts as empty.
        if isinstance(error, PermissionError) and not os.path.lexists(path):
            return None
        raise ConfigError(f"{path} cannot be read: {error}") from error


def read_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """Convert environment variables to fields of a ``Config``; an empty variable sets nothing.

    Raises: ConfigError: a variable of this prefix is unknown, or a value cannot be used.
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
