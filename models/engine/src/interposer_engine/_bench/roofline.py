"""The minimum work of a decoder's steps, and the measured roofline of a device.

``ModelWork`` counts the bytes that a step must read and its operations, for any kernels.
``measured_roofs`` measures the rates of the device.

Dimensions: T tokens of a step, C tokens in the cache before it, B sequences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from interposer import (
    AttentionSpec,
    CausalModel,
    ExpertsSpec,
    Kernel,
    Placement,
    Request,
    current_registry,
)
from interposer.records import load_target
from interposer.roofline import Seconds, Timed, copies, fastest, host_clock, matmul, readers
from interposer_engine._kv_cache_budget import is_host
from interposer_models.decoder import (
    Decoder,
    LatentAttention,
    LatentProjection,
    SharedCacheAttention,
)
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.embedding import Embedding, LMHead
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.moe.experts import Experts

# Multiplications per state element and token: decay, update by an outer product, and the product
# with a query. A delta rule also multiplies the state by a key, which is not counted.
_STATE_PRODUCTS = 3


@dataclass(frozen=True, slots=True)
class Weights:
    """Number and bytes of some weights, and the fraction that each token reads (experts: below 1).

    Attributes:
        numbers: elements of the matrices.
        num_bytes: size as stored, with scales and vectors.
        asked: the fraction of the weights that one token reads; below 1 for routed experts.
    """

    numbers: int = 0
    num_bytes: int = 0
    asked: float = 1.0

    def __add__(self, other: Weights) -> Weights:
        """Return the sum of both sets, with the fraction ``asked`` of this one."""
        return Weights(self.numbers + other.numbers, self.num_bytes + other.num_bytes, self.asked)

    def read(self, tokens: int) -> float:
        """Return the expected fraction of the weights that T tokens read, as experts are shared."""
        return 1.0 - (1.0 - self.asked) ** tokens


@dataclass(frozen=True, slots=True)
class Mixing:
    """The work of a token-mixing layer: attention or a recurrent layer.

    Attributes:
        token_bytes: cached for each token.
        products: multiplications of a query with one cached token.
        window: the most tokens that a query attends to.
        state_bytes: size of a recurrent state, independent of the context.
        state_numbers: elements of the recurrent state.
    """

    token_bytes: int = 0
    products: int = 0
    window: float = math.inf
    state_bytes: int = 0
    state_numbers: int = 0

    def read_bytes(self, context: float) -> float:
        """Return the bytes of KV cache and state that a decode step moves after a context."""
        return self.token_bytes * min(context, self.window) + 2 * self.state_bytes

    def mixed(self, tokens: int, behind: int = 0) -> float:
        """Return the multiplications of T tokens after C cached tokens, with causal attention."""
        pairs = self._pairs(behind + tokens) - self._pairs(behind)
        return self.products * pairs + _STATE_PRODUCTS * self.state_numbers * tokens

    def _pairs(self, tokens: int) -> float:
        """Return the number of query-key pairs of the first ``tokens`` tokens."""
        window = min(tokens, self.window)
        # A triangle up to the window, then a band.
        return tokens * window - window**2 / 2


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The minimum work of a decoder's steps: bytes to read, and multiplications.

    Attributes:
        weights: weights of the layers; routed experts separately, as a token needs only some.
        head: the LM head, which only one token of each sequence needs.
        layers: the layers that mix tokens.
    """

    weights: tuple[Weights, ...]
    head: Weights
    layers: tuple[Mixing, ...]

    @classmethod
    def of(cls, model: CausalModel) -> Self:
        """Count the weights and operations of a model, also before its weights are loaded.

        An embedding that shares its table with the LM head counts as the head; other embeddings do
        not count, since a step reads only rows of them.
        """
        dense, routed = Weights(), []
        head = Weights()
        # Tensors that share memory count once.
        counted: set[int] = set()
        for module in _outermost(model):
            if isinstance(module, LMHead):
                size = module.vocab_size * module.hidden_size
                operands = _pytree.tree_leaves(module.operands or tuple(module.parameters()))
                head = Weights(size, _num_bytes(operands, counted))
            elif isinstance(spec := getattr(module, "spec", None), ExpertsSpec):
                # Gated experts have three matrices, experts without a gate have two.
                numbers = (3 if isinstance(module, Experts) else 2) * spec.num_experts
                numbers *= spec.hidden_size * spec.intermediate_size
                num_bytes = sum(
                    _num_bytes(_own_values(inner), counted) for inner in module.modules()
                )
                # With expert parallelism a rank has only some of the experts a token chooses from.
                num_routed = getattr(module, "num_routed", spec.num_experts)
                routed.append(Weights(numbers, num_bytes, spec.top_k / num_routed))
            else:
                dense += Weights(_numbers(module), _num_bytes(_own_values(module), counted))
        return cls((dense, *routed), head, (*_mixing(model), *_states(model)))

    @property
    def numbers(self) -> int:
        """Number of elements of all weights."""
        return sum(part.numbers for part in (*self.weights, self.head))

    def weights_read(self, tokens: int) -> float:
        """Return the number of weights that a step of T tokens reads."""
        return sum(part.numbers * part.read(tokens) for part in (*self.weights, self.head))

    def weight_bytes(self, tokens: int) -> float:
        """Return the bytes of weights that a step of T tokens reads, as stored."""
        return sum(part.num_bytes * part.read(tokens) for part in (*self.weights, self.head))

    def context_bytes(self, context: float) -> float:
        """Return the bytes that a step reads and writes for one sequence: KV cache and states."""
        return sum(layer.read_bytes(context) for layer in self.layers)

    def operations(self, tokens: int, behind: int = 0, sequences: int = 1) -> float:
        """Return the operations of a step with T tokens per sequence, B sequences, C cached tokens.

        Only the last token of each sequence needs logits. A multiplication and an addition are two
        operations.
        """
        weights = sum(part.numbers * part.asked for part in self.weights)
        mixed = sum(layer.mixed(tokens, behind) for layer in self.layers)
        return 2.0 * sequences * (weights * tokens + mixed + self.head.numbers)


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a model's modules without token embeddings and without modules inside of experts.

    A decoder itself is skipped: its own tensors are tables of angles, of which a step reads rows.
    """
    if isinstance(module, Embedding):
        return
    if not isinstance(module, Decoder):
        yield module
    if not isinstance(getattr(module, "spec", None), ExpertsSpec):
        for child in module.children():
            yield from _outermost(child)


def _own_values(module: nn.Module) -> list[Any]:
    """Return the values of a module's attributes, but not of its submodules."""
    return _pytree.tree_leaves(vars(module))


def _numbers(module: nn.Module) -> int:
    """Return the number of elements of a module's own matrices before they are packed."""
    if isinstance(module, Linear):
        return module.in_features * sum(module.parts.values())
    if isinstance(module, LatentProjection):
        return module.heads * sum(module.sizes) * module.latent_size
    matrices_by_id = {
        id(leaf): leaf for leaf in _own_values(module) if isinstance(leaf, Tensor) and leaf.ndim > 1
    }
    return sum(tensor.numel() for tensor in matrices_by_id.values())


def _num_bytes(leaves: Iterable[Any], counted: set[int]) -> int:
    """Return the bytes of tensors with memory not yet in ``counted``, and add that memory."""
    total = 0
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        is_strided = leaf.layout is torch.strided
        storage = leaf.untyped_storage() if is_strided else None
        # Tensors without memory, as on the meta device, are identified by object instead.
        key = (storage.data_ptr() if storage is not None else 0) or id(leaf)
        if key not in counted:
            counted.add(key)
            total += leaf.numel() * leaf.itemsize if storage is None else storage.nbytes()
    return total


def _mixing(model: nn.Module) -> Iterator[Mixing]:
    """Yield the work of each attention layer; latent attention has expanded keys and values."""
    latent_by_attention = {id(m.attn): m for m in model.modules() if isinstance(m, LatentAttention)}
    for module in model.modules():
        if not isinstance(module, Attention | SharedCacheAttention):
            continue
        spec: AttentionSpec = module.backend.spec
        window = spec.window_tokens or (spec.top_k if spec.sparse else None) or math.inf
        token_bytes = module.backend.kv_layout().page_bytes() // spec.page_size
        # Scores and weighted sums take head_size multiplications each.
        width = 2 * spec.head_size
        if (latent_layer := latent_by_attention.get(id(module))) is not None:
            width = sum(latent_layer.kv_b_proj.sizes) + latent_layer.rotary_size
        yield Mixing(token_bytes, spec.num_heads * width, window)


def _states(model: CausalModel) -> Iterator[Mixing]:
    for layer in model.state_layers:
        layout = layer.state_layout()
        numbers = sum(math.prod(shape) for shape, _ in layout.parts)
        yield Mixing(state_bytes=layout.slot_bytes(), state_numbers=numbers)


READ_BYTES = 512 << 20
COPIED_BYTES = 1 << 30
_IN_FEATURES = 1024


@dataclass(frozen=True)
class Roofs:
    """The roofline of a device; each rate is the best of several measurements.

    Attributes:
        bytes_per_s: rate of reading on a host; of a copy, reads plus writes, on other devices.
        read_by: name of the way that reached ``bytes_per_s``.
        flops_per_s: operations of a matmul.
        threads: number of torch's threads on the host.
        multiplied_by: name of the way that reached ``flops_per_s``.
    """

    bytes_per_s: float
    read_by: str
    flops_per_s: float
    threads: int
    multiplied_by: str = "torch.matmul"

    def __str__(self) -> str:
        return (
            f"{self.bytes_per_s / 1e9:.1f} GB/s by {self.read_by}, "
            f"{self.flops_per_s / 1e12:.3g} TFLOP/s by {self.multiplied_by}"
        )


def measured_roofs(
    placement: Placement,
    rounds: int = 7,
    *,
    dtype: torch.dtype = torch.bfloat16,
    read_bytes: int | None = None,
    side: int | None = None,
    products: Iterable[Timed] = (),
    seconds: Seconds | None = None,
) -> Roofs:
    """Measure the roofline of a device.

    A host reads a buffer far larger than the CPU caches, in several ways, because a single way may
    be limited by overhead. Any other device copies.

    Args:
        rounds: number of measurements, of which the median counts.
        read_bytes: size of the buffer; by default 512 MiB for a host and 1 GiB for other devices.
        side: rows and columns of the square matrices of ``dtype``; by default 2048 for a host and
            8192 for other devices.
        products: more ways to multiply.
        seconds: measures times instead of the host's clock.
    """
    platform, device = placement.platform, placement.device.torch_device
    on_host = is_host(platform)
    seconds = seconds or host_clock(
        rounds, lambda: platform.synchronize(device), of_rounds=statistics.median
    )
    read_bytes = read_bytes or (READ_BYTES if on_host else COPIED_BYTES)
    side = side or (2048 if on_host else 8192)
    with torch.inference_mode():
        # Kernels of the platform join in: they may read faster than torch's reductions.
        ways = _readers(placement, read_bytes) if on_host else copies(device, read_bytes)
        bandwidth, read_by = fastest(ways, seconds)
        torch_matmul = matmul(side, dtype, device)
        matmul_rate, multiplied_by = fastest((torch_matmul, *products), seconds)
    return Roofs(bandwidth, read_by, matmul_rate, torch.get_num_threads(), multiplied_by)


def _readers(placement: Placement, size: int) -> Iterator[Timed]:
    yield from readers(size)
    # A GEMV reads the whole weight once, in as many bytes as its kernel stores.
    weight = torch.ones(size // _IN_FEATURES // 2, _IN_FEATURES, dtype=torch.bfloat16)
    x = torch.ones(1, _IN_FEATURES, dtype=torch.bfloat16)
    for name, function, constants in _linear_kernels(placement, weight):
        operands = {"weight": weight, "bias": None} | constants
        stored = _stored_bytes(operands["weight"])
        yield Timed(name, stored, lambda f=function, h=operands: f(x, h["weight"], h["bias"]))  # type: ignore[misc]


def _stored_bytes(constant: object) -> int:
    """Count the bytes of a prepared constant: a tensor, or a tuple with tensors."""
    parts = constant if isinstance(constant, tuple) else (constant,)
    return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))


def _linear_kernels(
    placement: Placement, weight: torch.Tensor
) -> Iterator[tuple[str, Callable[..., object], dict[str, Any]]]:
    """Yield the available kernels for unquantized linear layers, with prepared constants."""
    dtype = str(weight.dtype).removeprefix("torch.")
    dims = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
    capability, name = placement.device.capability, placement.platform.name
    request = Request("kernel", "linear", name, capability, dtype, dims)
    for candidate in current_registry().candidates("kernel", "linear"):
        record = candidate.record
        if isinstance(record, Kernel) and record.prepare and candidate.judge(request):
            constants = load_target(record.prepare)(weight=weight, bias=None)
            yield candidate.name, load_target(record.target), constants
