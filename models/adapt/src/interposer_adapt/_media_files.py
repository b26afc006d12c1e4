"""Reading of the files of pictures and sounds, with a limit on their size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from interposer.errors import RequestError, described


def read_bytes(content: Any, place: str, max_bytes: int, *, types: str, advice: str) -> bytes:
    """Return the content of a file.

    Args:
        content: a path, or the content itself.
        place: name of the medium in errors.
        max_bytes: size above which the file is refused.
        types: allowed types of ``content``, for errors.
        advice: remedy for a large file, for errors.
    Raises: RequestError: the content is of another type, cannot be read, or is too large.
    """
    if isinstance(content, Path):
        content = _read_file(content, place, max_bytes, advice)
    if not isinstance(content, bytes | bytearray | memoryview):
        raise RequestError(
            f"{place} is of the type {type(content).__name__}, must be {types}. "
            "Try: Path(name).read_bytes()"
        )
    _check_size(len(content), place, max_bytes, advice)
    return bytes(content)


def _read_file(path: Path, place: str, max_bytes: int, advice: str) -> bytes:
    try:
        # The size first: a device file or a pipe could be endless.
        if not path.is_file():
            reason = "is not a file" if path.exists() else "does not exist"
            raise RequestError(
                f"{place} is {str(path)!r:.200}, which {reason}. "
                "Try: the path of a file on this machine"
            )
        _check_size(path.stat().st_size, place, max_bytes, advice)
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{place} cannot be read: {described(error)[:200]}") from error


def _check_size(num_bytes: int, place: str, max_bytes: int, advice: str) -> None:
    if num_bytes > max_bytes:
        raise RequestError(
            f"{place} has {num_bytes} bytes, at most {max_bytes} are accepted. Try: {advice}"
        )
