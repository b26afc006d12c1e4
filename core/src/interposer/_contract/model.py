"""The contract of a model family: the settings from config.json, and the model built from them.

Dimensions: T tokens of the step, R tokens with requested logits, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from interposer._contract.attention import AttentionSpec
from interposer._contract.layer import Site


class ModelFamily(ABC):
    """The settings of one checkpoint, and the construction of its model.

    Attributes:
        dtype: of the checkpoint, as torch names it, without ``torch.``.
        vocab_size: V.
        max_position_embeddings: the context length in tokens.
        quantization_config: as in config.json; None if weights are not quantized.
    """

    dtype: str
    vocab_size: int
    max_position_embeddings: int
    quantization_config: Mapping[str, Any] | None

    @classmethod
    @abstractmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> ModelFamily:
        """Parse the content of config.json into the settings of this family.

        Args:
            source: origin of ``config``, which errors name.
        Raises:
            CheckpointError: a field is missing, mistyped or contradictory.
            UnsupportedModelError: the config needs a feature that the family does not implement.
        """

    @abstractmethod
    def attention(self, site: Site) -> Iterable[tuple[AttentionSpec, Site]]:
        """Return spec and site of each attention layer in order, with a page size of one token.

        The engine chooses a page size that suits all of these specs; ``build`` then requests the
        backends of the same layers with that page size.
        """

    @abstractmethod
    def build(self, site: Site, page_size: int) -> CausalModel:
        """Build the model; layers with weights are ``PluggableLayer``.

        Each layer is finalized once the tensors below the layer's prefix are loaded. Torch's
        default device is ``meta`` during the call, so no tensor is computed.

        Raises: NoCandidateError: every candidate for a layer was refused.
        """


class CausalModel(nn.Module, ABC):
    """A decoder with no state except caches; ``config`` holds the settings of the model."""

    config: ModelFamily

    @property
    @abstractmethod
    def attention_layers(self) -> Sequence[Any]:
        """The layers with an ``AttentionBackend`` in ``backend``; cache i belongs to layer i."""

    @property
    def state_layers(self) -> Sequence[Any]:
        """The layers with a ``state_layout``; these caches follow the attention layers' caches."""
        return ()

    @abstractmethod
    def reserve_positions(self, count: int, device: str) -> None:
        """Extend tables that no checkpoint stores to at least ``count`` positions, if shorter.

        First called with 0, after all weights were loaded.
        """

    @abstractmethod
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits of the tokens that ``rows`` selects, or of all tokens.

        Args:
            token_ids: ``[T]`` int64, all sequences concatenated.
            positions: ``[T]`` int64, position of each token in the token's sequence.
            caches: one per attention layer, in the backend's layout; then one per layer with a
                state, the tensors of the state layout.
            plans: one per attention layer, the backend's plan for this step; then a ``StateBatch``
                per layer with a state.
            rows: ``[R]`` int64, indices into T.
        Returns: ``[R, V]`` or ``[T, V]``.
        """
