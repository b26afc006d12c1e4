"""The files that a configuration is read from: the project's and the user's."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_config_path

from interposer._contract.errors import ConfigError

_OWN = "interposer.toml"
_SHARED = "pyproject.toml"


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
    try:
        text = path.read_text(encoding="utf-8")
        # A file of other tools is none of our business, broken or not.
        return ConfigFile(path, tomllib.loads(text)) if only_with in text else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        # In a folder that may not be searched, as the home of another user, there is no file.
        if not os.path.lexists(path):
            return None
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
