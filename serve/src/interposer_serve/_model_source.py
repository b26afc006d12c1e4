"""The class ``ModelSource``: a model of a server, loaded or to be loaded on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from interposer.errors import ConfigError, near_names
from interposer_adapt import Encoder
from interposer_engine import LanguageModel, MemoryNeed
from interposer_serve._endpoints import Endpoints
from interposer_serve._text import TextEndpoints
from interposer_serve._vectors import VectorEndpoints

Model = LanguageModel | Encoder


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model of a server, loaded already or to be loaded when a request names it.

    Attributes:
        name: Name of the model for clients.
        model: The model, if it is loaded already. The server never unloads it.
        load: Loads the model, in any thread; None if ``model`` is given.
        is_encoder: Whether ``load`` returns an ``Encoder``.
        path: Folder of the checkpoint. Errors for clients show ``name`` instead of it.
        adapters: Folders of the adapters that ``load`` loads with the model, by name.
        memory: Returns the memory that the model needs, in any thread. If that is not free, the
            server unloads other models first. None for unknown.
        idle_seconds: Time without requests after which the model is unloaded; None for never.
        keep_loaded: Whether the model is loaded at the start, and never unloaded for another one.
    Raises: ConfigError: there is no model and no function that loads it, or there are both.
    """

    name: str
    model: Model | None = None
    load: Callable[[], Model] | None = None
    is_encoder: bool = False
    path: str | Path | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    memory: Callable[[], MemoryNeed] | None = None
    idle_seconds: float | None = None
    keep_loaded: bool = False

    def __post_init__(self) -> None:
        if (self.load is None) == (self.model is None):
            number = "neither" if self.load is None else "both"
            raise ConfigError(
                f"The model {self.name!r} has {number} of model and load. Try: one of them"
            )

    @property
    def kind(self) -> type[Endpoints]:
        """Type of the model's endpoints."""
        is_encoder = self.is_encoder or isinstance(self.model, Encoder)
        return VectorEndpoints if is_encoder else TextEndpoints


def check_sources(
    sources: Sequence[ModelSource], default: str | None, max_loaded: int | None
) -> None:
    """Check the models of a server together.

    Args:
        default: Name of the default model; None for the first.
        max_loaded: Number of models that may be loaded at once; None for no limit.
    Raises: ConfigError: there is no model, two models or adapters have the same name, ``default``
        names no model, or more models stay loaded than may be loaded at once.
    """
    if not sources:
        raise ConfigError("There is no model to serve. Try: at least one ModelSource")
    if not all(source.name for source in sources):
        raise ConfigError("A model has an empty name. Try: name='NAME'")
    counts = Counter(name for source in sources for name in (source.name, *source.adapters))
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(
            f"Two models or adapters are called {repeated[0]!r}. Try: another name for one of them"
        )
    names = [source.name for source in sources]
    if default is not None and default not in names:
        allowed = near_names(default, names)
        raise ConfigError(f"The default model is {default!r}; allowed is {allowed}")
    if max_loaded is None:
        return
    if max_loaded < 1:
        raise ConfigError(f"max_loaded is {max_loaded!r}, must be at least 1")
    num_staying = sum(source.keep_loaded or source.load is None for source in sources)
    if num_staying + (num_staying < len(sources)) > max_loaded:
        raise ConfigError(
            f"{num_staying} models stay loaded, but max_loaded is {max_loaded}, which leaves no "
            "place for the others. Try: a larger max_loaded"
        )
