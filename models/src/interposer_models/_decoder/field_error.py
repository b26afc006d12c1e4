"""A field of config.json that is refused together with the way to mend it."""

from __future__ import annotations

UNKNOWN_MEND = "Try: correct the field, or run the model of transformers by interposer_models.adapt"
"""The hint beside a value that no layer here computes."""


class FieldError(ValueError):
    """A field of config.json cannot be computed with.

    Attributes:
        mend: what to do about it.
    """

    def __init__(self, reason: str, mend: str = "mend the field") -> None:
        super().__init__(reason)
        self.mend = mend
