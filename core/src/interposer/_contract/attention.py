"""The attention contract: the static request, the paged batch, the cache layout, the backend.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from interposer._contract.capability import Capability
from interposer._contract.errors import MissingMemberError, RecordError
from interposer._contract.layer import Site
from interposer._contract.request import AttentionType
from interposer._contract.verdict import Verdict

UINT4: torch.dtype = vars(torch)["uint4"]  # which torch's stubs leave out


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The static request of one attention layer.

    Attributes:
        type: with ``encoder_decoder`` a query sees all of a source, which other tokens stored:
            ``forward`` writes it, by slots without a sequence, and ``forward_stored`` reads it.
        cache_dtype: of stored keys and values. Where it is not ``dtype``, they are divided by
            scales and rounded when they are stored; uint4 is groups with a step and a base each.
        head_scales: these scales are one per kv head, not one for all.
        window_tokens: a token sees itself and the ``window_tokens - 1`` before it; None sees all.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None leaves them.
        sinks: one learned score per head joins the softmax.
        latent: a cached vector is the key of all heads (MLA), and begins with their value.
        latent_size: elements of that value, and of the output; 0 unless ``latent``.
        sparse: an indexer names the tokens that are attended to.
        top_k: how many it names at most; 0 unless ``sparse`` or an indexer.
        prefix_lm: tokens of a prompt see each other in both directions, those behind it what is
            before them; see ``AttentionBatch.prefix_lens``.
        alibi: scores are lowered by the distance times a slope of the head, which follows from the
            number of heads, see ``interposer_ops.attention.alibi_slopes``.
        alibi_bias_max: the smallest of these slopes is 2 to the power of minus this.
        shared: further layers with an equal spec attend to the cache that a layer writes.
    """

    version: ClassVar[int] = 1

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    page_size: int
    scale: float
    type: AttentionType = "decoder"
    head_scales: bool = False
    window_tokens: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False
    latent_size: int = 0
    sparse: bool = False
    top_k: int = 0
    prefix_lm: bool = False
    alibi: bool = False
    alibi_bias_max: float = 8.0
    shared: bool = False

    @property
    def is_quantized(self) -> bool:
        """Say whether the cache holds rounded multiples of the layer's scales."""
        return self.cache_dtype not in (self.dtype, UINT4)

    def dims(self) -> dict[str, int | float | str | bool]:
        """Return what a declarative ``Requires`` can judge; ops name the same facts the same."""
        rest = self.head_size - self.latent_size
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "page_size": self.page_size,
            "windowed": self.window_tokens is not None,
            "softcapped": self.softcap is not None,
            "sinks": self.sinks,
            "alibi": self.alibi,
            "prefix_lm": self.prefix_lm,
            "cache_dtype": str(self.cache_dtype).removeprefix("torch."),
            **({"latent_size": self.latent_size, "rotary_size": rest} if self.latent else {}),
            **({"top_k": self.top_k} if self.top_k else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values; dtypes by their names."""
        return {n: str(v) if isinstance(v, torch.dtype) else v for n, v in asdict(self).items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AttentionSpec:
        """Return what ``to_json`` was asked of."""
        names = {name: value[name].removeprefix("torch.") for name in ("dtype", "cache_dtype")}
        return cls(**{**value, **{name: getattr(torch, names[name]) for name in names}})

    def judge_plain_decoder(self) -> Verdict:
        """Accept decoder attention over an unconverted cache, at most windowed or softcapped.

        Heads share kv heads in groups of one size. Plain backends ask it in ``accepts``.
        """
        if self.type != "decoder":
            return Verdict.refuse(f"serves decoder attention only, got {self.type}")
        if self.cache_dtype != self.dtype:
            return Verdict.refuse(f"stores the cache as {self.dtype}, asked for {self.cache_dtype}")
        for feature in ("sinks", "latent", "sparse", "prefix_lm", "alibi"):
            if getattr(self, feature):
                return Verdict.refuse(f"does not do {feature}")
        if self.shared:
            return Verdict.refuse("does not attend to a cache without writing it")
        if self.num_heads % self.num_kv_heads:
            heads = f"{self.num_heads} heads, {self.num_kv_heads} kv heads"
            return Verdict.refuse(f"needs heads in groups of one size, got {heads}")
        return Verdict.accept()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The minimal paged batch: sequences of any query length, concatenated without padding.

    Attributes:
        query_starts: ``[B + 1]`` int64; sequence b's tokens go from entry b to before entry b + 1.
        seq_lens: ``[B]`` int64; tokens in the cache after this step, the query's own included.
        page_table: ``[B, P]`` int64; pages of each sequence in order, padded with 0. Where none of
            a page's tokens is seen any more, a page of zeros may stand in its place.
        slots: ``[T]`` int64; where each token's key and value go: page * page size + offset.
        max_query_tokens: the longest query of the batch.
        max_seq_tokens: the largest of ``seq_lens``.
        state_slots: ``[B]`` int64, row of recurrent states that each sequence has, negative for
            padding; None where no layer has a state.
        prefix_lens: ``[B]`` int64, first tokens of each sequence that see each other in both
            directions, all of which are in the cache; None where no layer asks for it, and in steps
            none of whose tokens sees a later one.
        host: the same batch in host memory, where whoever made it had it there; see ``on_host``.
    """

    version: ClassVar[int] = 1

    query_starts: Tensor
    seq_lens: Tensor
    page_table: Tensor
    slots: Tensor
    max_query_tokens: int
    max_seq_tokens: int
    state_slots: Tensor | None = None
    prefix_lens: Tensor | None = None
    host: AttentionBatch | None = None

    def on_host(self) -> AttentionBatch:
        """Return the batch in host memory; where no copy came along, the device is waited for."""
        if self.host is not None or self.slots.device.type == "cpu":
            return self.host or self
        names = ("query_starts", "seq_lens", "page_table", "slots", "state_slots", "prefix_lens")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{n: t.cpu() for n, t in tensors.items() if t is not None})


def _empty(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """The layout of one layer's cache in memory, as a backend wants it.

    Attributes:
        page_shape: shape of one page, such as ``(2, S, K, D)``.
        page_axis: where the page dimension is inserted into ``page_shape``.
        stride_order: axes of the full shape from the slowest to the fastest in memory.
        dtype: of the stored keys and values.
        layers_axis: where a dimension over all layers of the backend goes, counted in memory
            order; None keeps the layers apart.
    """

    page_shape: tuple[int, ...]
    page_axis: int
    stride_order: tuple[int, ...]
    dtype: torch.dtype
    layers_axis: int | None = None

    def __post_init__(self) -> None:
        axes = len(self.page_shape) + 1
        if not 0 <= self.page_axis < axes:
            raise RecordError(f"page_axis {self.page_axis} is not an axis of {axes} dimensions")
        if sorted(self.stride_order) != list(range(axes)):
            raise RecordError(f"stride_order {self.stride_order} does not order {axes} axes")
        if self.layers_axis is not None and not 0 <= self.layers_axis <= axes:
            raise RecordError(f"layers_axis {self.layers_axis} is not among {axes + 1} dimensions")

    @classmethod
    def keys_first(cls, spec: AttentionSpec) -> KVCacheLayout:
        """Return ``[2, P, S, K, D]``, all keys before all values, as most kernels read them."""
        page_shape = (2, spec.page_size, spec.num_kv_heads, spec.head_size)
        return cls(page_shape, 1, (0, 1, 2, 3, 4), spec.cache_dtype)

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """Return the shape of a cache of ``num_pages`` pages."""
        return (*self.page_shape[: self.page_axis], num_pages, *self.page_shape[self.page_axis :])

    def page_bytes(self) -> int:
        """Return the bytes of one page of one layer."""
        return math.prod(self.page_shape) * self.dtype.itemsize

    def allocate(
        self,
        num_layers: int,
        num_pages: int,
        device: str,
        empty: Callable[[Sequence[int], torch.dtype, str], Tensor] = _empty,
    ) -> list[Tensor]:
        """Return a cache of ``shape(num_pages)`` per layer, in the declared order.

        It is not initialised, so that memory is taken only where tokens are stored. Backends
        never read a slot that no token of the sequence was written to.

        Args:
            empty: returns uninitialised memory of a shape and dtype on a device.
        """
        shape = self.shape(num_pages)
        stored = [shape[axis] for axis in self.stride_order]
        if self.layers_axis is None:
            layers = [empty(stored, self.dtype, device) for _ in range(num_layers)]
        else:
            stored.insert(self.layers_axis, num_layers)
            layers = list(empty(stored, self.dtype, device).unbind(self.layers_axis))
        inverse = [self.stride_order.index(axis) for axis in range(len(shape))]
        return [layer.permute(inverse) for layer in layers]


class AttentionBackend(ABC):
    """One way to compute attention over a paged cache.

    A backend is constructed once per distinct spec; layers with equal specs share it, and its
    ``plan`` runs once per step for all of them. Members for caches of another dtype and for sinks
    are called where ``accepts`` took such a spec.

    Attributes:
        plans_on_host: what depends on the values of a batch is computed on the host. A graph does
            not repeat that, so ``plan_fixed`` and ``update_plan`` are called around it; ``plan`` of
            another backend that promises ``graph_safe`` is a part of it.
        takes_out: ``forward``, and what is called in its place for such a spec, take ``out`` too:
            contiguous memory of the shape and dtype of the result, which is written and returned.
    """

    plans_on_host: ClassVar[bool] = False
    takes_out: ClassVar[bool] = False

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        self.spec = spec

    @property
    def seen_tokens(self) -> int | None:
        """The tokens that one sees at most, itself included; None where it may see all.

        Pages that lie before these are taken from a sequence after the step.
        """
        return self.spec.window_tokens

    @classmethod
    @abstractmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Say whether the backend can serve ``spec`` on a device with ``capability``."""

    @abstractmethod
    def kv_layout(self) -> KVCacheLayout:
        """Return the layout that ``forward`` expects of its cache."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> Any:
        """Return what ``forward`` needs of ``batch``, computed once per step."""

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        """Write ``key`` and ``value`` to ``cache``, then attend.

        Args:
            query: ``[T, N, D]``.
            key: ``[T, K, D]``.
            value: ``[T, K, D]``.
            cache: of ``kv_layout()``.
            plan: of this step.
        Returns: ``[T, N, D]``, dtype of ``query``.
        """

    def plan_fixed(self, batch: AttentionBatch) -> Any:
        """Return a plan for a graph; what it holds keeps its address when it is updated.

        Args:
            batch: of one token per sequence, in the memory that the graph reads, which is written
                anew before each update; shapes and both numbers stay as they are.
        Raises: MissingMemberError: unless it is overridden, with ``plans_on_host``.
        """
        raise _lacking(self, "plans on the host", "plan_fixed")

    def update_plan(self, plan: Any, batch: AttentionBatch) -> None:
        """Make ``plan``, of ``plan_fixed``, that of ``batch``, before each replay; see there."""
        raise _lacking(self, "plans on the host", "update_plan")

    def prepare_scales(self, key_scale: Tensor, value_scale: Tensor) -> Any:
        """Return what ``forward_quantized`` wants of the scales of one layer.

        Called once for each layer, after its weights were loaded.

        Args:
            key_scale: ``[1]``, or ``[K]`` with ``head_scales``, float32, positive.
            value_scale: shape and dtype of ``key_scale``.
        """
        return key_scale, value_scale

    def forward_quantized(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any, scales: Any
    ) -> Tensor:
        """Do what ``forward`` does, over a cache of another dtype than the spec's.

        Args:
            scales: of ``prepare_scales``.
        Raises: MissingMemberError: unless it is overridden.
        """
        raise _lacking(self, f"accepted a cache of {self.spec.cache_dtype}", "forward_quantized")

    def forward_with_sinks(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any, sinks: Tensor
    ) -> Tensor:
        """Do what ``forward`` does, with one score per head more in the softmax.

        Args:
            sinks: ``[N]``, dtype of ``query``: scores of the layer that have no value.
        Raises: MissingMemberError: unless it is overridden.
        """
        raise _lacking(self, "accepted a spec with sinks", "forward_with_sinks")

    def forward_quantized_with_sinks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        plan: Any,
        scales: Any,
        sinks: Tensor,
    ) -> Tensor:
        """Do what ``forward_quantized`` does, with one score per head more in the softmax.

        Raises: MissingMemberError: unless it is overridden.
        """
        accepted = f"accepted a spec with sinks and a cache of {self.spec.cache_dtype}"
        raise _lacking(self, accepted, "forward_quantized_with_sinks")

    def forward_stored(
        self,
        query: Tensor,
        cache: Tensor,
        plan: Any,
        scales: Any = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend to the keys and values that another layer stored in this step and before.

        Backends that accept specs with ``shared`` or of sources are asked. Nothing is written.

        Args:
            query: ``[T, N, D]``.
            cache: that the other layer wrote, by this backend.
            plan: of this step.
            scales: of ``prepare_scales`` for the other layer; None where the cache has none.
            sinks: ``[N]``, dtype of ``query``, where the spec has some.
        Returns: ``[T, N, D]``, dtype of ``query``.
        Raises: MissingMemberError: unless it is overridden.
        """
        raise _lacking(self, "accepted a spec with a shared cache", "forward_stored")


def _lacking(backend: AttentionBackend, said: str, member: str) -> MissingMemberError:
    text = f"{type(backend).__name__} {said} but has no {member}. Try: override it, or refuse such "
    return MissingMemberError(f"{text}specs in accepts, or do not promise graph_safe")
