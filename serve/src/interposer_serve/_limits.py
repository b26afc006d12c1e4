"""Limits on the size, number and duration of requests and connections."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from interposer.errors import ConfigError
from interposer_engine import ConstraintLimits


class _Checked:
    """Base class that refuses numbers below the minimum."""

    def __post_init__(self) -> None:
        for name in (item.name for item in fields(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            minimum = 0 if name == "queue" else 1  # without a queue, no request waits
            if isinstance(value, int) and value < minimum:
                raise ConfigError(f"{name} is {value!r}, must be at least {minimum}")
            if isinstance(value, float) and not value > 0:
                raise ConfigError(f"{name} is {value!r}, must be positive")


@dataclass(frozen=True)
class Limits(_Checked):
    """Limits on the size, number and duration of HTTP requests.

    Attributes:
        queue: Number of answers that may wait in the queue. Further requests get status 429.
        deadline_seconds: Time of a whole request, in seconds. A longer request ends with an error.
        body_bytes: Size of one request body, in bytes.
        prompt_tokens: Tokens of one prompt. None allows the model's whole context.
        body_seconds: Time to receive a request body, in seconds.
        total_body_bytes: Size of all bodies that are being read, in bytes. Further requests get
            status 503.
        template_seconds: Time to render a chat template, in seconds.
        stored_bytes: Size of the stored responses of all clients of ``/v1/responses``, in bytes.
            The oldest are dropped.
        audio_bytes: Size of a body with an audio file, in bytes.
        audio_seconds: Duration of an audio file or of a sound in a prompt, in seconds.
        audio_samples: Samples of all channels of an audio file. Decoding takes 4 bytes for each.
        constraints: Limits on constraints of answers, which a child process compiles first. None
            compiles them in the server process only. A constraint can then crash the server, so
            use None only if you trust all clients.
        media: Number of pictures and sounds in one request.
        media_bytes: Size of the file of one picture or sound, in bytes.
        media_seconds: Time to fetch a picture or sound from its address, in seconds.
        image_pixels: Size of one picture, in pixels.
        total_media_bytes: Size of the pictures and sounds of all requests whose prompts are being
            prepared, in bytes. Further requests get status 503.
        total_vector_bytes: Size of the encoded pictures and sounds in all unfinished requests, in
            bytes. Further requests get status 503.
    Raises: ConfigError: a limit is not positive.
    """

    queue: int = 256
    deadline_seconds: float = 600.0
    body_bytes: int = 4 * 2**20
    prompt_tokens: int | None = None
    body_seconds: float = 60.0
    total_body_bytes: int = 256 * 2**20
    template_seconds: float = 10.0
    stored_bytes: int = 64 * 2**20
    audio_bytes: int = 25 * 2**20
    audio_seconds: float = 3600.0
    audio_samples: int = 2**29
    constraints: ConstraintLimits | None = field(default_factory=ConstraintLimits)
    media: int = 16
    media_bytes: int = 20 * 2**20
    media_seconds: float = 10.0
    image_pixels: int = 32 * 2**20
    total_media_bytes: int = 256 * 2**20
    total_vector_bytes: int = 4 * 2**30


@dataclass(frozen=True)
class ConnectionLimits(_Checked):
    """Limits on the number, header size and idle time of HTTP connections.

    Attributes:
        connections: Number of open connections. Further connections get status 503.
        connections_per_address: Number of open connections from one client address.
        header_bytes: Size of a request header, in bytes.
        header_seconds: Time to receive a header, in seconds, from the start of the connection or
            from the first byte of a later request. Also the time for which the server reads and
            discards the rest of a refused body before closing the connection.
        idle_seconds: Time in seconds that a connection may wait for its next request, or for its
            client to read the response.
    Raises: ConfigError: a limit is not positive.
    """

    connections: int = 1024
    connections_per_address: int = 256
    header_bytes: int = 32 * 2**10
    header_seconds: float = 10.0
    idle_seconds: float = 30.0
