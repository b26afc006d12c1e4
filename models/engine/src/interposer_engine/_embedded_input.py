"""A run of prompt tokens whose vectors an encoder has computed, such as an image.

Dimensions: N tokens of the run, H hidden size, L blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interposer.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedInput:
    """A run of prompt tokens whose vectors an encoder has computed, such as an image.

    A prompt lists such runs among its token ids.

    Attributes:
        kind: ``"image"`` or ``"audio"``, for counts of tokens and for errors.
        digest: hash of everything that determines vectors and positions. Prompts with equal digests
            share cached prefixes.
        embeddings: ``[N, H]``, the inputs of the first block, in any float dtype and on any device.
            No embedding scale is applied to them.
        positions: ``[N, 3]`` int64, time, height and width of each token for M-RoPE, from 0 to
            N - 1, relative to the position at which the run starts. None numbers the tokens from 0
            to N - 1.
        num_positions: number of positions that the run takes, from 1 to N: the next token continues
            at the start of the run plus this number. None takes N.
        attends_both_ways: whether the tokens of the run attend to each other in both directions.
        layer_embeddings: ``[L, N, H]``, vectors that are added to the hidden states of the run
            after each of the first L blocks; None without such vectors.
    Raises: RequestError: a tensor has another shape or dtype, or a position is out of range.
    """

    kind: str
    digest: bytes
    embeddings: Tensor
    positions: Tensor | None = None
    num_positions: int | None = None
    attends_both_ways: bool = False
    layer_embeddings: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.embeddings.shape)
        if len(shape) != 2 or not all(shape) or not self.embeddings.is_floating_point():
            raise self._wrong("embeddings", self.embeddings, "[N, H] with at least one token")
        if not isinstance(self.digest, bytes) or not self.digest:
            raise RequestError(f"digest is {self.digest!r:.50}, must be bytes of a hash")
        count, layers = shape[0], self.layer_embeddings
        if self.num_positions is not None and not 1 <= self.num_positions <= count:
            raise RequestError(
                f"num_positions of an {self.kind} of {count} tokens is {self.num_positions}, "
                f"must be from 1 to {count}"
            )
        if self.positions is not None:
            if tuple(self.positions.shape) != (count, 3) or self.positions.is_floating_point():
                raise self._wrong("positions", self.positions, f"[{count}, 3] int64")
            if self.positions.min() < 0 or self.positions.max() >= count:
                raise RequestError(
                    f"positions of an {self.kind} of {count} tokens are from "
                    f"{int(self.positions.min())} to {int(self.positions.max())}, "
                    f"must be from 0 to {count - 1}"
                )
        if layers is not None and (layers.ndim != 3 or tuple(layers.shape[1:]) != shape):
            raise self._wrong("layer_embeddings", layers, f"[L, {count}, {shape[1]}]")

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.embeddings)

    def __repr__(self) -> str:
        """Describe kind, size and digest; the vectors would be too long."""
        return f"<{self.kind} of {len(self)} tokens, {self.digest[:4].hex()}>"

    def _wrong(self, name: str, tensor: Tensor, expected: str) -> RequestError:
        return RequestError(
            f"{name} of an {self.kind} is {tensor.dtype} {[*tensor.shape]}, must be {expected}"
        )


PromptTokens = Sequence[int | EmbeddedInput]
"""The tokens of a prompt: token ids, and runs of tokens whose vectors an encoder has computed."""


def num_tokens(prompt: PromptTokens) -> int:
    """Return the number of tokens of a prompt; a run counts as all of its tokens."""
    return sum(len(part) if isinstance(part, EmbeddedInput) else 1 for part in prompt)
