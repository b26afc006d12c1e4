"""An error about a field of config.json, with a hint that repairs the file."""

from __future__ import annotations

UNKNOWN_MEND = "Try: correct the field, or run the model of transformers by interposer_models.adapt"
"""The hint for a value that no layer of this package implements."""


class FieldError(ValueError):
    """A field of config.json has a value that is wrong or not supported.

    Attributes:
        mend: the hint to the user, in the imperative.
    """

    def __init__(self, reason: str, mend: str = "mend the field") -> None:
        super().__init__(reason)
        self.mend = mend
