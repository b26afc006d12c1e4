"""Check that layers to be fused have one storage format."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from interposer.errors import ConfigError

T = TypeVar("T")


def stored_alike(
    prefix: str, parts: tuple[str, ...], stored: Callable[[str], T | None], mend: str
) -> T | None:
    """Return the common storage format of the layers fused at ``prefix``; None if unquantized.

    Args:
        stored: function from a layer's full name to its storage, or None if not quantized.
        mend: advice for the error message if the storages differ.
    Raises: ConfigError: the fused layers are stored in different ways.
    """
    # The checkpoint has only the names of the parts, not the name of the fused layer.
    parent = prefix.rpartition(".")[0]
    names = [f"{parent}.{part}" if parent else part for part in parts]
    storage_by_name = {name: stored(name) for name in names}
    first = storage_by_name[names[0]]
    if any(storage != first for storage in storage_by_name.values()):
        members = "\n".join(
            f"  {name}: {'not quantized' if storage_or_none is None else storage_or_none}"
            for name, storage_or_none in storage_by_name.items()
        )
        raise ConfigError(
            f"{prefix} fuses layers that are quantized in different ways:\n{members}\nTry: {mend}"
        )
    return first
