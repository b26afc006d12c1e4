"""Choice between the checkpoint's own quantization and quantization that the user requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from interposer import Registry
from interposer.errors import CheckpointError, ConfigError, UnknownNameError

ONLINE = "online_"
"""Prefix of the ``quant_method`` of schemes that quantize plain weights."""

_PLACE = "in quantization_config"

# Early releases of transformers wrote no quant_method, because there was only this one.
_BITSANDBYTES = "bitsandbytes"

TRANSFORMERS_METHOD = "interposer"
"""``quant_method`` in folders for transformers whose plain weights are quantized at loading.
The setting ``method`` names the actual method."""


def quantization_settings(
    requested: str | Mapping[str, Any] | None,
    stored: Mapping[str, Any] | None,
    registry: Registry,
    path: object,
) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` to use; None for a model of unquantized weights.

    Args:
        requested: Method of online quantization, or settings with its name as ``quant_method``;
            None for the checkpoint's own quantization.
        stored: ``quantization_config`` of the checkpoint.
    Raises:
        UnknownNameError: no installed plugin quantizes by that method.
        ConfigError: the checkpoint is quantized by another method already, or no method is named.
        CheckpointError: the checkpoint names no method.
    """
    if stored is not None and stored.get("quant_method") == TRANSFORMERS_METHOD:
        # The weights are plain: the caller's request has priority over the folder's.
        folder_settings = {name: value for name, value in stored.items() if name != "method"}
        folder_settings["quant_method"] = stored.get("method")
        requested, stored = folder_settings if requested is None else requested, None
    if requested is None:
        return None if stored is None else with_method(stored, path)
    settings = {"quant_method": requested} if isinstance(requested, str) else dict(requested)
    method = settings.get("quant_method")
    if not isinstance(method, str):
        raise ConfigError(
            f"quantization is {requested!r}, must be the name of a method, or settings with the "
            "name as 'quant_method'"
        )
    online_methods = [
        name.removeprefix(ONLINE) for name in registry.subjects("scheme") if name.startswith(ONLINE)
    ]
    if method not in online_methods:
        raise UnknownNameError(
            "method", method, online_methods, where="for quantization while loading"
        )
    if stored is not None:
        stored_method = stored.get("quant_method")
        if stored_method == method and settings.keys() == {"quant_method"}:
            return stored
        raise ConfigError(
            f"{path} is quantized by {stored_method!r} already, so quantization="
            f"{requested!r} has no plain weights to start from. Try: load it without, or load the "
            "original model"
        )
    return {**settings, "quant_method": f"{ONLINE}{method}"}


def with_method(stored: Mapping[str, Any], path: object) -> Mapping[str, Any]:
    """Return the checkpoint's settings, with a method name that early releases omitted.

    Raises: CheckpointError: the settings name no method, and no field implies one.
    """
    if stored.get("quant_method") is not None:
        return stored
    if stored.get("load_in_4bit") or stored.get("load_in_8bit"):
        return {**stored, "quant_method": _BITSANDBYTES}
    raise CheckpointError(
        path,
        "has a quantization_config without a quant_method in its config.json",
        "name the method there, such as 'gptq', 'awq' or 'compressed-tensors'",
    )


@contextmanager
def stated_in(source: object, is_stated: bool) -> Iterator[None]:
    """Add the file's name to errors about a checkpoint's settings, within a ``with`` block.

    Args:
        is_stated: Whether the settings are the checkpoint's instead of the caller's.
    Raises: ConfigError: as within the block.
    """
    try:
        yield
    except UnknownNameError as error:
        place = error.where or _PLACE
        if not is_stated or not place.startswith(_PLACE):
            raise
        where = f"{place} of {source}"
        raise UnknownNameError(error.kind, error.name, error.known, error.hint, where) from error
    except ConfigError as error:
        if not is_stated or type(error) is not ConfigError:
            raise
        raise ConfigError(f"{source}: {error}") from error
