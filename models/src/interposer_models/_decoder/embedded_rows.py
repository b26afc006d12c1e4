"""Vectors of an encoder that stand in place of token embeddings in a step of a decoder.

Dimensions: T tokens of the step, R tokens with vectors, H hidden size, L blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedRows:
    """The tokens of a step whose vectors an encoder has computed, such as those of an image.

    Attributes:
        rows: ``[R]`` int64, indices into T.
        embeddings: ``[R, H]``, the inputs of the first block, in the dtype of the model. No
            embedding scale is applied.
        layers: pairs of rows ``[R]`` int64 and vectors ``[L, R, H]``, which are added to the hidden
            states of these rows after each of the first L blocks. L may differ between pairs.
    """

    rows: Tensor
    embeddings: Tensor
    layers: Sequence[tuple[Tensor, Tensor]] = ()

    @property
    def num_layers(self) -> int:
        """Number of first blocks after which vectors are added."""
        return max((len(vectors) for _, vectors in self.layers), default=0)

    def replace_embeddings(self, x: Tensor) -> Tensor:
        """Return ``x`` ``[T, H]`` with the encoder's vectors in their rows."""
        return x.index_copy(0, self.rows, self.embeddings.to(x.dtype))

    def add_after_block(self, index: int, x: Tensor) -> Tensor:
        """Return the output ``x`` ``[T, H]`` of block ``index`` plus the vectors of that block."""
        for rows, vectors in self.layers:
            if index < len(vectors):
                x = x.index_add(0, rows, vectors[index].to(x.dtype))
        return x
