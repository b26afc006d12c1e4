"""MTP heads, which predict a further token from a hidden state and the following token.

Dimensions: T tokens, R tokens that need predictions, H hidden size of the head, F size of
the model's states that the head reads, V vocabulary of the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from interposer import Site
from interposer_models._decoder.settings import DecoderSettings
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.linear import Linear

if TYPE_CHECKING:
    from interposer_models._decoder.decoder import CausalLM, Norm


class PredictionHead(nn.Module, ABC):
    """Base of draft heads: a decoder of one block with a KV cache of its own.

    The head's input at a position is the model's state of token i and the embedding of token i + 1,
    and the head predicts token i + 2. To draft more tokens, the head's own state replaces the
    model's.

    Attributes:
        config: settings of the model.
        layers: the head reads the inputs of these blocks; an empty tuple means the output of
            the final norm.
        renamed, unread: see ``CausalLM``.
    """

    config: DecoderSettings
    layers: tuple[int, ...] = ()
    unread: tuple[str, ...] = ()

    @abstractmethod
    def renamed(self, name: str) -> str | None:
        """Map the name of a checkpoint tensor to this module's name; None if not of the head."""

    @property
    def attention_layers(self) -> list[Attention]:
        """Return the attention layers in order; the i-th cache belongs to the i-th layer."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    @abstractmethod
    def reserve_positions(self, count: int, device: str) -> None:
        """Compute rotary angles for at least ``count`` positions."""

    @abstractmethod
    def fused(self, states: Tensor) -> Tensor:
        """Project the target model's hidden states ``[T, F]`` to the head's input ``[T, H]``."""

    @abstractmethod
    def forward(
        self,
        token_ids: Tensor,
        states: Tensor,
        positions: Tensor,
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: Tensor,
    ) -> Tensor:
        """Compute the head's hidden states ``[R, H]`` of the tokens in ``rows``.

        Args:
            token_ids: ``[T]`` int64, for each state the token that follows.
            states: ``[T, H]``, the results of ``fused`` or the head's own states.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Compute the logits ``[R, V]`` of the head's hidden states."""


class HeadNames(NamedTuple):
    """The names of an MTP head's parts in checkpoints, below a common prefix.

    Attributes:
        unread: the names of parts that repeat tensors of the model.
    """

    prefix: str
    token_norm: str
    state_norm: str
    projection: str
    block: str
    norm: str
    unread: tuple[str, ...] = ()


class NextTokenHead(PredictionHead):
    """MTP head: projects the normed hidden state and embedding, then runs one block of the family.

    The head shares embedding, rotary angles and LM head with the model. The head's state is the
    output of the last norm.

    Args:
        block: builds the block at a site.
        index: the layer of the model with the same rotary angles as the block.
    Source: arXiv:2412.19437, section 2.2.
    """

    def __init__(
        self, site: Site, names: HeadNames, model: CausalLM, norm: Norm, block: Any, index: int
    ) -> None:
        super().__init__()
        self._prefix = f"{names.prefix}."
        self.unread = tuple(self._prefix + name for name in names.unread)
        # A family's mapping of tensor names applies to the tensors of the head as well.
        self._renamed = model.renamed
        self._model = (model,)  # in a tuple, so that torch does not register it as a submodule
        self.config = model.model.config
        size, head_site = self.config.hidden_size, site.at(names.prefix)
        self.token_norm: Any = norm(head_site.at(names.token_norm))
        self.state_norm: Any = norm(head_site.at(names.state_norm))
        self.projection = Linear(head_site.at(names.projection), 2 * size, size, bias=False)
        self.block: Any = block(head_site.at(names.block) if names.block else head_site)
        self.norm: Any = norm(head_site.at(names.norm))
        self._index = index

    def renamed(self, name: str) -> str | None:
        """Return the new name of a tensor below the head's prefix; None for other tensors."""
        new_name = self._renamed(name)
        return new_name if new_name is not None and new_name.startswith(self._prefix) else None

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute rotary angles for at least ``count`` positions."""
        self._model[0].reserve_positions(count, device)

    def fused(self, states: Tensor) -> Tensor:
        """Return the hidden states unchanged, because ``forward`` projects them."""
        return states

    def forward(
        self,
        token_ids: Tensor,
        states: Tensor,
        positions: Tensor,
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: Tensor,
    ) -> Tensor:
        """Compute the head's hidden states of the tokens in ``rows``; see ``PredictionHead``."""
        decoder = self._model[0].model
        token = self.token_norm(decoder.embed(token_ids, positions))
        x = self.projection(torch.cat([token, self.state_norm(states)], dim=-1))
        angles = decoder.angles(positions)[self._index]
        has_several_caches = len(caches) > 1  # with an indexer
        cache, plan = (caches, plans) if has_several_caches else (caches[0], plans[0])
        x, residual = self.block(x, None, *angles, cache, plan, rows)
        normalised: Tensor = self.norm.forward_add(x, residual)[0]
        return normalised

    def logits(self, states: Tensor) -> Tensor:
        """Apply the target model's LM head to the hidden states."""
        return self._model[0].lm_head(states)  # type: ignore[no-any-return]
