"""The bounds of what clients may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from interposer.errors import ConfigError
from interposer_models import ConstraintLimits


class _Checked:
    """A dataclass of numbers that are positive."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            least = 0 if each.name == "queue" else 1
            if isinstance(value, int) and value < least:
                raise ConfigError(f"{each.name} is {value!r}, must be at least {least}")
            if isinstance(value, float) and not value > 0:
                raise ConfigError(f"{each.name} is {value!r}, must be positive")


@dataclass(frozen=True)
class Limits(_Checked):
    """Bounds on requests.

    Attributes:
        queue: sequences that may wait besides those that run; further ones get 429.
        deadline_seconds: after which a request is ended with an error, whatever it waits for.
        body_bytes: of a request.
        prompt_tokens: of one prompt; None leaves it to the model's context.
        body_seconds: in which a body has to come.
        all_bodies_bytes: of bodies that are being read at once; further ones get 503.
        template_seconds: that writing a chat as a prompt may take.
        constraints: bounds on forms of answers, which a process of its own compiles first; None
            compiles them in this process alone, for clients that are trusted with its life.
    Raises: ConfigError: one of them is not positive.
    """

    queue: int = 256
    deadline_seconds: float = 600.0
    body_bytes: int = 4 * 2**20
    prompt_tokens: int | None = None
    body_seconds: float = 60.0
    all_bodies_bytes: int = 256 * 2**20
    template_seconds: float = 10.0
    constraints: ConstraintLimits | None = field(default_factory=ConstraintLimits)


@dataclass(frozen=True)
class ConnectionLimits(_Checked):
    """Bounds on connections, whoever makes them.

    Attributes:
        connections: that are open at once; further ones are closed at once.
        connections_per_address: of these, from one address.
        header_bytes: of a request before its body.
        header_seconds: in which they have to come, from when the connection or the request began;
            and for which a body that nobody wants any more is thrown away before the end.
        idle_seconds: that a connection may wait for its next request, or for its client to take
            what was sent.
    Raises: ConfigError: one of them is not positive.
    """

    connections: int = 1024
    connections_per_address: int = 256
    header_bytes: int = 32 * 2**10
    header_seconds: float = 10.0
    idle_seconds: float = 30.0
