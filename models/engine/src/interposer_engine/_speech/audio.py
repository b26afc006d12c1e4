"""Reading of sounds: WAV files by this module, other files by ``soundfile_decoder``.

Dimensions: S samples, C channels.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interposer.errors import RequestError
from interposer_engine._speech.resampling import resample
from interposer_engine._speech.soundfile_decoder import decode_by_soundfile

Audio = str | Path | bytes | Sequence[float] | Any
"""A sound: a file's path or content, or samples as a list, an array or a tensor."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_MAX_RATE = 768_000
_MAX_CHANNELS = 64
_READ_BYTES = 1 << 20
# Samples of full scale are from -1 to 1. The power of much larger ones would overflow.
_MAX_SAMPLE = float(2**32)


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """Largest sound that is read.

    Attributes:
        num_bytes: Bytes of a file.
        seconds: Duration, which is known before the samples are decoded.
        num_samples: Samples of all channels of a file. Each takes 4 bytes while it is decoded, and
            a small file can state many of them.
    """

    num_bytes: int = 2**32
    seconds: float = 24 * 3600.0
    num_samples: int = 2**34

    def check_bytes(self, num_bytes: int) -> None:
        """Raise RequestError if a file is too large."""
        if num_bytes > self.num_bytes:
            raise RequestError(
                f"The audio file has {num_bytes:,} bytes, the limit is {self.num_bytes:,}. "
                "Try: a compressed format, or several shorter files"
            )

    def check_duration(self, num_samples: int, sampling_rate: int, channels: int = 1) -> None:
        """Raise RequestError if a sound is empty, too long, or has an unusable sampling rate.

        Args:
            num_samples: Samples of each channel.
        """
        if not 0 < sampling_rate <= _MAX_RATE:
            raise RequestError(
                f"The sampling rate of the audio is {sampling_rate}, must be from 1 to "
                f"{_MAX_RATE:,} samples per second"
            )
        if not num_samples:
            raise RequestError("The audio holds no samples. Try: a sound of at least one sample")
        if num_samples > self.seconds * sampling_rate:
            raise RequestError(
                f"The audio lasts {num_samples / sampling_rate:,.0f} seconds, the limit is "
                f"{self.seconds:,.0f}. Try: several shorter files"
            )
        if num_samples * channels > self.num_samples:
            raise RequestError(
                f"The audio holds {num_samples * channels:,} samples, the limit is "
                f"{self.num_samples:,}. Try: one channel of 16,000 samples per second"
            )


NO_LIMITS = AudioLimits()


def read_audio(
    audio: Audio,
    sampling_rate: int | None,
    target_rate: int,
    limits: AudioLimits = NO_LIMITS,
) -> Tensor:
    """Return a sound as one channel of samples, ``[S]`` float32, about -1 to 1.

    Args:
        audio: The path or the content of a file, or samples ``[S]`` or ``[C, S]``.
        sampling_rate: Samples per second of ``audio``, if it holds samples.
        target_rate: Samples per second of the result.
    Raises: RequestError: the sound cannot be read, is empty, exceeds the limits, or holds NaN or
        huge samples.
    """
    if isinstance(audio, str | Path | bytes | bytearray | memoryview):
        if sampling_rate is not None:
            raise RequestError(
                f"sampling_rate is {sampling_rate!r}, but the audio is a file, which states its "
                "own. Try: leave sampling_rate out"
            )
        content = _content(audio, limits)
        if not content:
            raise RequestError("The audio is an empty file, of 0 bytes. Try: a complete file")
        samples, sampling_rate = _decode(content, limits)
    else:
        samples = _samples(audio)
        if type(sampling_rate) is not int:
            raise RequestError(
                f"sampling_rate is {sampling_rate!r}, must be the integer number of samples per "
                "second. Try: transcribe(samples, sampling_rate=16000)"
            )
        limits.check_duration(samples.shape[-1], sampling_rate)
    if not samples.abs().le(_MAX_SAMPLE).all():
        raise RequestError(
            "The audio holds samples that are NaN or infinite, or larger than 2**32. "
            "Try: samples from -1 to 1"
        )
    return resample(samples.mean(0), sampling_rate, target_rate)


def _content(audio: str | Path | bytes | bytearray | memoryview, limits: AudioLimits) -> bytes:
    if not isinstance(audio, str | Path):
        limits.check_bytes(len(audio))
        return bytes(audio)
    path = Path(audio)
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise _unreadable(audio, "it is a folder, a device or a socket")
        limits.check_bytes(path.stat().st_size)
        # Counted while it is read: a pipe states no size, and can be endless.
        blocks: list[bytes] = []
        num_bytes = 0
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                blocks.append(block)
                num_bytes += len(block)
                limits.check_bytes(num_bytes)
        return b"".join(blocks)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        if isinstance(error, RequestError):
            raise
        raise _unreadable(audio, getattr(error, "strerror", None) or str(error)) from None


def _unreadable(audio: str | Path, reason: str) -> RequestError:
    return RequestError(
        f"The audio file {str(audio)!r:.200} cannot be read: {reason}. "
        "Try: the path of a sound file on this machine"
    )


def _samples(audio: Any) -> Tensor:
    """Return given samples as ``[C, S]`` float32."""
    try:
        samples = torch.as_tensor(audio).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(
            f"audio is a {type(audio).__name__}, must be a path, the bytes of a file, or samples: "
            f"{error}"
        ) from None
    if samples.ndim not in (1, 2) or not samples.is_floating_point():
        raise RequestError(
            f"audio holds {samples.dtype} of the shape {[*samples.shape]}, must be floating-point "
            "samples [S] or [channels, S]. Try: divide 16-bit integers by 32768"
        )
    channels = samples if samples.ndim == 2 else samples[None]
    if not 0 < len(channels) <= _MAX_CHANNELS:
        raise RequestError(
            f"audio has the shape {[*samples.shape]}, [channels, S], and so {len(channels)} "
            f"channels, must be 1 to {_MAX_CHANNELS}. Try: audio.T for [S, channels]"
        )
    return channels.to(torch.float32)


def _decode(content: bytes, limits: AudioLimits) -> tuple[Tensor, int]:
    """Return samples ``[C, S]`` and the sampling rate of a file."""
    if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
        decoded = _decode_wave(content, limits)
        if decoded is not None:
            return decoded
    return decode_by_soundfile(content, limits.check_duration)


def _decode_wave(content: bytes, limits: AudioLimits) -> tuple[Tensor, int] | None:
    """Return samples ``[C, S]`` and the sampling rate of a WAV file; None for a rare encoding."""
    encoding = channels = rate = bits = 0
    position = 12
    while position + 8 <= len(content):
        kind, size = struct.unpack_from("<4sI", content, position)
        position += 8
        if kind == b"fmt ":
            if size < 16 or position + size > len(content):
                raise RequestError("The WAV file is damaged: its format is cut off")
            encoding, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", content, position)
            if encoding == _EXTENSIBLE and size >= 26:
                # The first two bytes of the sub-format are the encoding.
                (encoding,) = struct.unpack_from("<H", content, position + 24)
        elif kind == b"data":
            break
        position += size + size % 2
    else:
        raise RequestError("The WAV file is damaged: it holds no samples")
    if (encoding, bits) not in _READERS:
        return None
    if not 0 < channels <= _MAX_CHANNELS:
        raise RequestError(f"The WAV file states {channels} channels, must be 1 to {_MAX_CHANNELS}")
    frame_bytes = channels * bits // 8
    # A program that writes to a pipe states no size, or the largest one.
    num_frames = min(size or 2**32, len(content) - position) // frame_bytes
    limits.check_duration(num_frames, rate, channels)
    stored = content[position : position + num_frames * frame_bytes]
    samples = _READERS[encoding, bits](stored)
    return samples.view(num_frames, channels).T, rate


def _integers(stored: bytes, dtype: torch.dtype) -> Tensor:
    numbers = torch.frombuffer(bytearray(stored), dtype=dtype)
    return numbers.to(torch.float32) / float(2 ** (8 * dtype.itemsize - 1))


def _unsigned_bytes(stored: bytes) -> Tensor:
    return torch.frombuffer(bytearray(stored), dtype=torch.uint8).to(torch.float32) / 128 - 1


def _three_bytes(stored: bytes) -> Tensor:
    parts = torch.frombuffer(bytearray(stored), dtype=torch.uint8).view(-1, 3).to(torch.int32)
    # Shifted into the high bytes of 32 bits, so that the sign is in its place.
    numbers = (parts[:, 0] << 8) | (parts[:, 1] << 16) | (parts[:, 2] << 24)
    return numbers.to(torch.float32) / float(2**31)


def _floats(stored: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(stored), dtype=dtype).to(torch.float32)


_READERS: dict[tuple[int, int], Any] = {
    (_PCM, 8): _unsigned_bytes,
    (_PCM, 16): lambda stored: _integers(stored, torch.int16),
    (_PCM, 24): _three_bytes,
    (_PCM, 32): lambda stored: _integers(stored, torch.int32),
    (_FLOAT, 32): lambda stored: _floats(stored, torch.float32),
    (_FLOAT, 64): lambda stored: _floats(stored, torch.float64),
}
