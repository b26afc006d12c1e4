"""The policy as data. The only module that reads the environment; nothing writes it.

Precedence, highest first: argument, ``use(...)`` context, ``interposer.toml`` in the working
directory, environment. Mappings are merged key by key, everything else is replaced.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from interposer.errors import ConfigError, UnknownNameError

__all__ = ["Config", "effective_config", "use"]

_PREFIX = "INTERPOSER_"
_FILE = "interposer.toml"


def _frozen(names: Any) -> Any:
    return frozenset(names) if isinstance(names, list | tuple | set) else names


class Config(BaseModel):
    """What the user decided; whatever is unset is left to the selection.

    Attributes:
        platform: name of the platform to run on.
        kernels: kernel name by op, or by ``op@glob`` for places in the model.
        layers: layer name by layer id, or by ``id@glob``.
        attention: attention backend by attention type, or by ``type@glob``.
        disable: names of plugins or distributions that are not to be loaded.

    Raises: ConfigError: a key is unknown or a value not usable.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    platform: str | None = None
    kernels: Mapping[str, str] = Field(default_factory=dict)
    layers: Mapping[str, str] = Field(default_factory=dict)
    attention: Mapping[str, str] = Field(default_factory=dict)
    disable: Annotated[frozenset[str], BeforeValidator(_frozen)] = frozenset()

    if not TYPE_CHECKING:  # type checkers take the signature from the fields

        def __init__(self, **fields: Any) -> None:
            for name in fields:
                if name not in Config.model_fields:
                    raise UnknownNameError("field", name, Config.model_fields, where="of Config")
            try:
                super().__init__(**fields)
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(str(part) for part in first["loc"])
                raise ConfigError(f"{place} = {first['input']!r}: {first['msg']}") from error


_context: ContextVar[tuple[Config, ...]] = ContextVar("interposer_config", default=())


def effective_config(argument: Config | None = None) -> Config:
    """Return the configuration in force, with ``argument`` above all other sources.

    Raises: ConfigError: a source holds an unknown key or an unusable value.
    """
    sources = [_from_environment(os.environ), _from_file(Path(_FILE)), *_context.get()]
    if isinstance(argument, Config):
        sources.append(argument)
    elif argument is not None:
        raise ConfigError(f"config is {argument!r}, must be a Config, as Config(platform='cpu')")
    merged: dict[str, Any] = {}
    for source in sources:
        for name in source.model_fields_set:
            value = getattr(source, name)
            if isinstance(value, Mapping):
                value = {**merged.get(name, {}), **value}
            merged[name] = value
    return Config(**merged)


@contextmanager
def use(config: Config | None = None, /, **changes: Any) -> Iterator[Config]:
    """Apply a configuration, or single fields of one, inside a ``with`` block.

    Safe in threads and asyncio tasks: a thread sees only the blocks that it entered itself, a
    task also those that it was created in.
    """
    if config is not None and changes:
        raise ConfigError("use() takes a Config or single fields, not both")
    entered = config if config is not None else _validated(changes, "use()")
    token = _context.set((*_context.get(), entered))
    try:
        yield effective_config()
    finally:
        _context.reset(token)


def _from_environment(environment: Mapping[str, str]) -> Config:
    fields: dict[str, Any] = {}
    known = {_PREFIX + name.upper(): name for name in Config.model_fields}
    for variable, text in environment.items():
        if not variable.startswith(_PREFIX):
            continue
        if variable not in known:
            raise UnknownNameError("environment variable", variable, known)
        name = known[variable]
        if name == "platform":
            fields[name] = text
        elif name == "disable":
            fields[name] = _split(text)
        else:
            fields[name] = _pairs(variable, text)
    return _validated(fields, "the environment")


def _from_file(path: Path) -> Config:
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Config()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path.absolute()} cannot be read: {error}") from error
    return _validated(fields, str(path.absolute()))


def _validated(fields: dict[str, Any], source: str) -> Config:
    try:
        return Config(**fields)
    except UnknownNameError as error:
        raise UnknownNameError("key", error.name, error.known, where=f"in {source}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _pairs(variable: str, text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in _split(text):
        name, equals, value = item.partition("=")
        if not (name and equals and value):
            raise ConfigError(
                f"{variable}: {item!r} is not of the form NAME=CHOICE, as in rms_norm=reference"
            )
        name, value = name.strip(), value.strip()
        if pairs.setdefault(name, value) != value:
            raise ConfigError(f"{variable}: {name!r} is set to {pairs[name]!r} and to {value!r}")
    return pairs
