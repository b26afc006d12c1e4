"""Stand-in for the parts of a model that was closed: every use raises RequestError."""

from __future__ import annotations

from typing import Any, NoReturn

from interposer.errors import RequestError


def closed_error(name: object) -> RequestError:
    """Create the error for any use of a closed model."""
    return RequestError(f"The model {name} was closed. Try: load it again")


class ClosedModel:
    """Raises RequestError for each use of a model's engine after the model was closed."""

    trouble = "the model was closed"

    def __init__(self, name: object) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        raise closed_error(self._name)

    @classmethod
    def of(cls, name: object) -> Any:
        """Return a stand-in for any part of the closed model with this name."""
        return cls(name)
