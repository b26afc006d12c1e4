"""Reading of sounds: files and samples become the features that transformers computes."""

from __future__ import annotations

import io
import math
import os
import struct
import threading
import wave
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperFeatureExtractor

from interposer.errors import RequestError
from interposer_engine._speech.audio import AudioLimits, read_audio
from interposer_engine._speech.features import LogMel
from interposer_engine._speech.resampling import resample

RATE = 16000


def sine(hertz: float, seconds: float, rate: int = RATE) -> torch.Tensor:
    times = torch.arange(round(seconds * rate), dtype=torch.float64) / rate
    return torch.sin(2 * math.pi * hertz * times + 0.3).to(torch.float32) / 2


def wav(samples: torch.Tensor, rate: int = RATE) -> bytes:
    """Return a file of 16-bit samples ``[S]`` or ``[C, S]``."""
    channels = samples.reshape(-1, samples.shape[-1])
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(len(channels))
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((channels.T * 32767).round().to(torch.int16).numpy().tobytes())
    return file.getvalue()


def riff(encoding: int, bits: int, content: bytes, rate: int = RATE, extra: bytes = b"") -> bytes:
    """Return a WAV file of one channel with an odd chunk before its samples."""
    form = struct.pack("<HHIIHH", encoding, 1, rate, rate * bits // 8, bits // 8, bits) + extra
    chunks = b"LIST" + struct.pack("<I", 3) + b"abc\0"
    chunks += b"fmt " + struct.pack("<I", len(form)) + form
    chunks += b"data" + struct.pack("<I", len(content)) + content
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


@pytest.mark.parametrize("num_bins", [80, 128])
def test_features_equal_those_of_transformers(num_bins: int) -> None:
    extractor = WhisperFeatureExtractor(feature_size=num_bins, chunk_length=2)
    log_mel = LogMel(RATE, num_bins, 400, 160)
    generator = torch.Generator().manual_seed(num_bins)
    for seconds in (2, 7):
        samples = sine(440, seconds) + 0.1 * torch.randn(seconds * RATE, generator=generator)
        extracted = extractor(
            samples.numpy(), sampling_rate=RATE, truncation=False, return_tensors="np"
        )
        expected = torch.from_numpy(extracted.input_features[0])
        torch.testing.assert_close(log_mel(samples), expected, rtol=0, atol=1e-5)
    # More than one block of frames, and fewer samples than a frame reflects.
    assert torch.equal(log_mel(sine(440, 61)).isfinite().all(), torch.tensor(True))
    assert log_mel(sine(440, 0.011)).shape == (num_bins, 1)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000, 16001])
def test_a_resampled_sine_is_the_sine(rate: int) -> None:
    samples = resample(sine(440, 1, rate), rate, RATE)
    assert len(samples) == RATE
    middle = slice(500, -500)
    torch.testing.assert_close(samples[middle], sine(440, 1)[middle], rtol=0, atol=1e-4)


def test_frequencies_that_the_new_rate_cannot_hold_are_removed() -> None:
    samples = resample(sine(9000, 1, 44100), 44100, RATE)
    assert samples[500:-500].abs().max() < 1e-4
    assert torch.equal(resample(torch.ones(100), RATE, RATE), torch.ones(100))


def test_files_and_samples_are_read(tmp_path: Path) -> None:
    left, right = sine(440, 0.1), sine(880, 0.1)
    both = torch.stack([left, right])
    (tmp_path / "sound.wav").write_bytes(wav(both))
    expected = (left + right) / 2
    for audio in (tmp_path / "sound.wav", str(tmp_path / "sound.wav"), wav(both)):
        torch.testing.assert_close(read_audio(audio, None, RATE), expected, rtol=0, atol=5e-5)
    for samples in (both, both.numpy(), both.double(), both.tolist()):
        torch.testing.assert_close(read_audio(samples, RATE, RATE), expected)
    halved = read_audio(left, RATE, 8000)
    assert len(halved) == 800


def test_every_width_of_samples_in_wav_files_is_read() -> None:
    samples = sine(440, 0.05)
    scaled = (samples.double() * 2**31).round().to(torch.int64)
    narrow = ((scaled >> 24) + 128).to(torch.uint8).numpy().tobytes()
    wide = scaled.clamp(max=2**31 - 1).to(torch.int32).numpy().tobytes()
    three = b"".join(wide[at + 1 : at + 4] for at in range(0, len(wide), 4))
    extensible = struct.pack("<HHIH14s", 22, 32, 4, 3, b"")
    for file, error in (
        (riff(1, 8, narrow), 2**-7),
        (riff(1, 24, three), 2**-23),
        (riff(1, 32, wide), 2**-23),
        (riff(3, 32, samples.numpy().tobytes()), 0.0),
        (riff(3, 64, samples.double().numpy().tobytes()), 0.0),
        (riff(0xFFFE, 32, samples.numpy().tobytes(), extra=extensible), 0.0),
    ):
        torch.testing.assert_close(read_audio(file, None, RATE), samples, rtol=0, atol=error)
    # A program that writes to a pipe does not know the size.
    piped = riff(3, 32, samples.numpy().tobytes()).replace(
        b"data" + struct.pack("<I", samples.nbytes), b"data\xff\xff\xff\xff"
    )
    assert torch.equal(read_audio(piped, None, RATE), samples)


def test_other_formats_are_read_by_soundfile(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="needs the package soundfile")
    samples = sine(440, 0.2, 8000)
    soundfile.write(tmp_path / "sound.flac", samples.numpy(), 8000)
    decoded = read_audio(tmp_path / "sound.flac", None, 8000)
    torch.testing.assert_close(decoded, samples, rtol=0, atol=1e-4)
    with pytest.raises(RequestError, match="lasts 0 seconds, the limit is 0"):
        read_audio(tmp_path / "sound.flac", None, 8000, AudioLimits(seconds=0.1))
    with pytest.raises(RequestError, match=r"cannot be decoded: .*Try: a complete file in one"):
        read_audio(b"fLaC and so on", None, 8000)


@pytest.mark.parametrize("form", ["AU", "CAF", "VOC", "W64"])
def test_formats_outside_of_the_list_are_refused(form: str) -> None:
    soundfile = pytest.importorskip("soundfile", reason="needs the package soundfile")
    file = io.BytesIO()
    soundfile.write(file, sine(440, 0.1).numpy(), RATE, format=form)
    with pytest.raises(RequestError, match=r"not WAV, FLAC, MP3, Ogg.*Try: ffmpeg -i FILE"):
        read_audio(file.getvalue(), None, RATE)


def test_a_file_that_is_no_wav_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    mu_law = riff(7, 8, bytes(100))
    for content in (b"fLaC and so on", mu_law):
        with pytest.raises(RequestError, match=r"need the library soundfile. Try: pip install"):
            read_audio(content, None, RATE)


@pytest.mark.parametrize(
    ("audio", "rate", "reason"),
    [
        ("no/such/file.wav", None, "'no/such/file.wav' cannot be read: No such.*Try: the path"),
        ("/dev/null", None, "'/dev/null' cannot be read: it is a folder, a device or a socket"),
        (Path(__file__).parent, None, "cannot be read: it is a folder"),
        ("null\0.wav", None, r"cannot be read: embedded null byte. Try: the path"),
        (torch.ones(100, 2), RATE, r"shape \[100, 2\].*100 channels, must be.*Try: audio.T"),
        (torch.ones(0, 100), RATE, "0 channels, must be 1 to 64"),
        (wav(torch.ones(10)), RATE, "sampling_rate is 16000, but the audio is a file"),
        (torch.ones(10), None, r"sampling_rate is None, must be the integer"),
        (torch.ones(10), 0, "sampling rate of the audio is 0"),
        (torch.ones(0), RATE, "holds no samples"),
        (torch.ones(10).short(), RATE, r"torch.int16 of the shape \[10\].*divide 16-bit"),
        (torch.ones(1, 1, 10), RATE, r"of the shape \[1, 1, 10\]"),
        (torch.tensor([1.0, torch.nan]), RATE, "NaN or infinite"),
        (torch.tensor([1.0, -1e30]), RATE, r"or larger than 2\*\*32. Try: samples from -1 to 1"),
        (object(), RATE, "audio is a object, must be a path"),
        (b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0abc", None, "its format is cut off"),
        (b"RIFF\0\0\0\0WAVE", None, "holds no samples"),
        (riff(1, 16, b""), None, "holds no samples"),
        (b"", None, "is an empty file, of 0 bytes"),
        (riff(1, 16, bytes(20), rate=0), None, "sampling rate of the audio is 0"),
    ],
    ids=range(20),
)
def test_unusable_sounds_are_refused(audio: Any, rate: int | None, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        read_audio(audio, rate, RATE)


def test_sounds_above_the_limits_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    file = tmp_path / "long.wav"
    file.write_bytes(wav(sine(440, 1)))
    for audio, rate in ((file, None), (file.read_bytes(), None), (sine(440, 1), RATE)):
        with pytest.raises(RequestError, match="lasts 1 seconds, the limit is 0"):
            read_audio(audio, rate, RATE, AudioLimits(seconds=0.5))
    for audio in (file, file.read_bytes()):
        with pytest.raises(RequestError, match="has 32,044 bytes, the limit is 32,000"):
            read_audio(audio, None, RATE, AudioLimits(num_bytes=32_000))


def test_a_pipe_is_read_up_to_the_limit(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = wav(sine(440, 0.1))
    for limit in (len(content), len(content) - 1):
        writer = threading.Thread(target=pipe.write_bytes, args=(content,))
        writer.start()
        limits = AudioLimits(num_bytes=limit)
        if limit == len(content):
            assert len(read_audio(pipe, None, RATE, limits)) == RATE // 10
        else:
            with pytest.raises(RequestError, match="the limit is"):
                read_audio(pipe, None, RATE, limits)
        writer.join()
