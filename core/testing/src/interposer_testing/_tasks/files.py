"""Files of tasks and solutions: their bytes, and errors that name file, field and value."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from interposer.errors import ConfigError, near_names

_MAX_VALUE = 80


class Part(BaseModel):
    """A part of a JSON file; unknown fields are ignored, because the formats grow."""

    model_config = ConfigDict(strict=True, frozen=True)


P = TypeVar("P", bound=Part)


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; raise ConfigError if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Check the path.") from error


def parse(model: type[P], content: bytes | str, place: str) -> P:
    """Parse JSON as an instance of the pydantic model ``model``.

    Args:
        place: file, and line if there are several, for errors.
    Raises: ConfigError: the content is invalid; the text names the first invalid field.
    """
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"])) or "the file"
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "missing":
            message = "the field is missing"
        elif fault["type"] == "literal_error" and isinstance(fault["input"], str):
            alternatives = [part.strip(" '") for part in _alternatives(fault["ctx"]["expected"])]
            message = f"unknown; known, nearest first: {near_names(fault['input'], alternatives)}"
        value = repr(fault["input"])
        if not fault["loc"] or fault["type"] == "missing":
            value = ""
        elif len(value) > _MAX_VALUE:
            value = value[:_MAX_VALUE] + "..."
        setting = f"{field} = {value}" if value else field
        raise ConfigError(f"{place}: {setting}: {message}. Correct the file.") from error


def _alternatives(expected: str) -> list[str]:
    return expected.replace(" or ", ", ").split(", ")
