"""The decoder: embedding, blocks, final norm and LM head; model families provide the blocks.

``CausalLM`` is the complete model, ``Decoder`` the part without the LM head. ``NormedBlock`` and
``OnePartBlock`` are blocks with norms in other positions than Llama's. ``HiddenStates`` records the
states of a step for draft models.

Dimensions: T tokens of the step, R tokens that need logits, H hidden size, V vocabulary, L recorded
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from interposer import AttentionBackend, CausalModel, Site
from interposer_models._decoder.attention import SharedCacheAttention
from interposer_models._decoder.embedded_rows import EmbeddedRows
from interposer_models._decoder.recurrent import RecurrentLayer
from interposer_models._decoder.settings import DecoderSettings
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.embedding import Embedding
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.layers.tensor_parallel.embedding import shard_embedding, shard_lm_head
from interposer_ops.layers.tensor_parallel.fused_all_reduce import (
    FusedAllReduceNorm,
    ends_in_projection,
    fuse_all_reduce,
)
from interposer_ops.layers.tensor_parallel.sharding import is_single_process
from interposer_ops.rotary import rotary_table


def fuse_all_reduces_into_norms(
    blocks: Sequence[nn.Module], last: nn.Module, site: Site
) -> list[FusedAllReduceNorm]:
    """Move each block's last all-reduce into the next block's first norm, or into the final norm.

    Args:
        blocks: the blocks of the decoder, in order.
        last: the norm after the last block.
        site: the site of the decoder.
    Returns: the fused sums.
    """
    if is_single_process(site):
        return []
    fused_all_reduces = []
    # A list with the following block, empty for the last one.
    next_blocks: list[list[nn.Module]] = [*([block] for block in blocks[1:]), []]
    for block, next_block in zip(blocks, next_blocks, strict=True):
        norm = _first_norm(next_block[0]) if next_block else last
        # A subclass may use the MLP's output in another way than adding it to the stream.
        if type(block) is not DecoderBlock or not isinstance(norm, RMSNorm):
            continue
        mlp: Any = block.mlp
        if not ends_in_projection(mlp, GatedMLP):
            continue
        if fuse_all_reduce(
            replace(site, prefix=norm.prefix), mlp.down_proj, norm, (mlp, block), next_block
        ):
            fused_all_reduces.append(norm.fused_all_reduce[0])
    return fused_all_reduces


def _first_norm(block: nn.Module) -> nn.Module | None:
    return block.input_layernorm if type(block) is DecoderBlock else None


class HiddenStates:
    """Receives the hidden states of all tokens from each step of a ``Decoder``.

    Attributes:
        layers: indices of the blocks whose inputs are recorded, in order; an empty tuple records
            the output of the final norm.
        latest: ``[T, L * H]`` of ``layers``, or ``[T, H]`` of the final norm, of the latest step.
    """

    def __init__(self, layers: tuple[int, ...] = ()) -> None:
        self.layers = layers
        self.latest: Tensor | None = None
        self._inputs: list[Tensor] = []

    def record_block_input(self, index: int, x: Tensor, residual: Tensor | None) -> None:
        """Record the input of block ``index``: the sum of residual stream and ``x``."""
        # The first block begins a new step; an earlier step may have failed halfway.
        if index == 0:
            self._inputs = []
        if index in self.layers:
            self._inputs.append(x if residual is None else (residual + x).to(x.dtype))

    def record_final_output(self, normalised: Tensor) -> None:
        """Record the output of the final norm, which ends the step."""
        inputs, self._inputs = self._inputs, []
        self.latest = torch.cat(inputs, -1) if self.layers else normalised


_FIRST_POSITIONS = 4096
CACHED_LAYERS = Attention, RecurrentLayer
"""The layer classes that own a cache."""

Block = Callable[[Site, int], nn.Module]
"""Builds the block of an index at a site; its forward has the signature of ``DecoderBlock``."""
FusedBlocks = Callable[..., tuple[torch.Tensor, torch.Tensor] | None]
"""Computes all blocks in one call, of x, the angles, caches and plans of all blocks, and rows.

Returns None if the blocks must be called one by one. A block class may define ``joined``, which
takes the blocks in order and returns such a callable or None.
"""
Norm = Callable[[Site], nn.Module]
"""Builds a norm of the residual stream at a site; its methods are those of ``RMSNorm``."""


class Decoder(nn.Module):
    """A decoder without LM head: embedding, blocks and final norm.

    Args:
        head: site of an LM head that shares the embedding's weight, or None.
        embedding: a table shared with another module; None builds one.
    Attributes:
        can_run_block_by_block: a block needs only the previous block's output and a cache, so
            that calibration can run one block at a time.
        hidden: receives the hidden states of all tokens; None if no draft model reads them.
    """

    can_run_block_by_block: bool = True
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
        self.embed_tokens = embedding or shard_embedding(
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
        # Layers with equal rotation share one table of angles.
        # Most decoders have one rotation for all layers; some have one per layer type.
        attention_types = Attention, SelfAttention
        has_attention = any(isinstance(module, attention_types) for module in self.layers.modules())
        has_angles = has_attention and config.is_rotated and not frame.positions
        rotations = [
            (config.rotary_size_at(i), *config.rotation(i)) for i in range(count) if has_angles
        ]
        self.rotations = [r for i, r in enumerate(rotations) if rotations.index(r) == i]
        self.rotation_indices = [self.rotations.index(rotation) for rotation in rotations]
        # Filled by reserve_positions, once the number of positions is known.
        self.tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.block_indices: Sequence[int] = range(count)
        # A subclass with its own forward may read a block's output before the next norm reduces it.
        is_frame = type(self).forward is Decoder.forward
        self._fused_all_reduces = (
            fuse_all_reduces_into_norms([*self.layers], self.norm, site) if is_frame else []
        )
        self._joined: tuple[Sequence[nn.Module], Sequence[int], FusedBlocks | None] = (
            (),
            (),
            None,
        )
        self._assign_caches()

    @contextmanager
    def only_blocks(self, block_indices: Sequence[int]) -> Iterator[None]:
        """Run only the blocks ``block_indices``, in this order, within a ``with`` block."""
        all_indices, layers = self.block_indices, self.layers
        fused_all_reduces = self._fused_all_reduces
        self.block_indices = block_indices
        self.layers = nn.ModuleList(layers[index] for index in block_indices)
        self._assign_caches()
        self._pause_fused_all_reduces(True)
        # The blocks no longer follow each other as they were fused.
        self._fused_all_reduces = []
        try:
            yield
        finally:
            self.block_indices, self.layers = all_indices, layers
            self._fused_all_reduces = fused_all_reduces
            self._pause_fused_all_reduces(False)
            self._assign_caches()

    def _pause_fused_all_reduces(self, is_paused: bool) -> None:
        """Run each block's all-reduce in the block itself (True), or in the next norm (False)."""
        for fused_all_reduce in self._fused_all_reduces:
            if fused_all_reduce.is_paused is not is_paused:
                fused_all_reduce.is_paused = is_paused

    def _assign_caches(self) -> None:
        """Compute ``cache_indices``, the index of each block's cache.

        A block with several caches, or with none, has a list of indices. The caches of attention
        layers come first, then those of recurrent layers.
        """
        layers_by_block = [_cached_layers(block) for block in self.layers]
        layers = [layer for block in layers_by_block for layer in block]
        next_attention = 0
        next_state = sum(isinstance(layer, Attention) for layer in layers)
        # A layer that reads an earlier layer's cache reads the latest one of an equal spec, and
        # layers with equal specs share a backend.
        last_written: dict[AttentionBackend, int] = {}
        self.cache_indices: list[int | list[int]] = []
        for block_layers in layers_by_block:
            indices = []
            for layer in block_layers:
                if isinstance(layer, SharedCacheAttention):
                    indices.append(last_written[layer.backend])
                elif isinstance(layer, RecurrentLayer):
                    indices.append(next_state)
                    next_state += 1
                else:
                    last_written[layer.backend] = next_attention
                    indices.append(next_attention)
                    next_attention += 1
            self.cache_indices.append(indices[0] if len(indices) == 1 else indices)

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute rotary angles for at least ``count`` positions.

        A table of every position of the config would grow with the context that a config claims.
        """
        config = self.config
        # Twice the requested positions, so that a growing count does not rebuild the tables often.
        rows = min(config.max_position_embeddings, max(2 * count, _FIRST_POSITIONS))
        self.tables = []
        for size, base, scaling in self.rotations:
            cos, sin = rotary_table(rows, size, base, scaling, config.max_position_embeddings)
            self.tables.append((cos.to(device), sin.to(device)))

    def angles(
        self, positions: torch.Tensor
    ) -> Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Look up cosines and sines of the positions for each layer, ``[T, rotary size / 2]``.

        Decoders without attention, or with learned positions, have pairs of None.

        Args:
            positions: ``[T]`` int64; or ``[3, T]``, time, height and width of each token, if the
                settings have an ``mrope_section``.
        """
        if not self.rotations:
            return [(None, None)] * len(self.layers)
        if positions.ndim == 2:
            angles_by_rotation = [
                (self._mrope_angles(cos, positions), self._mrope_angles(sin, positions))
                for cos, sin in self.tables
            ]
        else:
            angles_by_rotation = [(cos[positions], sin[positions]) for cos, sin in self.tables]
        return [angles_by_rotation[self.rotation_indices[index]] for index in self.block_indices]

    def _mrope_angles(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Look up each frequency at one of the coordinates of ``positions`` ``[3, T]``."""
        axes = torch.tensor(self.config.mrope_axes, device=table.device)
        frequencies = torch.arange(table.shape[1], device=table.device)
        # Of each token and frequency, the position on the axis of the frequency: [T, R / 2].
        return table[positions[axes].T, frequencies].contiguous()

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed the tokens; return the input of the first block, ``[T, H]``."""
        x: torch.Tensor = self.embed_tokens(token_ids)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions + self.config.frame.first_position)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def extra_block_inputs(
        self, token_ids: torch.Tensor, x: torch.Tensor
    ) -> Sequence[tuple[torch.Tensor, ...]]:
        """Return the extra inputs of each block, given the first block's input ``[T, H]``."""
        return [()] * len(self.layers)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: torch.Tensor | None,
        embedded: EmbeddedRows | None = None,
    ) -> torch.Tensor:
        """Compute the final normalised hidden states, ``[T, H]``, or ``[R, H]`` of ``rows``.

        Args:
            embedded: the tokens whose vectors an encoder has computed; their ids are not used.
        """
        angles = self.angles(positions)
        x = self.embed(token_ids, positions)
        num_layer_vectors = 0
        if embedded is not None:
            x, num_layer_vectors = embedded.replace_embeddings(x), embedded.num_layers
        extra_inputs = self.extra_block_inputs(token_ids, x)
        hidden = self.hidden
        # Draft models read, and encoders add to, block outputs: complete sums on every rank.
        reads_outputs = hidden is not None or num_layer_vectors > 0
        self._pause_fused_all_reduces(reads_outputs)
        fused_output = None
        # torch.compile traces the blocks one by one and fuses in its own way.
        if not reads_outputs and self.layers and not any(extra_inputs) and not is_compiling():
            fused_output = self._run_fused_blocks(x, angles, caches, plans, rows)
        if fused_output is not None:
            out: torch.Tensor = self.norm.forward_add(*fused_output)[0]  # type: ignore[operator]
            return out
        residual = None
        # The last block computes only the rows in ``rows``, unless all of its outputs are read.
        reads_last = hidden is not None or num_layer_vectors == len(self.layers)
        last = None if reads_last else len(self.layers) - 1
        for index, block in enumerate(self.layers):
            if hidden is not None:
                hidden.record_block_input(index, x, residual)
            output_rows = rows if index == last else None
            cache_index = self.cache_indices[index]
            cache: Any
            plan: Any
            if isinstance(cache_index, int):
                cache, plan = caches[cache_index], plans[cache_index]
            else:
                cache, plan = [caches[i] for i in cache_index], [plans[i] for i in cache_index]
            inputs = *angles[index], cache, plan, output_rows, *extra_inputs[index]
            x, residual = block(x, residual, *inputs)
            if index < num_layer_vectors:
                assert embedded is not None  # it has the vectors
                x = embedded.add_after_block(index, x)
        normalised: torch.Tensor = self.norm.forward_add(x, residual)[0]  # type: ignore[operator]
        if hidden is not None:
            hidden.record_final_output(normalised)
        return normalised[rows] if reads_last and rows is not None else normalised

    def _run_fused_blocks(
        self,
        x: torch.Tensor,
        angles: Sequence[Any],
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Compute all blocks in one fused call; return None if that is not possible."""
        blocks = [*self.layers]
        cached_blocks, cache_indices, call = self._joined
        # only_blocks swaps the blocks, so the callable is rebuilt if the list differs.
        if blocks != cached_blocks:
            join = getattr(type(blocks[0]), "joined", None)
            cache_indices = [index for index in self.cache_indices if isinstance(index, int)]
            # Forward hooks run only if each block is called by itself.
            is_hooked = any(block._forward_pre_hooks for block in blocks)
            is_fusible = join is not None and len(cache_indices) == len(blocks) and not is_hooked
            call = join(blocks) if is_fusible else None  # type: ignore[misc]
            self._joined = blocks, cache_indices, call
        if call is None:
            return None
        ordered_caches = [caches[index] for index in cache_indices]
        return call(x, angles, ordered_caches, [plans[index] for index in cache_indices], rows)


class CausalLM(CausalModel):
    """A decoder with an LM head, whose modules have the names that checkpoints use.

    Args:
        norm: builds the norm after the last block.
        embedding: a table shared with another module; None builds one. A tied LM head uses the
            table.
    Attributes:
        unread: prefixes of the names of tensors that a checkpoint may have and that are not loaded.
        renamed: maps the name of a checkpoint's tensor to the name of a parameter of this module;
            None for a tensor that is not used.
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
        # A quantization scheme must know that a tied embedding's weight is also the LM head's.
        tied = config.tie_word_embeddings
        self.model = self.decoder_type(
            site.at(config.frame.decoder), config, block, norm, head if tied else None, embedding
        )
        self.lm_head = shard_lm_head(
            head,
            config.vocab_size,
            config.hidden_size,
            self.model.embed_tokens if tied else None,
        )

    @property
    def attention_layers(self) -> list[Attention]:
        """Return the attention layers in order; the i-th cache belongs to the i-th layer."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    @property
    def takes_embeddings(self) -> bool:
        """Say that ``forward`` takes vectors of an encoder as ``embedded``."""
        return True

    @property
    def state_layers(self) -> list[RecurrentLayer]:
        """Return the recurrent layers in order; their caches follow those of attention layers."""
        return [module for module in self.modules() if isinstance(module, RecurrentLayer)]

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute rotary angles for at least ``count`` positions, unless done before."""
        if not self.model.tables or count > len(self.model.tables[0][0]):
            self.model.reserve_positions(count, device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: torch.Tensor | None = None,
        embedded: EmbeddedRows | None = None,
    ) -> torch.Tensor:
        """Compute the logits of the tokens in ``rows``, or of all tokens.

        After the attention, the last block computes only the tokens in ``rows``.

        Args:
            token_ids: ``[T]`` int64.
            positions: ``[T]`` int64, within each token's own sequence; or ``[3, T]``, see
                ``Decoder.angles``.
            caches: one per layer, see ``CausalModel.forward``.
            plans: one per layer, for this step.
            rows: ``[R]`` int64, indices into T.
            embedded: the tokens whose vectors an encoder has computed.
        Returns: ``[R, V]`` or ``[T, V]``.
        """
        hidden = self.model(token_ids, positions, caches, plans, rows, embedded)
        return self.lm_head(hidden)  # type: ignore[no-any-return]


def _cached_layers(block: nn.Module) -> list[Attention | SharedCacheAttention | RecurrentLayer]:
    """List the layers of a block that own or read a cache, in order."""
    rotation_indices = (*CACHED_LAYERS, SharedCacheAttention)
    return [module for module in block.modules() if isinstance(module, rotation_indices)]


Names = tuple[str, str, str, str]


class NormedBlock(nn.Module):
    """Decoder block: attention and MLP on a residual stream, with norms before or after each.

    The residual stream is kept in float32 or wider, independent of the dtype of ``x``.

    Args:
        norm: builds the norm at a site.
        names: names of the norms before and after the attention, then before and after the MLP;
            an empty name means no norm.
    """

    def __init__(
        self, site: Site, norm: Norm, names: Names, attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.names = attention, mlp, names
        # The norms keep the names of the checkpoint, so their parameters load without a mapping.
        for name in filter(None, names):
            self.add_module(name, norm(site.at(name)))

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
        plan: object,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output, not yet added, and the residual stream, as ``DecoderBlock``.

        Returns: both ``[T, H]``, or ``[R, H]`` of the tokens in ``rows``.
        """
        x, stream = self._sublayer_input(self.names[0], x, residual)
        x = self._sublayer_output(self.names[1], self.self_attn(x, cos, sin, cache, plan, rows))
        if rows is not None:
            stream = stream[rows]
        x, stream = self._sublayer_input(self.names[2], x, stream)
        return self._sublayer_output(self.names[3], self.mlp(x)), stream

    def _sublayer_input(
        self, name: str, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream; return the normed sublayer input and the stream."""
        if name:
            norm: Any = self._modules[name]
            return norm.forward_add(x, residual)  # type: ignore[no-any-return]
        # Without a norm before the sublayer, the stream still adds x and stays in float32.
        stream_dtype = torch.promote_types(x.dtype, torch.float32)
        stream = x.to(stream_dtype) if residual is None else residual + x
        return stream.to(x.dtype), stream

    def _sublayer_output(self, name: str, x: Tensor) -> Tensor:
        norm: Any = self._modules[name] if name else nn.Identity()
        return norm(x)  # type: ignore[no-any-return]


class OnePartBlock(nn.Module):
    """Decoder block with one norm and one sublayer, on a residual stream as in ``NormedBlock``.

    Args:
        norm: builds the norm at a site.
        name: the name of the norm.
        part: the sublayer, called with the arguments of attention.
    """

    def __init__(self, site: Site, norm: Norm, name: str, part: nn.Module) -> None:
        super().__init__()
        self.norm: Any = norm(site.at(name))
        self.part = part

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        cache: Any,
        plan: Any,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sublayer's output, not yet added, and the stream, as ``DecoderBlock``."""
        x, stream = self.norm.forward_add(x, residual)
        x = self.part(x, cos, sin, cache, plan, rows)
        # The sublayer has dropped the other rows already.
        return x, stream if rows is None else stream[rows]
