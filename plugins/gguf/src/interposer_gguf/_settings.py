"""The metadata of a GGUF file, whose values are asked for by key and kind."""

from __future__ import annotations

import math
from typing import Any

from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_gguf._file_format import GGUFFile

EDITED = "convert the model again"
"""The next action where metadata is wrong."""


class Settings:
    """Metadata of one file, of which values are asked for by key and kind."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self._values = file.metadata
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return self._key(key) in self._values

    def is_list(self, key: str) -> bool:
        """Say whether there are several values."""
        return isinstance(self._values.get(self._key(key)), list)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer; a list of equal ones, as one per layer, is that one.

        Zeros in such a list are layers without what is counted, unless there is nothing else.
        Raises: CheckpointError: there is none and no ``default``, or it is something else.
        """
        value = self._get(key, default)
        if isinstance(value, list) and value:
            counts = [count for count in value if count] or value[:1]
            if any(count != counts[0] for count in counts):
                raise UnsupportedModelError(
                    self.path, f"has {self._key(key)!r} that differs between layers"
                )
            value = counts[0]
        if type(value) is not int:
            raise self._wrong(key, value, "an integer")
        return value

    def of_layers(self, key: str, kind: type, count: int) -> list[Any]:
        """Return a value for each of ``count`` layers; one that is no list is that of all.

        Raises: CheckpointError: there is none, it is something else, or of other layers.
        """
        value = self._get(key, None)
        values = value if isinstance(value, list) else [value] * count
        # Blocks behind the others predict further tokens.
        if len(values) < count or not all(type(item) is kind for item in values):
            raise self._wrong(key, value, f"{count} values of the type {kind.__name__}")
        return values[:count]

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number.

        Raises: CheckpointError: there is none and no ``default``, or it is something else.
        """
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, value, "a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text.

        Raises: CheckpointError: there is none and no ``default``, or it is something else.
        """
        value = self._get(key, default)
        if type(value) is not str:
            raise self._wrong(key, value, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return whether something is so.

        Raises: CheckpointError: the value is something else.
        """
        value = self._get(key, default)
        if type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return value

    def several(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """Return a list of values of one type.

        Raises: CheckpointError: there is none and no ``default``, or it is something else.
        """
        value = self._get(key, default)
        if type(value) is not list or not all(type(item) is kind for item in value):
            raise self._wrong(key, value, f"a list of values of the type {kind.__name__}")
        return value

    def _key(self, key: str) -> str:
        whole = key.startswith(("general.", "tokenizer.", "split."))
        return key if whole else f"{self.architecture}.{key}"

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(self._key(key), default)
        if value is None:
            raise CheckpointError(self.path, f"lacks the metadata {self._key(key)!r}", EDITED)
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> CheckpointError:
        # A list may be long, and printing it whole would not help.
        shown = f"{len(value)} values" if isinstance(value, list) else f"{value!r:.100}"
        return CheckpointError(
            self.path, f"has the metadata {self._key(key)!r} = {shown}, must be {wanted}", EDITED
        )
