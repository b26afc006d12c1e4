"""The bytes that steps of a decoder have to read and the operations they take, whatever runs it.

Dimensions: T tokens of a step, C tokens in the cache before it, B sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from interposer import AttentionSpec, CausalModel, ExpertsSpec
from interposer_models._decoder.decoder import Decoder
from interposer_models._decoder.latent_attention import LatentAttention, LatentProjection
from interposer_models._decoder.stored_attention import StoredAttention
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.embedding import Embedding, LMHead
from interposer_ops.layers.experts import Experts
from interposer_ops.layers.linear import Linear

# A recurrent state is decayed, read by a key, changed by an outer product and read by a query.
_STATE_PRODUCTS = 3


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that a token asks for, or asks a share of.

    Attributes:
        numbers: elements of matrices.
        num_bytes: that are held of them, scales and vectors included.
        asked: the share that one token asks for; less than 1 of experts.
    """

    numbers: int = 0
    num_bytes: int = 0
    asked: float = 1.0

    def __add__(self, other: Weights) -> Weights:
        """Return both, of which the share of the first is asked for."""
        return Weights(self.numbers + other.numbers, self.num_bytes + other.num_bytes, self.asked)

    def read(self, tokens: int) -> float:
        """Return the share that T tokens read together, experts drawn evenly."""
        return 1.0 - (1.0 - self.asked) ** tokens


@dataclass(frozen=True, slots=True)
class Mixing:
    """The work of one layer between tokens.

    Attributes:
        token_bytes: kept of each token.
        products: multiplications of a query with what is kept of one token.
        window: how many tokens a query sees.
        state_bytes: of a recurrent state, whatever the context.
        state_numbers: elements of it.
    """

    token_bytes: int = 0
    products: int = 0
    window: float = math.inf
    state_bytes: int = 0
    state_numbers: int = 0

    def read_bytes(self, context: float) -> float:
        """Return what a decode step reads behind so many tokens; it writes a state back, too."""
        return self.token_bytes * min(context, self.window) + 2 * self.state_bytes

    def mixed(self, tokens: int, behind: int = 0) -> float:
        """Return the multiplications of T tokens behind C others, which see no later one."""
        pairs = self._pairs(behind + tokens) - self._pairs(behind)
        return self.products * pairs + _STATE_PRODUCTS * self.state_numbers * tokens

    def _pairs(self, tokens: int) -> float:
        seen = min(tokens, self.window)
        return tokens * seen - seen**2 / 2


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The least that steps of a decoder take.

    Attributes:
        weights: of layers; those of experts apart, since a token asks for some of them.
        head: of the logits, which one token of each sequence asks for.
        layers: those that mix tokens.
    """

    weights: tuple[Weights, ...]
    head: Weights
    layers: tuple[Mixing, ...]

    @classmethod
    def of(cls, model: CausalModel) -> Self:
        """Count a model; before its weights are loaded, bytes are those that it reserves for them.

        The embedding counts as the head where both share a table: a step reads a row of it else.
        """
        dense, routed = Weights(), []
        head = Weights()
        seen: set[int] = set()
        for module in _outermost(model):
            if isinstance(module, LMHead):
                size = module.vocab_size * module.hidden_size
                operands = _pytree.tree_leaves(module.operands or tuple(module.parameters()))
                head = Weights(size, _num_bytes(operands, seen))
            elif isinstance(spec := getattr(module, "spec", None), ExpertsSpec):
                numbers = (3 if isinstance(module, Experts) else 2) * spec.num_experts
                numbers *= spec.hidden_size * spec.intermediate_size
                held = sum(_num_bytes(_own(inner), seen) for inner in module.modules())
                # A rank may hold some of those that a token chooses from.
                count = getattr(module, "num_routed", spec.num_experts)
                routed.append(Weights(numbers, held, spec.top_k / count))
            else:
                dense += Weights(_numbers(module), _num_bytes(_own(module), seen))
        return cls((dense, *routed), head, (*_mixing(model), *_states(model)))

    @property
    def numbers(self) -> int:
        """The weights that there are."""
        return sum(part.numbers for part in (*self.weights, self.head))

    def weights_read(self, tokens: int) -> float:
        """Return how many weights a step of T tokens reads."""
        return sum(part.numbers * part.read(tokens) for part in (*self.weights, self.head))

    def weight_bytes(self, tokens: int) -> float:
        """Return how many bytes these take as they are held."""
        return sum(part.num_bytes * part.read(tokens) for part in (*self.weights, self.head))

    def context_bytes(self, context: float) -> float:
        """Return what a step reads of one sequence's cache, and reads and writes of its states."""
        return sum(layer.read_bytes(context) for layer in self.layers)

    def operations(self, tokens: int, behind: int = 0, sequences: int = 1) -> float:
        """Return the operations of T tokens of each of B sequences, behind C others of their own.

        The last token of each alone asks for logits; a multiplication and an addition are two.
        """
        weights = sum(part.numbers * part.asked for part in self.weights)
        mixed = sum(layer.mixed(tokens, behind) for layer in self.layers)
        return 2.0 * sequences * (weights * tokens + mixed + self.head.numbers)


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules with all inner ones, but for those of experts; tables of tokens are left out.

    What a decoder holds itself are angles of positions, of which a step reads rows as well.
    """
    if isinstance(module, Embedding):
        return
    if not isinstance(module, Decoder):
        yield module
    if not isinstance(getattr(module, "spec", None), ExpertsSpec):
        for child in module.children():
            yield from _outermost(child)


def _own(module: nn.Module) -> list[Any]:
    """Return what the attributes of a module hold, but not those of modules inside."""
    return _pytree.tree_leaves(vars(module))


def _numbers(module: nn.Module) -> int:
    """Return the elements of a module's own matrices, however they are packed."""
    if isinstance(module, Linear):
        return module.in_features * sum(module.parts.values())
    if isinstance(module, LatentProjection):
        return module.heads * sum(module.sizes) * module.latent_size
    found = {id(leaf): leaf for leaf in _own(module) if isinstance(leaf, Tensor) and leaf.ndim > 1}
    return sum(tensor.numel() for tensor in found.values())


def _num_bytes(leaves: Iterable[Any], seen: set[int]) -> int:
    """Return the bytes of the memory of tensors that nobody has ``seen``, and add it to those."""
    total = 0
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        is_strided = leaf.layout is torch.strided
        storage = leaf.untyped_storage() if is_strided else None
        # Tensors without memory of their own, as on the meta device, are told apart by themselves.
        key = (storage.data_ptr() if storage is not None else 0) or id(leaf)
        if key not in seen:
            seen.add(key)
            total += leaf.numel() * leaf.itemsize if storage is None else storage.nbytes()
    return total


def _mixing(model: nn.Module) -> Iterator[Mixing]:
    """Yield the work of layers that attend; of latent ones, with keys and values of their own."""
    latent = {id(m.attn): m for m in model.modules() if isinstance(m, LatentAttention)}
    for module in model.modules():
        if not isinstance(module, Attention | StoredAttention):
            continue
        spec: AttentionSpec = module.backend.spec
        seen = spec.window_tokens or (spec.top_k if spec.sparse else None) or math.inf
        token_bytes = module.backend.kv_layout().page_bytes() // spec.page_size
        width = 2 * spec.head_size
        if (outer := latent.get(id(module))) is not None:
            width = sum(outer.kv_b_proj.sizes) + outer.rotary_size
        yield Mixing(token_bytes, spec.num_heads * width, seen)


def _states(model: CausalModel) -> Iterator[Mixing]:
    for layer in model.state_layers:
        layout = layer.state_layout()
        numbers = sum(math.prod(shape) for shape, _ in layout.parts)
        yield Mixing(state_bytes=layout.slot_bytes(), state_numbers=numbers)
