"""The bounds of what clients may ask for."""

from __future__ import annotations

from dataclasses import dataclass, fields

from interposer.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Bounds on requests.

    Attributes:
        queue: sequences that may wait besides those that run; further ones get 429.
        deadline_seconds: after which a request is ended with an error.
        body_bytes: of a request.
        prompt_tokens: of one prompt; None leaves it to the model's context.
    Raises: ConfigError: one of them is not positive.
    """

    queue: int = 256
    deadline_seconds: float = 600.0
    body_bytes: int = 4 * 2**20
    prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            least = 0 if name == "queue" else 1
            if value is not None and not value >= least:
                raise ConfigError(f"{name} is {value!r}, must be at least {least}")
