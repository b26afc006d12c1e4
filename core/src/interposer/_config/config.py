"""The policy as data, merged from all of its sources, and the environment.

No other module touches the environment. Nothing is written to it, but what a plugin changed while
it was examined is put back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from interposer._config.rules import (
    AnyNames,
    AnyRule,
    Names,
    Required,
    Rule,
    Rules,
    Settings,
    config_error,
    read_rule,
)
from interposer._config.sources import ConfigFile, read_project_file, read_user_file, read_variables
from interposer._contract.errors import ConfigError, UnknownNameError
from interposer_sandbox import cached

if TYPE_CHECKING:
    from interposer._contract.platform import NumericsPolicy


def _as_text(path: Any) -> Any:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _as_names(plugins: Any) -> Any:
    if plugins == "all":
        return None
    return () if plugins == "none" else plugins


class Config(Settings):
    """The decisions of the user; whatever is unset is left to the selection.

    The keys of rules are a name, ``name@glob`` for the places in the model whose dotted prefix
    matches the glob, ``*`` for all names, or ``*@glob``.

    Attributes:
        platform: rule for the platform to run on.
        kernels: rules by op.
        layers: rules by layer id.
        attention: rules by attention type.
        quantization: rules by quantization method.
        models: rules by architecture.
        communicators: rules by collective.
        require: properties that kernels, attention backends and communicators must promise.
        disable: names of plugins or distributions that are not to be loaded.
        plugins: distributions whose plugins may be loaded; None or ``"all"`` allows every one,
            ``"none"`` none but the SDK's own.
        strict: an unmet preference and a tie raise.
        locked: only what the lock file lists may be loaded.
        canary: whose kernels are compared with the reference before they are bound here first.
        fallback: a kernel that fails at run time is replaced by the next best one.
        emulation: a reference may be chosen that does without the arithmetic its op is meant for.
        dequantize: weights whose op has nothing but its reference here are dequantized once, while
            they load, and multiplied by the op ``linear``, if the memory is there.
        tables: measured figures take part in the selection.
        kv_cache: how keys and values are stored: ``"auto"`` as the checkpoint says, else in the
            model's dtype; ``"int4"`` in 4 bits, which raises where a model's layers cannot.
        graphs: whether decode steps are captured as graphs: ``"auto"`` where the platform can and
            all that is chosen is safe in one, ``"on"`` raises where not, ``"off"``.
        compile: whether torch.compile makes one graph of a model: ``"on"`` by the platform's own
            backend, ``"off"``, or by the backend of that name.
        float32: how products of float32 are computed: ``"highest"`` in float32, ``"high"`` with
            TensorFloat-32 or as three products of bfloat16, ``"medium"`` as one.
        reduce_in_16_bits: partial sums of products of 16 bits may be kept in 16 bits, where the
            platform has such a setting.
        seed: of the device's generators when a model is loaded, and of the noise of requests that
            name no seed of their own; None leaves the generators and draws the noise.
        isolation: whether plugin code is tried in a child process first.
        probe_seconds: how long such a trial may take.
        cache_dir: folder for verdicts, measurements and packed weights; None is the user's cache
            directory.
        packed: weights that kernels packed are mapped from a file, which is kept of large models;
            ``"on"`` keeps it of every model and raises where it cannot be.
        packed_bytes: of all such files in ``cache_dir``; 0 keeps none there.
        weight_check: what loading does with a weight that is NaN or infinite: ``"refuse"`` raises,
            ``"warn"`` logs it, ``"off"`` does not search for one.

    Raises: ConfigError: a key is unknown or a value not usable.
    """

    platform: Annotated[Rule, BeforeValidator(read_rule)] | None = None
    kernels: Rules
    layers: Rules
    attention: Rules
    quantization: Rules
    models: Rules
    communicators: Rules
    require: Required = frozenset()
    disable: Names = frozenset()
    plugins: Annotated[Names | None, BeforeValidator(_as_names)] = None
    strict: bool = False
    locked: bool = False
    canary: Literal["third_party", "all", "off"] = "third_party"
    fallback: bool = False
    emulation: bool = True
    dequantize: bool = True
    tables: bool = True
    kv_cache: Literal["auto", "int4"] = "auto"
    graphs: Literal["auto", "on", "off"] = "auto"
    compile: Annotated[str, Field(min_length=1)] = "off"
    float32: Literal["highest", "high", "medium"] = "highest"
    reduce_in_16_bits: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    isolation: Literal["process", "off"] = "process"
    probe_seconds: Annotated[float, Field(gt=0, le=600, allow_inf_nan=False)] = 5.0
    cache_dir: Annotated[str, Field(min_length=1), BeforeValidator(_as_text)] | None = None
    packed: Literal["auto", "on", "off"] = "auto"
    packed_bytes: Annotated[int, Field(ge=0)] = 32 << 30
    weight_check: Literal["refuse", "warn", "off"] = "refuse"

    if TYPE_CHECKING:  # what is taken for a rule or for names is wider than what is kept

        def __init__(
            self,
            *,
            platform: AnyRule | None = None,
            kernels: Mapping[str, AnyRule] = ...,
            layers: Mapping[str, AnyRule] = ...,
            attention: Mapping[str, AnyRule] = ...,
            quantization: Mapping[str, AnyRule] = ...,
            models: Mapping[str, AnyRule] = ...,
            communicators: Mapping[str, AnyRule] = ...,
            require: AnyNames = ...,
            disable: AnyNames = ...,
            plugins: AnyNames | Literal["all", "none"] | None = None,
            strict: bool = False,
            locked: bool = False,
            canary: Literal["third_party", "all", "off"] = "third_party",
            fallback: bool = False,
            emulation: bool = True,
            dequantize: bool = True,
            tables: bool = True,
            kv_cache: Literal["auto", "int4"] = "auto",
            graphs: Literal["auto", "on", "off"] = "auto",
            compile: str = "off",
            float32: Literal["highest", "high", "medium"] = "highest",
            reduce_in_16_bits: bool = False,
            seed: int | None = None,
            isolation: Literal["process", "off"] = "process",
            probe_seconds: float = 5.0,
            cache_dir: str | os.PathLike[str] | None = None,
            packed: Literal["auto", "on", "off"] = "auto",
            packed_bytes: int = 32 << 30,
            weight_check: Literal["refuse", "warn", "off"] = "refuse",
        ) -> None: ...

    @model_validator(mode="after")
    def _require_what_is_promised(self) -> Config:
        fields = {"layers": self.layers, "quantization": self.quantization, "models": self.models}
        rules = [(f"{name}.{key}", rule) for name in fields for key, rule in fields[name].items()]
        for place, rule in [*rules, ("platform", self.platform)]:
            if rule is not None and rule.require:
                raise ConfigError(
                    f"{place} requires {', '.join(sorted(rule.require))}, but only kernels and "
                    "attention backends promise properties. Try: require it of those"
                )
        return self

    @property
    def numerics(self) -> NumericsPolicy:
        """The numerics of every step of a run; it is seeded once, when the model is loaded."""
        from interposer._contract.platform import NumericsPolicy  # imports torch

        return NumericsPolicy(self.float32, self.reduce_in_16_bits)

    @classmethod
    def refresh(cls) -> Config:
        """Read files and environment again and return the configuration in force.

        Raises: ConfigError: a source holds an unknown key or an unusable value.
        """
        for read in (_below, _user_file, _environment):
            read.forget()
        return effective_config()

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Return the configuration that ``obj`` states.

        Raises: ConfigError: a key is unknown or a value not usable.
        """
        with _own_errors():
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Return the configuration that a JSON text states.

        Raises: ConfigError: it is no JSON, a key is unknown or a value not usable.
        """
        with _own_errors():
            return super().model_validate_json(json_data, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        values = ((name, getattr(self, name)) for name in sorted(self.model_fields_set))
        plain: dict[str, Any] = {n: dict(v) if isinstance(v, Mapping) else v for n, v in values}
        return partial(Config, **plain), ()

    def __deepcopy__(self, _copied: object = None) -> Self:
        return self  # nothing in it can change

    def __hash__(self) -> int:
        fields = (getattr(self, name) for name in Config.model_fields)
        return hash(tuple(frozenset(f.items()) if isinstance(f, Mapping) else f for f in fields))

    def __repr_args__(self) -> Iterable[tuple[str, Any]]:
        """Yield what differs from the default, in the order of the fields."""
        for name, field in Config.model_fields.items():
            value = getattr(self, name)
            if value != field.get_default(call_default_factory=True):
                if isinstance(value, Set):
                    value = sorted(value)
                yield name, dict(value) if isinstance(value, Mapping) else value

    __str__ = BaseModel.__repr__


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a part of the configuration; ``path`` is empty where there is no file."""

    name: Literal["argument", "use()", "project file", "user file", "environment"]
    path: str
    config: Config

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of this source, as plain data that a ``Config`` can be made of again."""
        return self.config.model_dump(mode="json", exclude_unset=True)


_context: ContextVar[tuple[Config, ...]] = ContextVar("interposer_config", default=())


def effective_config(argument: Config | None = None) -> Config:
    """Return the configuration in force.

    Precedence, highest first: argument, ``use(...)`` context, project file, user file, environment.
    Mappings are merged key by key, everything else is replaced. Files and the environment are read
    once in a process, the project file once per working directory; ``Config.refresh()`` reads them
    again. What is wrong in them raises at every call.

    Raises: ConfigError: a source holds an unknown key or an unusable value.
    """
    below, _ = _below(_working_directory())
    above = _context.get() if argument is None else (*_context.get(), _checked(argument))
    return _merged(below, *above) if above else below


def config_sources(argument: Config | None = None) -> list[Source]:
    """Return the sources of the configuration in force, the strongest first.

    A file is listed if it is there, the environment if it sets anything.
    """
    given = [] if argument is None else [Source("argument", "", _checked(argument))]
    used = [Source("use()", "", config) for config in reversed(_context.get())]
    return [*given, *used, *_below(_working_directory())[1]]


@contextmanager
def use(config: Config | None = None, /, **changes: Any) -> Iterator[Config]:
    """Apply a configuration, or single fields of one, inside a ``with`` block.

    Safe in threads and asyncio tasks: a thread sees only the blocks that it entered itself, a
    task also those that it was created in.
    """
    if config is not None and changes:
        raise ConfigError("use() takes a Config or single fields, not both")
    entered = _checked(config) if config is not None else _validated(changes, "use()")
    token = _context.set((*_context.get(), entered))
    try:
        yield effective_config()
    finally:
        _context.reset(token)


@contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        # The constructor is asked within, and what it raises is wrapped.
        inner = error.errors()[0].get("ctx", {}).get("error")
        raise (inner if isinstance(inner, ConfigError) else config_error(error, Config)) from None


def variables() -> MutableMapping[str, str]:
    """Return the variables of the environment by name; the sandbox alone puts some back."""
    return os.environ


def child_environment(**defaults: str) -> dict[str, str]:
    """Return the environment for a child process, with ``defaults`` where it sets nothing."""
    return {**defaults, **os.environ}


def _checked(config: object) -> Config:
    if not isinstance(config, Config):
        raise ConfigError(f"config is {config!r}, must be a Config, as Config(platform='cpu')")
    return config


def _merged(*configs: Config) -> Config:
    """Return the sum of ``configs``, of which the last is the strongest."""
    merged: dict[str, Any] = {}
    for config in configs:
        for name in config.model_fields_set:
            value = getattr(config, name)
            if isinstance(value, Mapping):
                value = {**merged.get(name, {}), **value}
            merged[name] = value
    return Config(**merged)


@cached
def _below(folder: str) -> tuple[Config, tuple[Source, ...]]:
    """Return what files and environment say together, and each, for a working directory."""
    project = _from_file("project file", read_project_file(Path(folder)) if folder else None)
    sources = (*project, *_user_file(), *_environment())
    return _merged(*(source.config for source in reversed(sources))), sources


@cached
def _user_file() -> tuple[Source, ...]:
    return _from_file("user file", read_user_file())


@cached
def _environment() -> tuple[Source, ...]:
    fields = read_variables(variables())
    return (Source("environment", "", _validated(fields, "the environment")),) if fields else ()


def _working_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a Path costs more than all the rest
    except FileNotFoundError:
        return ""  # it was removed, and has no project file


def _from_file(
    name: Literal["project file", "user file"], file: ConfigFile | None
) -> tuple[Source, ...]:
    if file is None:
        return ()
    path, fields = str(file.path), dict(file.fields)
    folder = fields.get("cache_dir")
    if isinstance(folder, str) and folder and not folder.startswith("~"):
        fields["cache_dir"] = str(file.path.parent / folder)  # it counts from where the file is
    return (Source(name, path, _validated(fields, path)),)


def _validated(fields: dict[str, Any], source: str) -> Config:
    try:
        return Config(**fields)
    except UnknownNameError as error:
        kind, where = error.kind, f"{error.where} of {source}"
        if kind == "field":
            kind, where = "key", f"in {source}"
        raise UnknownNameError(kind, error.name, error.known, where=where) from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
