"""Pydantic models of the forms with which clients send speech."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from interposer_serve._errors import ApiError, shown
from interposer_serve._forms import MEDIA_TYPE
from interposer_serve._requests import Body, CacheSalt, Flag

__all__ = ["SpeechBody", "TranscriptionBody", "TranslationBody"]

_FORMATS = "'json', 'text', 'srt', 'verbose_json' or 'vtt'"
_FLAGS = {"true": True, "false": False}


class SpeechBody(Body):
    """Base of the forms with speech."""

    media_type: ClassVar[str] = MEDIA_TYPE

    file: Annotated[bytes, Field(min_length=1)] = Field(description="a file with speech")
    prompt: str = Field("", description="a text")
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = Field(
        "json", description=_FORMATS
    )
    temperature: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="a number from 0 to 1"
    )
    cache_salt: CacheSalt = ""

    @classmethod
    def read(cls, body: dict[str, Any]) -> Self:
        """Validate the fields of a form, whose numbers and flags are texts; see ``Body.read``."""
        fields = dict(body)
        if isinstance(value := fields.get("temperature"), str):
            fields["temperature"] = _number("temperature", value)
        if isinstance(value := fields.get("stream"), str):
            fields["stream"] = _FLAGS.get(value.lower(), value)
        if isinstance(fields.get("file"), str):
            message = "file is a text; allowed is a file. Try: curl -F file=@speech.wav"
            raise ApiError(400, message, param="file", code="invalid_type")
        return super().read(fields)

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of ``TranscriptionOptions``; 0 leaves the default of ``temperature``."""
        chosen = {"temperature": self.temperature} if self.temperature else {}
        return {"prompt": self.prompt, **chosen}

    @property
    def streams(self) -> bool:
        """Whether segments are streamed while later ones are decoded."""
        return False


class TranscriptionBody(SpeechBody):
    """Form of ``/v1/audio/transcriptions``."""

    language: str | None = Field(None, description="a text, such as 'en'")
    timestamp_granularities: Annotated[list[Literal["segment"]], Field(max_length=1)] = Field(
        ["segment"], description="'segment'; times of single words are not computed"
    )
    stream: Flag = False

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of ``TranscriptionOptions``."""
        return {**super().settings, "language": self.language or None, "task": "transcribe"}

    @property
    def streams(self) -> bool:
        """Whether segments are streamed while later ones are decoded.

        Raises: ApiError: the format is not one of those that can be sent in parts.
        """
        if self.stream and self.response_format not in ("json", "text"):
            raise ApiError(
                400,
                f"stream is true, and response_format is {shown(self.response_format)}; "
                "allowed with stream are 'json' and 'text'",
                param="response_format",
                code="not_honoured",
            )
        return self.stream


class TranslationBody(SpeechBody):
    """Form of ``/v1/audio/translations``."""

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of ``TranscriptionOptions``."""
        return {**super().settings, "task": "translate"}


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        message = f"{name} is {shown(text)}; allowed is a number from 0 to 1"
        raise ApiError(400, message, param=name, code="invalid_value") from None
