"""Settings of the models of a server, from the command line or from a TOML file.

This module imports no torch, so that a mistake in the file is reported at once.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interposer import Config
from interposer.errors import ConfigError, near_names
from interposer_engine.options import check_load_options, load_options

if TYPE_CHECKING:
    from interposer_engine import LanguageModel
    from interposer_serve._model_source import Model, ModelSource

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
_LOAD_DEFAULTS = {
    option.name: option.default for option in load_options(without=("expert_parallel",))
}
# Options of ``load`` that an encoder has as well.
_ENCODER_OPTIONS = ("dtype", "quantization")
_FORMATS = ("tool_format", "reasoning_format", "response_template")
_TABLES = {"prefix_cache": "PrefixCache", "speculation": "Speculation"}


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Settings of one model of a server.

    Attributes:
        name: Name of the model for clients.
        path: Folder, file or name on the hub.
        embed: Whether the model is an encoder.
        options: Arguments of ``load`` by name; a table for ``PrefixCache`` or ``Speculation``.
        config: Fields of ``Config`` for this model.
        adapters: Folders of LoRA adapters, by name.
        tool_format: Format of tool calls; None for that of the chat template.
        reasoning_format: Format of reasoning; None for that of the chat template.
        response_template: Whether answers are read by the checkpoint's response template.
        idle_minutes: Minutes without requests after which the model is unloaded; None for never.
        keep_loaded: Whether the model is loaded at the start, and never unloaded for another one.
    """

    name: str
    path: str
    embed: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    tool_format: str | None = None
    reasoning_format: str | None = None
    response_template: bool = False
    idle_minutes: float | None = None
    keep_loaded: bool = False

    def check(self) -> None:
        """Check what can be checked without reading the model.

        Raises: ConfigError: there is no such folder, a setting is invalid, or one of a model that
            generates text is given for an encoder.
        """
        if not (Path(self.path).exists() or _HUB_NAME.fullmatch(self.path)):
            raise ConfigError(
                f"The model {self.name!r} is at {self.path!r}, which does not exist. "
                "Try: a folder, or a name on the hub, such as Qwen/Qwen3-0.6B"
            )
        if self.idle_minutes is not None and not 0 <= self.idle_minutes < math.inf:
            raise ConfigError(
                f"idle_minutes of {self.name!r} is {self.idle_minutes}, must be at least 0"
            )
        if self.embed:
            self._check_encoder()
            return
        for name, folder in self.adapters.items():
            if not Path(folder).is_dir():
                raise ConfigError(f"The adapter {name!r} is at {folder!r}, which is no folder")
        check_load_options(self._load_arguments())

    def _check_encoder(self) -> None:
        unusable = [
            name
            for name, value in self.options.items()
            if name not in _ENCODER_OPTIONS and value != _LOAD_DEFAULTS.get(name, False)
        ]
        unusable += [name for name in ("adapters", *_FORMATS) if getattr(self, name)]
        if unusable:
            raise ConfigError(
                f"{unusable[0]} is set for {self.name!r}, which is an encoder. Try: without"
            )

    def _load_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``load``, except path, configuration and adapters."""
        import interposer_engine

        arguments = dict(self.options)
        for name, type_name in _TABLES.items():
            if isinstance(table := arguments.get(name), dict):
                try:
                    arguments[name] = getattr(interposer_engine, type_name)(**table)
                except TypeError as error:  # an unknown field
                    raise ConfigError(
                        f"{name} of the model {self.name!r} cannot be used: {error}. "
                        f"Try: the fields of {type_name}"
                    ) from None
        return arguments

    def source(self, policy: Config) -> ModelSource:
        """Return the source from which a server loads the model.

        Args:
            policy: Configuration of all models, which ``config`` overrides.
        Raises: ConfigError: a field of ``config`` is unknown or invalid.
        """
        from interposer_engine import MemoryNeed, load
        from interposer_serve._model_source import ModelSource

        config, arguments = self._config(policy), self._load_arguments()
        return ModelSource(
            name=self.name,
            load=lambda: self.load(policy, load),
            is_encoder=self.embed,
            path=self.path,
            adapters=self.adapters,
            memory=lambda: MemoryNeed.of(self.path, config=config, **arguments),
            idle_seconds=None if self.idle_minutes is None else 60 * self.idle_minutes,
            keep_loaded=self.keep_loaded,
        )

    def load(self, policy: Config, load: Callable[..., LanguageModel]) -> Model:
        """Load the model.

        Args:
            policy: Configuration of all models, which ``config`` overrides.
            load: The function ``load``, or that of ``launched``.
        """
        config, arguments = self._config(policy), self._load_arguments()
        if self.embed:
            from interposer_adapt import load_encoder

            options = {name: arguments[name] for name in _ENCODER_OPTIONS if name in arguments}
            return load_encoder(self.path, config=config, **options)
        model = load(self.path, config=config, adapters=self.adapters, **arguments)
        if any(getattr(self, name) for name in _FORMATS):
            model.tokenizer.chat.use_formats(
                self.tool_format,
                self.reasoning_format,
                response_template=self.response_template,
            )
        return model

    def _config(self, policy: Config) -> Config:
        policy_fields = {name: getattr(policy, name) for name in policy.model_fields_set}
        return Config(**{**policy_fields, **self.config})


_OWN_KEYS = {
    item.name: item.type for item in fields(ModelSettings) if item.name not in ("name", "options")
}
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a text"),
    "str | None": ((str,), "a text"),
    "bool": ((bool,), "true or false"),
    "float | None": ((int, float), "a number"),
    "Mapping[str, str]": ((dict,), "a table of texts"),
    "Mapping[str, Any]": ((dict,), "a table"),
}


@dataclass(frozen=True)
class ModelsFile:
    """Content of a file of models.

    Attributes:
        default: Name of the default model; None if the file has none.
        max_loaded: Number of models that may be loaded at once; None if the file has none.
    """

    models: list[ModelSettings]
    default: str | None = None
    max_loaded: int | None = None

    @classmethod
    def read(cls, file: Path, common: ModelSettings) -> ModelsFile:
        """Read a TOML file with a table ``models.NAME`` for each model.

        Paths in the file are relative to its folder.

        Args:
            common: Settings that hold for each model unless the file has others.
        Raises: ConfigError: the file is not TOML, or a key or value cannot be used.
        """
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
        _check_keys(str(file), content, ("default", "max_loaded", "models"))
        default, max_loaded = content.get("default"), content.get("max_loaded")
        if default is not None and not isinstance(default, str):
            raise ConfigError(f"{file}: default is {default!r}, must be a text")
        if max_loaded is not None and type(max_loaded) is not int:
            raise ConfigError(f"{file}: max_loaded is {max_loaded!r}, must be an integer")
        tables = content.get("models")
        if not isinstance(tables, dict) or not tables:
            raise ConfigError(f"{file} has no model. Try: [models.NAME] with path = 'FOLDER'")
        models = [_model(file, name, table, common) for name, table in tables.items()]
        return cls(models, default, max_loaded)


def _model(file: Path, name: str, table: Any, common: ModelSettings) -> ModelSettings:
    place = f"{file}: models.{name}"
    if not isinstance(table, dict):
        raise ConfigError(f"{place} is {table!r}, must be a table")
    _check_keys(place, table, (*_OWN_KEYS, *_LOAD_DEFAULTS))
    if "path" not in table:
        raise ConfigError(f"{place} has no path. Try: path = 'FOLDER'")
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if key not in _OWN_KEYS:
            continue
        kinds, description = _KINDS[str(_OWN_KEYS[key])]
        is_right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if key == "adapters":
            is_right = is_right and all(isinstance(path, str) for path in value.values())
        if not is_right:
            raise ConfigError(f"{place}.{key} is {value!r}, must be {description}")
        settings[key] = value
    settings["path"] = _relative(file, settings["path"])
    if "adapters" in settings:
        settings["adapters"] = {
            key: _relative(file, path) for key, path in settings["adapters"].items()
        }
    options = {key: value for key, value in table.items() if key in _LOAD_DEFAULTS}
    settings["config"] = {**common.config, **settings.get("config", {})}
    if settings.get("embed") and not common.embed:
        # An encoder takes none of the options that are for the other models.
        common = ModelSettings(
            name="",
            path="",
            options={key: common.options[key] for key in _ENCODER_OPTIONS},
            idle_minutes=common.idle_minutes,
        )
    return replace(common, name=name, options={**common.options, **options}, **settings)


def _relative(file: Path, path: str) -> str:
    """Return a path of a file as seen from the working folder; a name on the hub stays."""
    beside = file.parent / path
    return str(beside) if beside.exists() or not _HUB_NAME.fullmatch(path) else path


def _check_keys(place: str, table: Mapping[str, Any], allowed_keys: Collection[str]) -> None:
    for key in table:
        if key not in allowed_keys:
            allowed = near_names(key, allowed_keys)
            raise ConfigError(f"{place} has the key {key!r}; allowed is {allowed}")
