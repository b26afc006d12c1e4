"""Decoding of files by the library soundfile, of formats that are tested with hostile files.

Dimensions: S samples, C channels.
"""

from __future__ import annotations

import ctypes
import io
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from interposer.errors import RequestError, install_command

READABLE = "WAV, FLAC, MP3, Ogg (Vorbis, Opus) or AIFF"
# Names of libsndfile.
_FORMATS = frozenset({"WAV", "WAVEX", "RF64", "FLAC", "MPEG", "MP3", "OGG", "AIFF"})
_MAX_CHANNELS = 64
# Samples that are decoded at once.
_BLOCK_SAMPLES = 1 << 22


def decode_by_soundfile(
    content: bytes, check_duration: Callable[[int, int, int], None]
) -> tuple[Tensor, int]:
    """Return samples ``[C, S]`` float32 and the sampling rate of a file.

    Args:
        check_duration: Raises RequestError for a number of samples of each channel, a sampling
            rate or a number of channels that exceeds the limits. Called before samples are decoded,
            with the numbers that the file states, and afterwards with the real ones.
    Raises: RequestError: the format is not readable, soundfile is not installed, or the file is
        damaged or exceeds the limits.
    """
    if not _is_readable(content):
        raise RequestError(
            f"The audio is not {READABLE}: it starts with {content[:12]!r}. "
            "Try: ffmpeg -i FILE sound.wav"
        )
    try:
        import soundfile
    except ImportError:
        command = install_command("interposer-engine[audio]")
        raise RequestError(
            f"The audio is not a WAV file of integers or floats: it starts with {content[:12]!r}. "
            f"Other formats need the library soundfile. Try: {command}"
        ) from None
    try:
        with _messages_dropped(), soundfile.SoundFile(_Content(content)) as file:
            if file.format not in _FORMATS:
                raise RequestError(f"The audio is a {file.format} file, must be {READABLE}")
            if file.channels > _MAX_CHANNELS:
                raise RequestError(
                    f"The audio has {file.channels} channels, must be 1 to {_MAX_CHANNELS}"
                )
            check_duration(file.frames, file.samplerate, file.channels)
            samples = _read_blocks(file)
            check_duration(samples.shape[1], file.samplerate, file.channels)
            return samples, file.samplerate
    except soundfile.SoundFileError as error:
        # The whole text of the error names an object of Python instead of a file.
        reason = getattr(error, "error_string", str(error))
        raise RequestError(
            f"The audio cannot be decoded: {reason} Try: a complete file in one of the formats "
            f"{READABLE}"
        ) from None


def _is_readable(content: bytes) -> bool:
    """Return whether a file starts as one of the formats; libsndfile reads many more."""
    start, form = content[:4], content[8:12]
    if start in (b"RIFF", b"RF64", b"FORM"):
        return form in (b"WAVE", b"AIFF", b"AIFC")
    # A frame of MP3 starts with eleven bits that are set, often after a tag of ID3.
    is_mp3 = start[:3] == b"ID3" or (start[:1] == b"\xff" and start[1:2] >= b"\xe0")
    return is_mp3 or start in (b"fLaC", b"OggS")


def _read_blocks(file: Any) -> Tensor:
    """Return the samples ``[C, S]`` of an open ``SoundFile``.

    A damaged file can state many more samples than it holds, for which no memory is reserved.
    """
    blocks = [torch.empty(0, file.channels)]
    num_missing = file.frames
    while num_missing > 0:
        num_frames = min(num_missing, _BLOCK_SAMPLES // file.channels)
        block = torch.from_numpy(file.read(num_frames, dtype="float32", always_2d=True))
        if not len(block):
            break
        blocks.append(block)
        num_missing -= len(block)
    return torch.cat(blocks).T


class _Content(io.BytesIO):
    """The content of a file, in which libsndfile can seek to any position."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position; stay for one before the start, to which damaged files lead.

        An exception in this call from C would be printed, and not reach the caller.
        """
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return self.tell()


_drop_lock = threading.Lock()
_num_dropping = 0


@contextmanager
def _messages_dropped() -> Iterator[None]:
    """Drop the messages that C code prints to ``stderr``: libmpg123 writes some for each frame.

    With damaged files, a client could fill the log of a server. Python does not use the stream
    ``stderr`` of the C library, so that no message of Python is lost.
    """
    global _num_dropping
    streams = _error_streams()
    if streams is None:
        yield
        return
    stderr, original, null = streams
    with _drop_lock:
        _num_dropping += 1
        stderr.value = null
    try:
        yield
    finally:
        with _drop_lock:
            _num_dropping -= 1
            if not _num_dropping:
                stderr.value = original


@cache
def _error_streams() -> tuple[ctypes.c_void_p, int | None, int | None] | None:
    """Return glibc's variable ``stderr``, its value, and a stream to /dev/null; else None."""
    if platform.libc_ver()[0] != "glibc":
        return None  # other C libraries do not let programs assign to the variable
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    stderr = ctypes.c_void_p.in_dll(libc, "stderr")
    return stderr, stderr.value, libc.fopen(b"/dev/null", b"w")
