"""The contract of a model family: what it reads of config.json, and the model that it builds.

Dimensions: T tokens of the step, R tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from interposer._contract.attention import AttentionSpec
from interposer._contract.layer import Site


class ModelFamily(ABC):
    """The settings of one checkpoint, and how a model is built of them.

    Attributes:
        dtype: of the checkpoint, as torch names it, without ``torch.``.
        vocab_size: V.
        max_position_embeddings: the context in tokens.
        quantization_config: as config.json has it; None where weights are plain.
    """

    dtype: str
    vocab_size: int
    max_position_embeddings: int
    quantization_config: Mapping[str, Any] | None

    @classmethod
    @abstractmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> ModelFamily:
        """Return the settings that the content of config.json describes.

        Args:
            source: of ``config``, which errors name.
        Raises:
            CheckpointError: a field is missing, mistyped or contradictory.
            UnsupportedModelError: it asks for what the family does not compute.
        """

    @abstractmethod
    def attention(self, site: Site) -> Iterable[tuple[AttentionSpec, Site]]:
        """Return spec and site of each attention layer in order, in pages of one token.

        They tell which size of pages suits all; ``build`` asks for the backends by the same.
        """

    @abstractmethod
    def build(self, site: Site, page_size: int) -> CausalModel:
        """Return the model, whose layers with weights are ``PluggableLayer``.

        They are finalized one by one while the tensors of their prefixes are loaded. Torch's
        default device is ``meta`` here: no tensor is computed.

        Raises: NoCandidateError: nothing can serve a layer.
        """


class CausalModel(nn.Module, ABC):
    """A decoder that keeps its state in caches alone; ``config`` is what built it."""

    config: ModelFamily

    @property
    @abstractmethod
    def attention_layers(self) -> Sequence[Any]:
        """The layers with an ``AttentionBackend``, their ``backend``; cache i is of layer i."""

    @property
    def state_layers(self) -> Sequence[Any]:
        """The layers with a ``state_layout``; their caches follow those of attention layers."""
        return ()

    @abstractmethod
    def reserve_positions(self, count: int, device: str) -> None:
        """Compute what no checkpoint stores for at least ``count`` positions, unless that is done.

        First called with 0, once all weights are there.
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
        """Return the logits of the tokens that ``rows`` names, or of all.

        Args:
            token_ids: ``[T]`` int64, of all sequences one behind the other.
            positions: ``[T]`` int64, within each token's own sequence.
            caches: one per attention layer, of its backend's layout; then one per layer with a
                state, the tensors of its layout.
            plans: one per attention layer, its backend's plan for this step; then a ``StateBatch``
                per layer with a state.
            rows: ``[R]`` int64, indices into T.
        Returns: ``[R, V]`` or ``[T, V]``.
        """
