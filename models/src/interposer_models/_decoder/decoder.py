"""The frame of a decoder: embedding, blocks, final norm and head; a family brings the blocks.

Dimensions: T tokens of the step, R tokens whose logits are wanted, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.compiler import is_compiling

from interposer import AttentionBackend, CausalModel, Site
from interposer_models._decoder.hidden_states import HiddenStates
from interposer_models._decoder.recurrent import RecurrentLayer
from interposer_models._decoder.settings import DecoderSettings
from interposer_models._decoder.stored_attention import StoredAttention
from interposer_models._decoder.sums_between_blocks import leave_sums
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.divided_tables import share_embedding, share_head
from interposer_ops.layers.embedding import Embedding
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.rotary import rotary_table

_FIRST_POSITIONS = 4096
KEEPING = Attention, RecurrentLayer
"""The layers that have a cache."""

Block = Callable[[Site, int], nn.Module]
"""Returns the block of an index at a site; its forward is that of ``DecoderBlock``."""
Joined = Callable[..., tuple[torch.Tensor, torch.Tensor] | None]
"""Blocks as one call of x, angles, caches and plans of each, and rows; None to call each block.

A class of blocks may have ``joined``, which returns that, or None, for blocks in their order.
"""
Norm = Callable[[Site], nn.Module]
"""Returns a norm of the residual stream at a site; its methods are those of ``RMSNorm``."""


class Decoder(nn.Module):
    """Embedding, blocks and the final norm; ``head`` is what shares the embedding, or None.

    Args:
        embedding: that is not its own; None builds one.
    Attributes:
        one_by_one: a block needs nothing of a step but what the block before it returned.
        hidden: receives the states of all tokens; None where nobody wants them.
    """

    one_by_one: bool = True
    hidden: HiddenStates | None = None

    def __init__(
        self,
        site: Site,
        config: DecoderSettings,
        block: Block,
        norm: Norm,
        head: Site | None,
        embedding: Embedding | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding_scale = config.embedding_scale
        self.embed_tokens = embedding or share_embedding(
            site.at(config.frame.embedding), config.vocab_size, config.hidden_size, head
        )
        frame, count = config.frame, config.num_hidden_layers
        self.embed_positions = None
        if frame.positions:
            rows = config.max_position_embeddings + frame.first_position
            self.embed_positions = Embedding(site.at(frame.positions), rows, config.hidden_size)
        blocks = site.at(frame.layers)
        self.layers = nn.ModuleList(block(blocks.at(str(i)), i) for i in range(count))
        self.norm = norm(site.at(frame.norm))
        # Most decoders rotate by the same angles everywhere; others have two kinds of layers.
        attending = Attention, SelfAttention
        attends = any(isinstance(module, attending) for module in self.layers.modules())
        turns = attends and config.is_rotated and not frame.positions
        rotations = [(config.rotary_size_at(i), *config.rotation(i)) for i in range(count) if turns]
        self.rotations = [r for i, r in enumerate(rotations) if rotations.index(r) == i]
        self.kinds = [self.rotations.index(rotation) for rotation in rotations]
        self.tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.numbers: Sequence[int] = range(count)
        is_frame = type(self).forward is Decoder.forward
        self._left = leave_sums([*self.layers], self.norm, site) if is_frame else []
        self._joined: tuple[Sequence[nn.Module], Sequence[int], Joined | None] = (), (), None
        self._place_caches()

    @contextmanager
    def only(self, numbers: Sequence[int]) -> Iterator[None]:
        """Leave the blocks of these numbers within a ``with`` block, in this order."""
        every, layers, left = self.numbers, self.layers, self._left
        self.numbers, self.layers = numbers, nn.ModuleList(layers[number] for number in numbers)
        self._place_caches()
        self._pause(True)
        self._left = []
        try:
            yield
        finally:
            self.numbers, self.layers, self._left = every, layers, left
            self._pause(False)
            self._place_caches()

    def _pause(self, is_paused: bool) -> None:
        """Have sums taken by the blocks themselves, where others than the next norm read them."""
        for left in self._left:
            if left.is_paused is not is_paused:
                left.is_paused = is_paused

    def _place_caches(self) -> None:
        """Find the place of each block's cache.

        A block with several, or with none, has a list of places. Those of attention come first.
        """
        kept = [_kept(block) for block in self.layers]
        states = [layer for block in kept for layer in block if isinstance(layer, RecurrentLayer)]
        stored = [layer for block in kept for layer in block if isinstance(layer, StoredAttention)]
        attention, state = 0, sum(map(len, kept)) - len(states) - len(stored)
        written: dict[AttentionBackend, int] = {}
        self.places: list[int | list[int]] = []
        for block in kept:
            places = []
            for layer in block:
                if isinstance(layer, StoredAttention):
                    places.append(written[layer.backend])
                elif isinstance(layer, RecurrentLayer):
                    places.append(state)
                    state += 1
                else:
                    written[layer.backend] = attention
                    places.append(attention)
                    attention += 1
            self.places.append(places[0] if len(places) == 1 else places)

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute the angles of at least ``count`` positions, which no checkpoint stores.

        A table of all would be the larger the longer the context that a config claims.
        """
        config = self.config
        rows = min(config.max_position_embeddings, max(2 * count, _FIRST_POSITIONS))
        self.tables = []
        for size, base, scaling in self.rotations:
            cos, sin = rotary_table(rows, size, base, scaling, config.max_position_embeddings)
            self.tables.append((cos.to(device), sin.to(device)))

    def angles(
        self, positions: torch.Tensor
    ) -> Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Return cosines and sines ``[T, R / 2]`` of positions ``[T]``, for each layer.

        Where no layer attends, or positions are learned, there are none.
        """
        if not self.rotations:
            return [(None, None)] * len(self.layers)
        found = [(cos[positions], sin[positions]) for cos, sin in self.tables]
        return [found[self.kinds[number]] for number in self.numbers]

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return what the first block gets, ``[T, H]``."""
        x: torch.Tensor = self.embed_tokens(token_ids)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions + self.config.frame.first_position)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def further_inputs(
        self, token_ids: torch.Tensor, x: torch.Tensor
    ) -> Sequence[tuple[torch.Tensor, ...]]:
        """Return what each block gets besides, by what the first block gets, ``[T, H]``."""
        return [()] * len(self.layers)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the normalised hidden states ``[T, H]``, or ``[R, H]`` of ``rows``."""
        angles = self.angles(positions)
        x = self.embed(token_ids, positions)
        further = self.further_inputs(token_ids, x)
        hidden = self.hidden
        self._pause(hidden is not None)
        joined = None
        if hidden is None and self.layers and not any(further) and not is_compiling():
            joined = self._join(x, angles, caches, plans, rows)
        if joined is not None:
            found: torch.Tensor = self.norm.forward_add(*joined)[0]  # type: ignore[operator]
            return found
        residual = None
        last = len(self.layers) - 1 if hidden is None else None
        for index, block in enumerate(self.layers):
            if hidden is not None:
                hidden.enter(index, x, residual)
            wanted = rows if index == last else None
            place = self.places[index]
            cache: Any
            plan: Any
            if isinstance(place, int):
                cache, plan = caches[place], plans[place]
            else:
                cache, plan = [caches[i] for i in place], [plans[i] for i in place]
            x, residual = block(x, residual, *angles[index], cache, plan, wanted, *further[index])
        normalised: torch.Tensor = self.norm.forward_add(x, residual)[0]  # type: ignore[operator]
        if hidden is None:
            return normalised
        hidden.leave(normalised)
        return normalised if rows is None else normalised[rows]

    def _join(
        self,
        x: torch.Tensor,
        angles: Sequence[Any],
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what the last block does, where one call computes all; else None."""
        blocks = [*self.layers]
        known, places, call = self._joined
        if blocks != known:
            join = getattr(type(blocks[0]), "joined", None)
            places = [place for place in self.places if isinstance(place, int)]
            # What has to be told of each block, gets each by itself.
            is_hooked = any(block._forward_pre_hooks for block in blocks)
            whole = join is not None and len(places) == len(blocks) and not is_hooked
            call = join(blocks) if whole else None  # type: ignore[misc]
            self._joined = blocks, places, call
        if call is None:
            return None
        return call(
            x, angles, [caches[place] for place in places], [plans[place] for place in places], rows
        )


class CausalLM(CausalModel):
    """A decoder with its language model head; module names are those of the checkpoints.

    Args:
        norm: of the last block's output.
        embedding: that others read, too; None builds one. A head that shares it is known to it.
    Attributes:
        unread: what the names of tensors begin with that a checkpoint may have besides.
        renamed: returns the name that a tensor has here, by the one in the checkpoint; None for one
            that nothing is computed of.
        decoder_type: the class of ``model``.
    """

    unread: tuple[str, ...] = ()
    decoder_type: ClassVar[type[Decoder]] = Decoder

    def __init__(
        self,
        site: Site,
        config: DecoderSettings,
        block: Block,
        norm: Norm,
        embedding: Embedding | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.renamed: Callable[[str], str | None] = config.renamed
        head = site.at(config.frame.head)
        tied = config.tie_word_embeddings
        self.model = self.decoder_type(
            site.at(config.frame.decoder), config, block, norm, head if tied else None, embedding
        )
        self.lm_head = share_head(
            head,
            config.vocab_size,
            config.hidden_size,
            self.model.embed_tokens if tied else None,
        )

    @property
    def attention_layers(self) -> list[Attention]:
        """Return the attention layers in order; cache i belongs to layer i."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    @property
    def state_layers(self) -> list[RecurrentLayer]:
        """Return the layers with a state in order; their caches follow those of attention."""
        return [module for module in self.modules() if isinstance(module, RecurrentLayer)]

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute the angles of at least ``count`` positions, unless that is done."""
        if not self.model.tables or count > len(self.model.tables[0][0]):
            self.model.reserve_positions(count, device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of the tokens that ``rows`` names, or of all.

        The last block computes what follows its attention for these tokens only.

        Args:
            token_ids: ``[T]`` int64.
            positions: ``[T]`` int64, within each token's own sequence.
            caches: one per layer, see ``CausalModel.forward``.
            plans: one per layer, for this step.
            rows: ``[R]`` int64, indices into T.
        Returns: ``[R, V]`` or ``[T, V]``.
        """
        hidden = self.model(token_ids, positions, caches, plans, rows)
        return self.lm_head(hidden)  # type: ignore[no-any-return]


def _kept(block: nn.Module) -> list[Attention | StoredAttention | RecurrentLayer]:
    """Return the layers of a block that have a cache or read one, in order."""
    kinds = (*KEEPING, StoredAttention)
    return [module for module in block.modules() if isinstance(module, kinds)]
