"""The choice between the checkpoint's settings of quantization and the user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer import Registry
from interposer.errors import ConfigError, UnknownNameError

ONLINE = "online_"
"""The prefix of ``quant_method`` of a scheme that quantizes plain weights."""

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
    """
    if stored is not None and stored.get("quant_method") == TRANSFORMERS_METHOD:
        # The weights are plain: whatever is asked for here goes before what the folder asks for.
        asked = {name: value for name, value in stored.items() if name != "method"}
        asked["quant_method"] = stored.get("method")
        wanted, stored = asked if wanted is None else wanted, None
    if wanted is None:
        return stored
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
