"""Features that an encoder reads instead of token ids, such as the log-mel spectrogram of a sound.

Dimensions: M features of a frame, F frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from interposer.errors import RequestError


@dataclass(frozen=True, slots=True, eq=False)
class EncoderFeatures:
    """An encoder input of features; as a prompt, with the first tokens of the decoder.

    Attributes:
        values: ``[M, F]``, finite floating-point numbers.
        decoder_ids: Tokens with which the decoder starts; empty for those of the checkpoint.
    """

    values: Tensor
    decoder_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return the number of tokens of the prompt, which are the decoder's."""
        return len(self.decoder_ids)

    def checked(self, shape: tuple[int, int], num_tokens: int) -> FeatureSource:
        """Return the features as a sequence's encoder input.

        Args:
            shape: M and F of the model.
            num_tokens: Number of tokens that the encoder makes of the features.
        Raises: RequestError: the values are no tensor of floats of this shape, or not finite.
        """
        values, frames = self.values, f"[{shape[0]}, {shape[1]}]"
        if not isinstance(values, Tensor) or not values.is_floating_point():
            kind = getattr(values, "dtype", type(values).__name__)
            raise RequestError(
                f"The encoder reads features of floating-point numbers {frames}, got {kind}. "
                "Try: lm.transcribe(audio), which computes the features"
            )
        if tuple(values.shape) != shape:
            raise RequestError(
                f"The encoder reads features of the shape {frames}, got {[*values.shape]}. "
                "Try: lm.transcribe(audio), which computes the features"
            )
        host_values = values.detach().to("cpu", torch.float32)
        if not host_values.isfinite().all():
            raise RequestError("The features for the encoder hold NaN or infinity")
        return FeatureSource(host_values, num_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class FeatureSource:
    """Checked features of a sequence, in place of the token ids of an encoder input.

    The length is the number of encoder tokens, whose keys and values the cache holds. Iteration
    yields the bits of the features as integers, from which ranks compute a digest of the request.

    Attributes:
        values: ``[M, F]`` float32 on the CPU.
        num_tokens: Number of encoder tokens.
    """

    values: Tensor
    num_tokens: int

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def content(self) -> bytes:
        """The bytes of the values."""
        return self.values.contiguous().numpy().tobytes()

    def __iter__(self) -> Iterator[int]:
        yield from self.values.contiguous().view(torch.int32).flatten().tolist()
