"""Log-mel spectrogram of a sound, as Whisper's encoder reads it.

Dimensions: S samples, F frames, M mel bins, N samples of a frame.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from interposer.errors import CheckpointError
from interposer_engine._checkpoint.files import read_json

_PREPROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

_HIGHEST_HERTZ = 8000.0
# Frames per block, so that a long sound needs little memory: one minute in 10 ms steps.
_BLOCK_FRAMES = 6000
# Slaney's mel scale: linear up to 1000 Hz, 15 mel; then logarithmic, 27 mel for a factor of 6.4.
_LINEAR_HERTZ = 200.0 / 3.0
_LOG_START_HERTZ = 1000.0
_LOG_STEP = math.log(6.4) / 27.0


class LogMel:
    """Computes the logarithms of the power in mel bands, scaled as Whisper was trained.

    Args:
        num_bins: M.
        frame_size: N; the frames are windowed by a Hann window.
        hop_size: Samples from one frame to the next.
    """

    def __init__(self, sampling_rate: int, num_bins: int, frame_size: int, hop_size: int) -> None:
        self.sampling_rate, self.frame_size, self.hop_size = sampling_rate, frame_size, hop_size
        self._window = torch.hann_window(frame_size)
        self._filters = mel_filters(sampling_rate, num_bins, frame_size)

    @classmethod
    def read(cls, path: Path, num_bins: int) -> LogMel:
        """Read the settings of a checkpoint's features.

        Args:
            path: Folder of the checkpoint; a missing file or field stands for Whisper's values.
        Raises: CheckpointError: a field holds no positive integer.
        """
        file, fields = _preprocessor(path)
        sizes = {"sampling_rate": 16000, "n_fft": 400, "hop_length": 160}
        for name, default in sizes.items():
            size = fields.get(name, default)
            if type(size) is not int or size < 1:
                reason = f"{name} is {size!r:.100}, must be a positive integer"
                raise CheckpointError(file, reason, "correct the field")
            sizes[name] = size
        return cls(sizes["sampling_rate"], num_bins, sizes["n_fft"], sizes["hop_length"])

    def __call__(self, samples: Tensor) -> Tensor:
        """Return the features ``[M, F]`` float32 of samples ``[S]``, with F = S / hop size."""
        half, num_frames = self.frame_size // 2, len(samples) // self.hop_size
        # Reflection needs more samples than it adds.
        padded = functional.pad(samples, (0, max(0, half + 1 - len(samples))))
        padded = functional.pad(padded[None, None], (half, half), mode="reflect")[0, 0]
        frames = padded.unfold(0, self.frame_size, self.hop_size)[:num_frames]
        bands = [self._bands(block) for block in frames.split(_BLOCK_FRAMES)]
        logarithms = torch.cat(bands).clamp(min=1e-10).log10()
        # Differences of more than 8 powers of ten below the loudest value are cut off.
        logarithms = logarithms.clamp(min=float(logarithms.max()) - 8.0)
        return ((logarithms + 4.0) / 4.0).T.contiguous()

    def _bands(self, frames: Tensor) -> Tensor:
        """Return the power in each mel band, ``[F, M]``, of frames ``[F, N]``."""
        power: Tensor = torch.fft.rfft(frames * self._window).abs().square()
        return power.matmul(self._filters)


def mel_filters(sampling_rate: int, num_bins: int, frame_size: int) -> Tensor:
    """Return the weights ``[N / 2 + 1, M]`` of frequencies in triangular bands of equal area."""
    frequencies = torch.linspace(0, sampling_rate // 2, frame_size // 2 + 1, dtype=torch.float64)
    mels = torch.linspace(0.0, _mel(_HIGHEST_HERTZ), num_bins + 2, dtype=torch.float64)
    edges = torch.where(
        mels < _LOG_START_HERTZ / _LINEAR_HERTZ,
        mels * _LINEAR_HERTZ,
        _LOG_START_HERTZ * torch.exp(_LOG_STEP * (mels - _LOG_START_HERTZ / _LINEAR_HERTZ)),
    )
    widths = edges.diff()
    distances = edges - frequencies[:, None]
    rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    triangles = torch.minimum(rising, falling).clamp(min=0)
    weights: Tensor = triangles * (2.0 / (edges[2:] - edges[:-2]))
    return weights.to(torch.float32)


def _mel(hertz: float) -> float:
    """Return the mel number of a frequency of at least 1000 Hz."""
    return _LOG_START_HERTZ / _LINEAR_HERTZ + math.log(hertz / _LOG_START_HERTZ) / _LOG_STEP


def _preprocessor(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file that describes the features, and its fields; none if there is no file."""
    for name in _PREPROCESSOR_FILES:
        if (path / name).is_file():
            fields = read_json(path / name)
            nested = fields.get("feature_extractor")
            return path / name, nested if isinstance(nested, dict) else fields
    return path, {}
