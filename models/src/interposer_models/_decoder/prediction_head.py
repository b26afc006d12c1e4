"""Heads that predict a further token, by a hidden state and the token that follows it.

Dimensions: T tokens, R tokens whose predictions are wanted, H hidden size of the head, F size of
what it reads of the model, V vocabulary of the model.
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

Cosines = tuple[Tensor | None, Tensor | None]


class PredictionHead(nn.Module, ABC):
    """A decoder of one block, with a paged cache of its own.

    Its token of a position is the next one of the model: from the model's state of token i and from
    token i + 1 it predicts token i + 2. Its own state stands for the model's to predict further.

    Attributes:
        config: sizes of the model.
        layers: of the model, whose inputs it reads; none stands for what the final norm returns.
        renamed: as that of ``CausalLM``.
        unread: as that of ``CausalLM``.
    """

    config: DecoderSettings
    layers: tuple[int, ...] = ()
    unread: tuple[str, ...] = ()

    @abstractmethod
    def renamed(self, name: str) -> str | None:
        """Return the name of a checkpoint's tensor here, None for one that is none of the head."""

    @property
    def attention_layers(self) -> list[Attention]:
        """Return the attention layers in order; cache i belongs to layer i."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    @abstractmethod
    def reserve_positions(self, count: int, device: str) -> None:
        """Prepare for ``count`` positions at least."""

    @abstractmethod
    def fused(self, states: Tensor) -> Tensor:
        """Return ``[T, H]`` of the model's states ``[T, F]``."""

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
        """Return the head's states ``[R, H]`` of the tokens that ``rows`` names.

        Args:
            token_ids: ``[T]`` int64, of each state the token that follows.
            states: ``[T, H]``, those of ``fused`` or the head's own.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Return the logits ``[R, V]`` of the head's states."""


class HeadNames(NamedTuple):
    """The names of a head's parts in checkpoints, below one prefix.

    Attributes:
        unread: what is the model's again.
    """

    prefix: str
    token_norm: str
    state_norm: str
    projection: str
    block: str
    norm: str
    unread: tuple[str, ...] = ()


class NextTokenHead(PredictionHead):
    """A block of the model's family behind a projection of state and embedding, each normalised.

    It shares embedding, angles and lm_head with the model. Its state is what its last norm returns.

    Args:
        block: returns the block at a site.
        index: of the layer of the model whose angles the block has.
    Source: arXiv:2412.19437, section 2.2.
    """

    def __init__(
        self, site: Site, names: HeadNames, model: CausalLM, norm: Norm, block: Any, index: int
    ) -> None:
        super().__init__()
        self._prefix = f"{names.prefix}."
        self.unread = tuple(self._prefix + name for name in names.unread)
        self._renamed = model.renamed
        self._model = (model,)  # in a tuple, so that it is no module of the head
        self.config = model.model.config
        size, own = self.config.hidden_size, site.at(names.prefix)
        self.token_norm: Any = norm(own.at(names.token_norm))
        self.state_norm: Any = norm(own.at(names.state_norm))
        self.projection = Linear(own.at(names.projection), 2 * size, size, bias=False)
        self.block: Any = block(own.at(names.block) if names.block else own)
        self.norm: Any = norm(own.at(names.norm))
        self._index = index

    def renamed(self, name: str) -> str | None:
        """Return the name of a tensor below the prefix, None for others."""
        found = self._renamed(name)
        return found if found is not None and found.startswith(self._prefix) else None

    def reserve_positions(self, count: int, device: str) -> None:
        """Prepare for ``count`` positions at least."""
        self._model[0].reserve_positions(count, device)

    def fused(self, states: Tensor) -> Tensor:
        """Return the states, which the projection takes as they are."""
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
        """Return the head's states of the tokens that ``rows`` names; see ``PredictionHead``."""
        decoder = self._model[0].model
        token = self.token_norm(decoder.embed(token_ids, positions))
        x = self.projection(torch.cat([token, self.state_norm(states)], dim=-1))
        angles = decoder.angles(positions)[self._index]
        several = len(caches) > 1
        cache, plan = (caches, plans) if several else (caches[0], plans[0])
        x, residual = self.block(x, None, *angles, cache, plan, rows)
        normalised: Tensor = self.norm.forward_add(x, residual)[0]
        return normalised

    def logits(self, states: Tensor) -> Tensor:
        """Return what the model's lm_head makes of the states."""
        return self._model[0].lm_head(states)  # type: ignore[no-any-return]
