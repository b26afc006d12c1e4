"""The choice between the checkpoint's settings of quantization and the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from interposer import Registry
from interposer.errors import CheckpointError, ConfigError, UnknownNameError

ONLINE = "online_"
"""The prefix of ``quant_method`` of a scheme that quantizes plain weights."""

_PLACE = "in quantization_config"

# transformers wrote no quant_method before it knew another one.
_BITSANDBYTES = "bitsandbytes"

TRANSFORMERS_METHOD = "interposer"
"""``quant_method`` of plain weights that are to be quantized while they load, as a folder for
transformers names it; the method itself is the setting ``method``."""


def quantization_settings(
    wanted: str | Mapping[str, Any] | None,
    stored: Mapping[str, Any] | None,
    registry: Registry,
    path: object,
) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` that holds, None for a model of plain weights.

    Args:
        wanted: the method by which weights are to be quantized while they load, or settings with
            its name as ``quant_method``; None for what the checkpoint says.
        stored: what the checkpoint says.
    Raises:
        UnknownNameError: no installed plugin quantizes by that method.
        ConfigError: the checkpoint is quantized by another one already, or no method is named.
        CheckpointError: the checkpoint names no method.
    """
    if stored is not None and stored.get("quant_method") == TRANSFORMERS_METHOD:
        # The weights are plain: whatever is asked for here goes before what the folder asks for.
        asked = {name: value for name, value in stored.items() if name != "method"}
        asked["quant_method"] = stored.get("method")
        wanted, stored = asked if wanted is None else wanted, None
    if wanted is None:
        return None if stored is None else with_method(stored, path)
    settings = {"quant_method": wanted} if isinstance(wanted, str) else dict(wanted)
    method = settings.get("quant_method")
    if not isinstance(method, str):
        raise ConfigError(
            f"quantization is {wanted!r}, must be the name of a method, or settings with the name "
            "as 'quant_method'"
        )
    known = [
        name.removeprefix(ONLINE) for name in registry.subjects("scheme") if name.startswith(ONLINE)
    ]
    if method not in known:
        raise UnknownNameError(
            "method", method, known, where="to quantize weights by while they load"
        )
    if stored is not None:
        present = stored.get("quant_method")
        if present == method and settings.keys() == {"quant_method"}:
            return stored
        raise ConfigError(
            f"{path} is quantized by {present!r} already, so that quantization={wanted!r} has no "
            "plain weights to start from. Try: load it without, or load the original model"
        )
    return {**settings, "quant_method": f"{ONLINE}{method}"}


def with_method(stored: Mapping[str, Any], path: object) -> Mapping[str, Any]:
    """Return the checkpoint's settings, with the method that early releases leave unsaid.

    Raises: CheckpointError: they name no method, and no field tells it.
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
    """Name the file in errors about settings that a checkpoint states, within a ``with`` block.

    Args:
        is_stated: the settings are the checkpoint's, not those of the caller.
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
