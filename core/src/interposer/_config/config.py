"""The configuration, merged from all sources, and access to the environment.

No other module accesses the environment. The environment is never written, except to undo a
plugin's changes after an examination.
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
    """The user's settings; the selection decides everything that is unset.

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
        disable: names of plugins or distributions that must not be loaded.
        plugins: distributions whose plugins may be loaded; None or ``"all"`` allows every plugin,
            ``"none"`` only the SDK's own plugins.
        strict: an unmet preference or a tie raises.
        locked: load only distributions that the lock file lists.
        canary: scope of the canary, which compares kernels with the reference before the first use.
        fallback: replace a kernel that fails at run time by the next best one.
        emulation: allow references without the arithmetic that the op is meant for.
        dequantize: if the op of a quantized weight has only a reference here, dequantize the weight
            once, while loading, and use the op ``linear``, if memory suffices.
        tables: use measured run times in the selection.
        kv_cache: format of stored keys and values: ``"auto"`` follows the checkpoint, or else the
            model's dtype; ``"fp8"`` uses float8_e4m3fn without scales and ``"int4"`` 4 bits, and
            both raise if a layer of the model cannot.
        graphs: capture of decode steps as graphs: ``"auto"`` captures if the platform can and
            everything chosen is safe, ``"on"`` raises if not, ``"off"``.
        compile: use of torch.compile, with one graph per model: ``"on"`` uses the platform's own
            backend, ``"off"`` none, any other name that backend.
        float32: arithmetic of float32 matmuls: ``"highest"`` is float32, ``"high"`` is
            TensorFloat-32 or three bfloat16 matmuls, ``"medium"`` is one bfloat16 matmul.
        reduce_in_16_bits: allow 16-bit partial sums in 16-bit matmuls, if the platform has such a
            setting.
        seed: for the device's generators when a model is loaded, and for the noise of requests
            without a seed; None leaves the generators unchanged and uses random noise.
        isolation: whether plugin code is examined in a child process first.
        probe_seconds: time limit of each stage of such an examination.
        cache_dir: folder for verdicts, measurements and packed weights; None is the user's cache
            directory.
        packed: map packed weights of kernels from a file, which ``"auto"`` stores for large models;
            ``"on"`` stores the file for every model, and raises on failure.
        packed_bytes: size limit of all such files in ``cache_dir``; 0 stores none.
        weight_check: reaction of the loader to a weight that is NaN or infinite: ``"refuse"``
            raises, ``"warn"`` logs the weight, ``"off"`` does not check.

    Raises: ConfigError: a key is unknown or a value cannot be used.
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
    kv_cache: Literal["auto", "fp8", "int4"] = "auto"
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

    if TYPE_CHECKING:  # the constructor accepts wider types than the fields store

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
            kv_cache: Literal["auto", "fp8", "int4"] = "auto",
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
        """Numerics of every step; the random seed is set once, when the model is loaded."""
        from interposer._contract.platform import NumericsPolicy  # imports torch

        return NumericsPolicy(self.float32, self.reduce_in_16_bits)

    @classmethod
    def refresh(cls) -> Config:
        """Read files and environment again, and return the effective configuration.

        Raises: ConfigError: a source holds an unknown key or an unusable value.
        """
        # The merged result last: another thread may merge old sources until all are forgotten.
        for cached_reader in (_user_file, _environment, _external_config):
            cached_reader.forget()
        return effective_config()

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Validate ``obj`` as a configuration.

        Raises: ConfigError: a key is unknown or a value cannot be used.
        """
        with _converting_errors():
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Validate a JSON text as a configuration.

        Raises: ConfigError: the text is not JSON, a key is unknown or a value cannot be used.
        """
        with _converting_errors():
            return super().model_validate_json(json_data, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        # Mappings are MappingProxyType, which cannot be pickled.
        values = ((name, getattr(self, name)) for name in sorted(self.model_fields_set))
        plain: dict[str, Any] = {n: dict(v) if isinstance(v, Mapping) else v for n, v in values}
        return partial(Config, **plain), ()

    def __deepcopy__(self, _copied: object = None) -> Self:
        return self  # immutable

    def __hash__(self) -> int:
        # pydantic's own hash fails on mappings.
        fields = (getattr(self, name) for name in Config.model_fields)
        return hash(tuple(frozenset(f.items()) if isinstance(f, Mapping) else f for f in fields))

    def __repr_args__(self) -> Iterable[tuple[str, Any]]:
        """Yield the fields with a value other than the default, in order."""
        for name, field in Config.model_fields.items():
            value = getattr(self, name)
            if value != field.get_default(call_default_factory=True):
                if isinstance(value, Set):
                    value = sorted(value)
                yield name, dict(value) if isinstance(value, Mapping) else value

    __str__ = BaseModel.__repr__


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a part of the configuration; ``path`` is empty if there is no file."""

    name: Literal["argument", "use()", "project file", "user file", "environment"]
    path: str
    config: Config

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that this source sets, as plain data that ``Config`` accepts."""
        return self.config.model_dump(mode="json", exclude_unset=True)


_context: ContextVar[tuple[Config, ...]] = ContextVar("interposer_config", default=())


def effective_config(argument: Config | None = None) -> Config:
    """Return the configuration in effect, merged from argument, ``use(...)``, files, environment.

    Precedence, highest first: argument, ``use(...)`` context, project file, user file, environment.
    Mappings are merged key by key, everything else is replaced. Files and the environment are read
    once per process, the project file once per working directory; ``Config.refresh()`` reads both
    again. An error in a source raises at every call.

    Raises: ConfigError: a source holds an unknown key or an unusable value.
    """
    external, _ = _external_config(_working_directory())
    overrides = _context.get() if argument is None else (*_context.get(), _check_type(argument))
    return _merge(external, *overrides) if overrides else external


def config_sources(argument: Config | None = None) -> list[Source]:
    """Return the sources of the effective configuration, the strongest first.

    Only existing files are listed, and only an environment that sets a field.
    """
    argument_sources = [] if argument is None else [Source("argument", "", _check_type(argument))]
    context_sources = [Source("use()", "", config) for config in reversed(_context.get())]
    return [*argument_sources, *context_sources, *_external_config(_working_directory())[1]]


@contextmanager
def use(config: Config | None = None, /, **changes: Any) -> Iterator[Config]:
    """Apply a configuration, or single fields of one, inside a ``with`` block.

    Safe in threads and asyncio tasks: a thread sees only blocks entered in that thread, a task also
    blocks around its creation.
    """
    if config is not None and changes:
        raise ConfigError("use() takes a Config or single fields, not both")
    entered = _check_type(config) if config is not None else _validate(changes, "use()")
    token = _context.set((*_context.get(), entered))
    try:
        yield effective_config()
    finally:
        _context.reset(token)


@contextmanager
def _converting_errors() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        # pydantic calls the constructor for nested values, and wraps our errors in its own.
        inner = error.errors()[0].get("ctx", {}).get("error")
        raise (inner if isinstance(inner, ConfigError) else config_error(error, Config)) from None


def variables() -> MutableMapping[str, str]:
    """Return the environment variables; only the sandbox writes variables, to undo changes."""
    return os.environ


def child_environment(**defaults: str) -> dict[str, str]:
    """Return the environment for a child process; ``defaults`` apply to variables not yet set."""
    return {**defaults, **os.environ}


def _check_type(config: object) -> Config:
    if not isinstance(config, Config):
        raise ConfigError(f"config is {config!r}, must be a Config, as Config(platform='cpu')")
    return config


def _merge(*configs: Config) -> Config:
    """Merge ``configs`` field by field; a later configuration overrides an earlier one."""
    # Only fields that were set take part, so that a default never overrides a weaker source.
    merged: dict[str, Any] = {}
    for config in configs:
        for name in config.model_fields_set:
            value = getattr(config, name)
            if isinstance(value, Mapping):
                value = {**merged.get(name, {}), **value}
            merged[name] = value
    return Config(**merged)


@cached
def _external_config(folder: str) -> tuple[Config, tuple[Source, ...]]:
    """Merge the configuration of files and environment for a folder; return the sources too."""
    project = _from_file("project file", read_project_file(Path(folder)) if folder else None)
    sources = (*project, *_user_file(), *_environment())
    return _merge(*(source.config for source in reversed(sources))), sources


@cached
def _user_file() -> tuple[Source, ...]:
    return _from_file("user file", read_user_file())


@cached
def _environment() -> tuple[Source, ...]:
    fields = read_variables(variables())
    return (Source("environment", "", _validate(fields, "the environment")),) if fields else ()


def _working_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a Path takes longer than the lookup itself
    except FileNotFoundError:
        return ""  # the folder was removed, so it has no project file


def _from_file(
    name: Literal["project file", "user file"], file: ConfigFile | None
) -> tuple[Source, ...]:
    if file is None:
        return ()
    path, fields = str(file.path), dict(file.fields)
    folder = fields.get("cache_dir")
    if isinstance(folder, str) and folder and not folder.startswith("~"):
        fields["cache_dir"] = str(file.path.parent / folder)  # relative to the file's folder
    return (Source(name, path, _validate(fields, path)),)


def _validate(fields: dict[str, Any], source: str) -> Config:
    try:
        return Config(**fields)
    except UnknownNameError as error:
        # For users of files and variables, fields are "keys".
        kind, where = error.kind, f"{error.where} of {source}"
        if kind == "field":
            kind, where = "key", f"in {source}"
        raise UnknownNameError(kind, error.name, error.known, where=where) from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
