"""Common storage of fused layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from interposer.errors import ConfigError

T = TypeVar("T")


def stored_alike(
    prefix: str, parts: tuple[str, ...], stored: Callable[[str], T | None], mend: str
) -> T | None:
    """Return the common storage of all layers fused at ``prefix``, None for plain.

    Args:
        stored: how the layer of a full name is stored, by the checkpoint's settings.
        mend: what to do where they differ.
    Raises: ConfigError: they are stored in different ways.
    """
    parent = prefix.rpartition(".")[0]
    names = [f"{parent}.{part}" if parent else part for part in parts]
    found = {name: stored(name) for name in names}
    first = found[names[0]]
    if any(other != first for other in found.values()):
        members = "\n".join(
            f"  {name}: {'not quantized' if how is None else how}" for name, how in found.items()
        )
        raise ConfigError(
            f"{prefix} fuses layers that are quantized in different ways:\n{members}\nTry: {mend}"
        )
    return first
