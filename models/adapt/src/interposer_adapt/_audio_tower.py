"""The audio encoders of speech models of transformers, without the models' decoders.

Dimensions: S samples, W windows, M mel bins, F frames of a window, N tokens, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import create_bidirectional_mask

from interposer_adapt._api import Adapted
from interposer_adapt._media_tower import load_encoder
from interposer_engine import Checkpoint, Plan
from interposer_engine.parts import LogMel

# The second convolution halves the number of frames.
_FRAMES_PER_POSITION = 2
# Windows that are encoded at once. Eight windows of 30 seconds take 250 MB in each MLP.
_MAX_WINDOWS = 8


@dataclass(frozen=True, slots=True, eq=False)
class SoundFeatures:
    """Inputs of the encoder for one sound.

    Attributes:
        windows: ``[W, M, F]`` float32, the log-mel features; the last window is padded.
        num_frames: frames of each window that belong to the sound.
        count: number of tokens of the sound.
    """

    windows: Tensor
    num_frames: tuple[int, ...]
    count: int


class AudioTower(ABC):
    """An adapted audio encoder, with the projection to the decoder's hidden size.

    Attributes:
        adapted: the adapted model; its decoder and its embeddings of tokens are missing.
        log_mel: computes the features of samples.
        window_samples: samples of a window, which the encoder reads at once.
    """

    def __init__(self, adapted: Adapted[Any], log_mel: LogMel) -> None:
        self.adapted = adapted
        self.log_mel = log_mel
        self._model: Any = adapted.model
        self._config: Any = self._model.config.audio_config
        self._window_frames = _FRAMES_PER_POSITION * self._config.max_source_positions
        self.window_samples = self._window_frames * log_mel.hop_size

    @abstractmethod
    def features(self, samples: Tensor) -> SoundFeatures:
        """Compute the features of a sound ``[S]``. Too short sounds have a ``count`` of 0."""

    @abstractmethod
    def _encode(self, windows: Tensor, num_frames: Sequence[int]) -> list[Tensor]:
        """Return the vectors ``[N, H]`` of each window."""

    def encode(self, sounds: Sequence[SoundFeatures]) -> list[Tensor]:
        """Compute the vectors of sounds, ``[N, H]`` on the CPU.

        Raises: RuntimeError: the encoder returns another number of vectors.
        """
        windows = [window for sound in sounds for window in sound.windows]
        num_frames = [count for sound in sounds for count in sound.num_frames]
        vectors: list[Tensor] = []
        with torch.no_grad():
            for start in range(0, len(windows), _MAX_WINDOWS):
                part = slice(start, start + _MAX_WINDOWS)
                batch = torch.stack(windows[part]).to(self._model.device, self._model.dtype)
                vectors += [each.cpu() for each in self._encode(batch, num_frames[part])]
        pending = iter(vectors)
        encoded = [torch.cat([next(pending) for _ in sound.windows]) for sound in sounds]
        for sound, rows in zip(sounds, encoded, strict=True):
            if len(rows) != sound.count:
                raise RuntimeError(f"{len(rows)} vectors for {sound.count} tokens")
        return encoded

    def _windows(self, samples: Tensor) -> Tensor:
        """Return the features of samples that are padded with silence to whole windows."""
        missing_samples = -len(samples) % self.window_samples
        features: Tensor = self.log_mel(pad(samples, (0, missing_samples)))
        windows: Tensor = features.unflatten(1, (-1, self._window_frames))
        return windows.transpose(0, 1)


class Qwen2AudioTower(AudioTower):
    """The encoder of Qwen2-Audio, which hears one window and does not attend to the silence."""

    def features(self, samples: Tensor) -> SoundFeatures:
        """Compute the features of the first window of a sound."""
        samples = samples[: self.window_samples]
        num_frames = -(-len(samples) // self.log_mel.hop_size)
        _, count = self._sizes(num_frames)
        return SoundFeatures(self._windows(samples), (num_frames,), max(0, count))

    @staticmethod
    def _sizes(num_frames: int) -> tuple[int, int]:
        """Return the numbers of encoder positions and of tokens."""
        positions = (num_frames - 1) // 2 + 1
        return positions, (positions - 2) // 2 + 1

    def _encode(self, windows: Tensor, num_frames: Sequence[int]) -> list[Tensor]:
        tower = self._model.base_model.audio_tower
        sizes = [self._sizes(count) for count in num_frames]
        positions = torch.tensor([size for size, _ in sizes], device=windows.device)
        indices = torch.arange(self._config.max_source_positions, device=windows.device)
        mask = create_bidirectional_mask(
            config=tower.config,
            # Only shape, dtype and device count.
            inputs_embeds=windows.new_zeros(len(windows), len(indices), 1),
            attention_mask=(indices < positions[:, None]).long(),
        )
        hidden_states = tower(windows, attention_mask=mask).last_hidden_state
        vectors = self._model.base_model.multi_modal_projector(hidden_states)
        return [rows[:count] for rows, (_, count) in zip(vectors, sizes, strict=True)]


class VoxtralTower(AudioTower):
    """The encoder of Voxtral, which hears any number of windows with the silence at their end."""

    def features(self, samples: Tensor) -> SoundFeatures:
        """Compute the features of all windows of a sound."""
        windows = self._windows(samples)
        return SoundFeatures(
            windows, (self._window_frames,) * len(windows), len(windows) * self._tokens_per_window
        )

    @property
    def _tokens_per_window(self) -> int:
        # The projector reads the vectors of several positions as one.
        config = self._config
        return int(config.max_source_positions * config.hidden_size // config.intermediate_size)

    def _encode(self, windows: Tensor, num_frames: Sequence[int]) -> list[Tensor]:
        vectors = self._model.get_audio_features(windows, return_dict=True).pooler_output
        return list(vectors.unflatten(0, (len(windows), -1)))


_TOWERS: Mapping[str, type[AudioTower]] = {"qwen2_audio": Qwen2AudioTower, "voxtral": VoxtralTower}


def load_audio_tower(checkpoint: Checkpoint, plan: Plan) -> AudioTower:
    """Load and adapt the audio encoder of a checkpoint; no tensor of its decoder is read.

    Raises: CheckpointError, UnsupportedModelError: as ``load_encoder`` does.
    """
    adapted = load_encoder(checkpoint, plan, "audio")
    config = adapted.model.config
    log_mel = LogMel.read(checkpoint.path, config.audio_config.num_mel_bins)
    return _TOWERS[config.model_type](adapted, log_mel)
