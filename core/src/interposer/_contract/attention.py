"""The attention contract: the static request, the paged batch, the cache layout, the backend.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, P pages, S page size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from interposer._contract.capability import Capability
from interposer._contract.errors import MissingMemberError, RecordError
from interposer._contract.former_attention import adapt_former_methods
from interposer._contract.layer import Site
from interposer._contract.request import AttentionType
from interposer._contract.verdict import Verdict

UINT4: torch.dtype = vars(torch)["uint4"]  # torch's type stubs omit it


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Static properties of one attention layer, by which a backend is chosen and built.

    Attributes:
        type: with ``encoder_decoder`` a query attends to all tokens of the encoder input.
            ``forward`` writes the keys and values of these tokens, to slots without a sequence, and
            reads them with ``stored``.
        cache_dtype: of stored keys and values. If different from ``dtype``, stored keys and values
            are divided by scales and rounded; uint4 is quantized in groups with a step and a base
            each.
        head_scales: one scale per kv head instead of one for all.
        window_tokens: a token attends to itself and the ``window_tokens - 1`` tokens before it;
            None means no window.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None leaves scores unchanged.
        sinks: one learned score per head joins the softmax.
        latent: a cached vector is the key of all heads (MLA), and the first elements are the value.
        latent_size: size of that value, and of the output; 0 unless ``latent``.
        sparse: an indexer selects the tokens that are attended to.
        top_k: largest number of selected tokens; 0 unless ``sparse`` or an indexer.
        prefix_lm: the first tokens of a prompt attend to each other in both directions, and later
            tokens attend causally; see ``AttentionBatch.prefix_lens``.
        alibi: scores are lowered by the distance times a slope of the head, which depends on the
            number of heads, see ``interposer_ops.attention.alibi_slopes``.
        alibi_bias_max: the smallest of these slopes is ``2 ** -alibi_bias_max``.
        shared: other layers with an equal spec attend to the cache that one layer writes.
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
        """Tell whether the cache holds values divided by the layer's scales and rounded."""
        return self.cache_dtype not in (self.dtype, UINT4)

    def dims(self) -> dict[str, int | float | str | bool]:
        """Return the dims that a declarative ``Requires`` can judge, named as in ops."""
        rotary_size = self.head_size - self.latent_size
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
            **(
                {"latent_size": self.latent_size, "rotary_size": rotary_size} if self.latent else {}
            ),
            **({"top_k": self.top_k} if self.top_k else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values; dtypes by name."""
        return {n: str(v) if isinstance(v, torch.dtype) else v for n, v in asdict(self).items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AttentionSpec:
        """Restore a specification from the values of ``to_json``."""
        names = {name: value[name].removeprefix("torch.") for name in ("dtype", "cache_dtype")}
        return cls(**{**value, **{name: getattr(torch, names[name]) for name in names}})

    def judge_plain_decoder(self) -> Verdict:
        """Accept decoder attention over an unquantized cache, at most windowed or softcapped.

        The number of heads must be a multiple of the number of kv heads. Plain backends call this
        in ``accepts``.
        """
        if self.type != "decoder":
            return Verdict.refuse(f"serves decoder attention only, got {self.type}")
        if self.cache_dtype != self.dtype:
            return Verdict.refuse(f"stores the cache as {self.dtype}, requested {self.cache_dtype}")
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
        query_starts: ``[B + 1]`` int64; the tokens of sequence b are ``query_starts[b]`` up to,
            excluding, ``query_starts[b + 1]``.
        seq_lens: ``[B]`` int64; tokens in the cache after this step, including the query.
        page_table: ``[B, P]`` int64; pages of each sequence in order, padded with 0. A page of
            zeros may replace a page that left the window.
        slots: ``[T]`` int64; the slot of each token's key and value: page * page size + offset.
        max_query_tokens: the longest query of the batch.
        max_seq_tokens: the largest of ``seq_lens``.
        state_slots: ``[B]`` int64, row of each sequence in the recurrent states, negative for
            padding; None if no layer has a state.
        prefix_lens: ``[B]`` int64, number of first tokens of each sequence that attend to each
            other in both directions, all of which are in the cache. None if no layer uses it, and
            in steps without bidirectional attention.
        host: a copy of the batch in host memory, if available; see ``on_host``.
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
        """Return the batch in host memory; without a stored copy this waits for the device."""
        if self.host is not None or self.slots.device.type == "cpu":
            return self.host or self
        names = ("query_starts", "seq_lens", "page_table", "slots", "state_slots", "prefix_lens")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{n: t.cpu() for n, t in tensors.items() if t is not None})


def _empty(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """The memory layout of one layer's cache, as a backend requires it.

    Attributes:
        page_shape: shape of one page, such as ``(2, S, K, D)``.
        page_axis: axis at which the page dimension is inserted into ``page_shape``.
        stride_order: axes of the full shape from the slowest to the fastest in memory.
        dtype: of the stored keys and values.
        layers_axis: axis, in memory order, of a dimension over all layers of the backend; None
            allocates every layer separately.
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
        """Allocate a cache of ``shape(num_pages)`` per layer, in the declared memory order.

        The memory stays uninitialised, so that the system commits memory only where tokens are
        stored. Backends never read a slot to which no token of the sequence was written.

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
        # Memory is allocated in stride order; the inverse permutation gives a view with the
        # logical shape.
        inverse = [self.stride_order.index(axis) for axis in range(len(shape))]
        return [layer.permute(inverse) for layer in layers]


class AttentionBackend(ABC):
    """One implementation of attention over a paged cache.

    A backend is constructed once per distinct spec. Layers with equal specs share the backend, and
    ``plan`` runs once per step for all these layers.

    Attributes:
        plans_on_host: the plan depends on values of the batch that are read on the host. A graph
            does not repeat host code, so ``plan_fixed`` and ``update_plan`` are called around the
            graph. Without this flag, ``plan`` of a backend that promises ``graph_safe`` becomes
            part of the graph.
    """

    plans_on_host: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        adapt_former_methods(cls)

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        self.spec = spec

    @property
    def seen_tokens(self) -> int | None:
        """Largest number of tokens that a token attends to, itself included; None if unlimited.

        Pages that hold only older tokens are freed after the step.
        """
        return self.spec.window_tokens

    @classmethod
    @abstractmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Judge whether the backend can serve ``spec`` on a device with ``capability``."""

    @abstractmethod
    def kv_layout(self) -> KVCacheLayout:
        """Return the cache layout that ``forward`` expects."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> Any:
        """Precompute the data of ``batch`` that every ``forward`` of this step needs."""

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        """Write ``key`` and ``value`` to ``cache``, then compute the attention of ``query``.

        A subclass adds the keyword-only parameters that it supports, all of them optional:

        - ``scales=None``: result of ``prepare_scales``, for specs that are ``is_quantized``.
        - ``sinks=None``: ``[N]``, dtype of ``query``: learned scores in the softmax, which have no
          value vector; for specs with ``sinks``.
        - ``stored=False``: True reads the keys and values that the cache holds already and writes
          nothing; ``key`` and ``value`` have no tokens. For specs with ``shared``, whose cache
          another layer writes, and for encoder inputs.
        - ``out=None``: contiguous memory of the result's shape and dtype, to write and return.

        The signature is the declaration: a backend is not chosen for a spec that needs a keyword
        which ``forward`` lacks. Callers pass only the keywords that the spec needs, and ``out``
        only to backends that take it.

        Args:
            query: ``[T, N, D]``.
            key: ``[T, K, D]``.
            value: ``[T, K, D]``.
            cache: of ``kv_layout()``.
            plan: of this step.
        Returns: ``[T, N, D]``, dtype of ``query``.
        """

    @classmethod
    def takes(cls, keyword: str) -> bool:
        """Tell whether ``forward`` accepts ``keyword``; ``**options`` defer to the parent class."""
        for parent in cls.__mro__:
            if function := vars(parent).get("forward"):
                parameters = signature(function).parameters
                if keyword in parameters:
                    return True
                if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
                    break
        return False

    @classmethod
    def check_keywords(cls, spec: AttentionSpec) -> None:
        """Check that ``forward`` takes the keywords that ``spec`` needs.

        Raises: MissingMemberError: ``forward`` lacks one of them.
        """
        needs_stored = spec.shared or spec.type == "encoder_decoder"
        for is_needed, keyword, feature in (
            (spec.is_quantized, "scales", f"a cache of {spec.cache_dtype}"),
            (spec.sinks, "sinks", "sinks"),
            (needs_stored, "stored", "keys and values that are stored already"),
        ):
            if is_needed and not cls.takes(keyword):
                raise MissingMemberError(
                    f"{cls.__name__} accepted a spec with {feature}, but its forward takes no "
                    f"{keyword!r}. Try: add the keyword, or refuse such specs in accepts"
                )

    def plan_fixed(self, batch: AttentionBatch) -> Any:
        """Create a plan for a graph; updates keep the addresses of the plan's tensors.

        Args:
            batch: one token per sequence, in the memory that the graph reads and that is rewritten
                before each update; shapes and both ``max_`` numbers never change.
        Raises: MissingMemberError: not overridden. Backends with ``plans_on_host`` must override
            this member.
        """
        raise _lacking(self, "plan_fixed")

    def update_plan(self, plan: Any, batch: AttentionBatch) -> None:
        """Update ``plan``, made by ``plan_fixed``, to ``batch`` before a replay of the graph."""
        raise _lacking(self, "update_plan")

    def prepare_scales(self, key_scale: Tensor, value_scale: Tensor) -> Any:
        """Convert the scales of one layer to the ``scales`` that ``forward`` takes.

        Called once for each layer, after the layer's weights were loaded.

        Args:
            key_scale: ``[1]``, or ``[K]`` with ``head_scales``, float32, positive.
            value_scale: shape and dtype of ``key_scale``.
        """
        return key_scale, value_scale


def _lacking(backend: AttentionBackend, member: str) -> MissingMemberError:
    return MissingMemberError(
        f"{type(backend).__name__} plans on the host but has no {member}. "
        "Try: override it, or do not promise graph_safe"
    )
