"""The encoder of a model's sounds: files in, prompts with vectors in place of sounds out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import torch
from torch import Size, Tensor

from interposer.errors import CheckpointError, RequestError
from interposer_adapt._audio_tower import AudioTower, SoundFeatures
from interposer_adapt._media_encoder import CACHED_BYTES, MediaEncoder, Tokens
from interposer_adapt._media_files import read_bytes
from interposer_engine import AudioLimits, EmbeddedInput, Media, Plan
from interposer_engine.parts import read_audio


@dataclass(frozen=True, slots=True)
class SoundLimits:
    """Limits on the sounds of one prompt.

    Attributes:
        sounds: number of sounds.
        file: limits on a file. An hour is 45,000 tokens of Voxtral, more than its context.
            Decoding takes 4 bytes for each sample.
    """

    sounds: int = 64
    file: AudioLimits = field(
        default_factory=lambda: AudioLimits(
            num_bytes=256 << 20, seconds=3600.0, num_samples=1 << 28
        )
    )


@dataclass(frozen=True, slots=True, eq=False)
class SoundSource:
    """A sound whose file is in memory, but not decoded.

    Attributes:
        place: name of the sound in errors.
        content: bytes of the file.
        digest: hash of the file.
        limits: limits that apply to the sound.
    """

    place: str
    content: bytes
    digest: bytes
    limits: AudioLimits


@dataclass(frozen=True, slots=True, eq=False)
class PreparedSound:
    """A sound that is ready for the encoder.

    Attributes:
        source: the content.
        features: inputs of the encoder.
    """

    source: SoundSource
    features: SoundFeatures

    @property
    def count(self) -> int:
        """The number of tokens of the sound."""
        return self.features.count

    @property
    def nbytes(self) -> int:
        """Size of the encoder's inputs in bytes."""
        return self.features.windows.nbytes

    @property
    def shapes(self) -> tuple[tuple[str, Size], ...]:
        """The shapes that the sounds of a batch have in common: windows have equal sizes."""
        return (("windows", self.features.windows.shape[1:]),)


class AudioEncoder(MediaEncoder[SoundSource, PreparedSound, Tensor]):
    """Encodes the sounds of prompts by the audio encoder of a transformers model.

    ``interposer.explain(encoder)`` lists its kernels.

    Attributes:
        limits: limits on the sounds of one prompt.
    """

    kinds = frozenset({"audio"})
    noun = "sound"

    def __init__(
        self,
        tower: AudioTower,
        plan: Plan,
        *,
        limits: SoundLimits | None = None,
        cached_bytes: int = CACHED_BYTES,
    ) -> None:
        """Create an encoder.

        Args:
            tower: computes the vectors.
            plan: the plan of the model that reads the vectors.
            limits: limits on the sounds of a prompt; None takes those of ``SoundLimits``.
            cached_bytes: size of the vectors to keep.
        Raises: CheckpointError: config.json names no placeholder.
        """
        config = tower.adapted.model.config
        if type(config.audio_token_id) is not int:
            raise CheckpointError(
                plan.path,
                f"audio_token_id is {config.audio_token_id!r:.50}, must be the token that stands "
                "for a sound",
                "correct config.json, or load(path, text_only=True)",
            )
        self.limits = SoundLimits() if limits is None else limits
        super().__init__(
            tower.adapted, config.audio_token_id, plan, self.limits.sounds, cached_bytes
        )
        self._tower = tower
        log_mel = tower.log_mel
        sizes = (log_mel.sampling_rate, log_mel.frame_size, log_mel.hop_size)
        settings = [config.to_dict(), sizes, str(plan.path), str(plan.dtype)]
        self._seed = json.dumps(settings, sort_keys=True, default=str).encode()

    def _sample(self, max_tokens: int) -> PreparedSound:
        # Each window has the same number of tokens, however many sounds they belong to.
        features = self._tower.features(torch.zeros(self._tower.window_samples))
        return PreparedSound(SoundSource("The sample", b"", b"", self.limits.file), features)

    def _read(self, medium: Media) -> SoundSource:
        place, limits = medium.place or "The sound", self.limits.file
        if medium.max_seconds is not None:
            limits = replace(limits, seconds=medium.max_seconds)
        content = read_bytes(
            medium.content,
            place,
            limits.num_bytes,
            types="the bytes of a file or a Path",
            advice="a compressed format, or one channel of 16,000 samples per second",
        )
        return SoundSource(place, content, blake2b(content).digest(), limits)

    def _prepare(self, source: SoundSource) -> PreparedSound:
        rate = self._tower.log_mel.sampling_rate
        try:
            samples = read_audio(source.content, None, rate, source.limits)
        except RequestError as error:
            raise RequestError(f"{source.place}: {error}") from error
        features = self._tower.features(samples)
        if not features.count:
            raise RequestError(
                f"{source.place} lasts {len(samples) / rate:.4f} seconds, which is too short for "
                "the model's audio encoder. Try: at least 0.1 seconds"
            )
        if not features.windows.isfinite().all():
            raise RequestError(
                f"{source.place} holds samples up to {float(samples.abs().max()):.0e}, must be "
                "about -1 to 1"
            )
        return PreparedSound(source, features)

    def _vectors(self, media: Sequence[PreparedSound]) -> Sequence[Tensor]:
        return self._tower.encode([sound.features for sound in media])

    def _tokens(self, medium: PreparedSound, vectors: Tensor) -> Tokens:
        digest = blake2b(self._seed + medium.source.digest).digest()
        return [EmbeddedInput("audio", digest, vectors)]
