"""The frame of decoders whose checkpoints name its parts in other ways than Llama's.

Dimensions: T tokens of the step, R tokens whose logits are wanted, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from interposer import AttentionSpec, CausalModel, Site
from interposer_models._decoder.decoder import Block, Norm
from interposer_models._decoder.family import DecoderFamily
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.embedding import Embedding, LMHead
from interposer_ops.rotary import rotary_table

_FIRST_POSITIONS = 4096


@dataclass(frozen=True)
class PartNames:
    """The names of a decoder's parts in its checkpoints.

    Attributes:
        positions: of the table of learned positions; empty where there is none.
        attention: of a block's attention, below the block.
        first_position: row of that table which the first token has.
    """

    tokens: str
    blocks: str
    norm: str
    head: str
    attention: str
    positions: str = ""
    first_position: int = 0


class NamedLM(CausalModel):
    """A decoder with learned positions or with angles, under names of its own.

    Attributes:
        renamed: returns the name that a tensor has here, by the one in the checkpoint; None for one
            that nothing is computed of.
    """

    def __init__(self, site: Site, config: NamedFamily, block: Block, norm: Norm) -> None:
        super().__init__()
        self.config: NamedFamily = config
        names, hidden = config.names, config.hidden_size
        self.renamed: Callable[[str], str | None] = config.renamed
        head = site.at(names.head)
        tied = head if config.tie_word_embeddings else None
        self.tokens = Embedding(site.at(names.tokens), config.vocab_size, hidden, tied)
        self.positions = None
        if names.positions:
            rows = config.max_position_embeddings + names.first_position
            self.positions = Embedding(site.at(names.positions), rows, hidden)
        blocks, count = site.at(names.blocks), config.num_hidden_layers
        self.layers = nn.ModuleList(block(blocks.at(str(i)), i) for i in range(count))
        self.norm = norm(site.at(names.norm))
        self.head = LMHead(head, config.vocab_size, hidden, self.tokens if tied else None)
        self.table: tuple[Tensor, Tensor] | None = None

    @property
    def attention_layers(self) -> list[Attention]:
        """Return the attention layers in order; cache i belongs to layer i."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute the angles of at least ``count`` positions, unless that is done."""
        config = self.config
        if self.positions is not None:
            # Blocks take angles, and turn nothing by those of positions that are learned.
            none = torch.empty(1, 0, device=device)
            self.table = none, none
        elif self.table is None or count > len(self.table[0]):
            context = config.max_position_embeddings
            rows = min(context, max(2 * count, _FIRST_POSITIONS))
            cos, sin = rotary_table(rows, config.rotary_size, *config.rotation(0), context)
            self.table = cos.to(device), sin.to(device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Tensor],
        plans: Sequence[object],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the logits ``[R, V]`` or ``[T, V]``, see ``CausalModel``."""
        assert self.table is not None
        x, residual = self.tokens(token_ids), None
        if self.positions is not None:
            x = x + self.positions(positions + self.config.names.first_position)
            cos, sin = self.table
        else:
            cos, sin = (part[positions] for part in self.table)
        last = len(self.layers) - 1
        for index, block in enumerate(self.layers):
            wanted = rows if index == last else None
            x, residual = block(x, residual, cos, sin, caches[index], plans[index], wanted)
        normalised = self.norm.forward_add(x, residual)[0]  # type: ignore[operator]
        return self.head(normalised)  # type: ignore[no-any-return]


class NamedFamily(DecoderFamily):
    """A decoder of the years before grouped queries; ``names`` are those of its checkpoints.

    Heads of queries, keys and values are equally many, and share the hidden size.
    """

    names: ClassVar[PartNames]

    @property
    def num_kv_heads(self) -> int:
        """Heads that keys and values have."""
        return self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.hidden_size // self.num_attention_heads

    def renamed(self, name: str) -> str | None:
        """Return the name of a checkpoint's tensor here, None for one that is not needed."""
        return name

    def attention(self, site: Site) -> Iterator[tuple[AttentionSpec, Site]]:
        """Yield spec and site of the attention of each block, in pages of one token."""
        for index in range(self.num_hidden_layers):
            place = site.at(f"{self.names.blocks}.{index}.{self.names.attention}")
            yield self.attention_spec(place, index, page_size=1), place.at("attn")

    def build(self, site: Site, page_size: int) -> NamedLM:  # type: ignore[override]
        """Return the decoder with its head."""
        return NamedLM(site, self, lambda at, i: self.block(at, i, page_size), self.norm)

    @model_validator(mode="after")
    def _whole_heads(self) -> Self:
        hidden, heads = self.hidden_size, self.num_attention_heads
        if hidden % heads:
            raise ValueError(f"the hidden size {hidden} is not a multiple of {heads} heads")
        return self
