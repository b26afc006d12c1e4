"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_gguf._file_format import GGUFFile

CONVERT_AGAIN = "convert the model again"
"""The next action that an error proposes if metadata is wrong."""


class MetadataReader:
    """The metadata of one file, read by key with a check of the type.

    Keys of the model, such as ``block_count``, are given without the prefix of the architecture.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self._values = file.metadata
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return self._key(key) in self._values

    def is_list(self, key: str) -> bool:
        """Return whether the value at ``key`` is a list."""
        return isinstance(self._values.get(self._key(key)), list)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return the integer at ``key``; a list with one integer per layer must have equal values.

        Zeros in a list are ignored unless all values are zero: a layer without attention has no
        heads.
        Raises:
            CheckpointError: the key is missing and has no ``default``, or the value is no integer.
            UnsupportedModelError: the list has different values.
        """
        value = self._get(key, default)
        if isinstance(value, list) and value:
            counts = [count for count in value if count] or value[:1]
            if any(count != counts[0] for count in counts):
                raise UnsupportedModelError(
                    self.path, f"has {self._key(key)!r} that differs between layers"
                )
            value = counts[0]
        # ``type`` and not ``isinstance``: True is an instance of int.
        if type(value) is not int:
            raise self._wrong(key, value, "an integer")
        return value

    def per_layer(self, key: str, kind: type, count: int) -> list[Any]:
        """Return the values at ``key`` for ``count`` layers; a single value applies to all layers.

        Raises: CheckpointError: the key is missing, or has too few values or values of another
            type.
        """
        value = self._get(key, None)
        values = value if isinstance(value, list) else [value] * count
        # The list may be longer: MTP blocks follow the decoder blocks.
        if len(values) < count or not all(type(item) is kind for item in values):
            raise self._wrong(key, value, f"{count} values of the type {kind.__name__}")
        return values[:count]

    def number(self, key: str, default: float | None = None) -> float:
        """Return the finite number at ``key``.

        Raises: CheckpointError: the key is missing and has no ``default``, or the value is no
            number.
        """
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, value, "a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Return the text at ``key``.

        Raises: CheckpointError: the key is missing and has no ``default``, or the value is no text.
        """
        value = self._get(key, default)
        if type(value) is not str:
            raise self._wrong(key, value, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean at ``key``.

        Raises: CheckpointError: the value is no boolean.
        """
        value = self._get(key, default)
        if type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return value

    def list_of(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """Return the list at ``key``; all items must have the type ``kind``.

        Raises: CheckpointError: the key is missing and has no ``default``, or the value is no such
            list.
        """
        value = self._get(key, default)
        if type(value) is not list or not all(type(item) is kind for item in value):
            raise self._wrong(key, value, f"a list of values of the type {kind.__name__}")
        return value

    def _key(self, key: str) -> str:
        is_global = key.startswith(("general.", "tokenizer.", "split."))
        return key if is_global else f"{self.architecture}.{key}"

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(self._key(key), default)
        if value is None:
            raise CheckpointError(
                self.path, f"lacks the metadata {self._key(key)!r}", CONVERT_AGAIN
            )
        return value

    def _wrong(self, key: str, value: object, expected: str) -> CheckpointError:
        # A list may be long, and printing it whole would not help.
        short_value = f"{len(value)} values" if isinstance(value, list) else f"{value!r:.100}"
        return CheckpointError(
            self.path,
            f"has the metadata {self._key(key)!r} = {short_value}, must be {expected}",
            CONVERT_AGAIN,
        )
