"""From a model or its directory to a plan: every choice made, no weight read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from interposer._config.config import Config, effective_config
from interposer._contract.errors import ConfigError
from interposer._contract.platform import Placement
from interposer._plugins.registry import current_registry
from interposer._selection.resolver import Resolver


@runtime_checkable
class Planned(Protocol):
    """Whatever was built through a resolver and still holds it."""

    @property
    def resolver(self) -> Resolver:
        """The resolver that made the choices."""
        ...

    @property
    def placement(self) -> Placement:
        """Where it was built for."""
        ...

    @property
    def path(self) -> Path:
        """The directory of the checkpoint."""
        ...


def planned(
    model: str | os.PathLike[str] | Planned,
    config: Config | None = None,
    dtype: str = "auto",
    placement: Placement | None = None,
    quantization: str | Mapping[str, Any] | None = None,
) -> Planned:
    """Return the plan of a model directory; a model that was built already is its own.

    Args:
        model: a directory that an installed plugin can read, or what ``load`` or ``plan`` gave.
        config: policy for the plan, above every other source.
        dtype: to compute in, such as ``"bfloat16"``.
        placement: where to plan for instead of this machine; a built model is planned anew.
        quantization: the method by which plain weights are to be quantized while they load, or
            its settings; None for a built model means the one that it was loaded with.
    Raises: ConfigError: nothing that is installed can plan ``model``.
    """
    if isinstance(model, str | os.PathLike):
        path = Path(model)
    elif placement is None and isinstance(model, Planned):
        return model
    elif isinstance(getattr(model, "path", None), Path):
        path = model.path
        if quantization is None:
            quantization = getattr(model, "quantization", None)
    else:
        raise ConfigError(
            f"{model!r} is neither a model directory nor a model. "
            "Try: a path, or what interposer_models.load returned"
        )
    config = effective_config(config)
    plugins = current_registry(config).plugins
    plan, plugin = plugins.first_result(
        "interposer_plan",
        () if quantization is None else ("quantization",),
        path=path,
        config=config,
        dtype=dtype,
        placement=placement,
        quantization=quantization,
    )
    if plan is not None and not isinstance(plan, Planned):
        raise ConfigError(
            f"The plugin {plugin!r} planned {str(path)!r} as {type(plan).__name__}, "
            f"which lacks a resolver, a placement or a path. Try: INTERPOSER_DISABLE={plugin}"
        )
    if plan is None:
        by = "" if quantization is None else f" and quantizes it by {quantization!r}"
        raise ConfigError(
            f"No installed plugin reads the model directory {str(path)!r}{by}. "
            "Try: pip install interposer-models"
        )
    return plan
