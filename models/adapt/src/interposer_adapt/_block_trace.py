"""Trace of a layer that recognizes pre-norm decoder blocks by their data flow.

The layer's parts and attention are replaced by leaves that return random float64 numbers. The
layer is a decoder block if each part receives exactly the numbers that a block would pass to it.

Dimensions: B sequences, T tokens, H hidden size, N heads, K kv heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_adapt._cache_argument import cache_argument
from interposer_adapt._forwards import AttentionCall, MakeMask, intercepted_by
from interposer_ops.rotary import rotary_embedding

_log = logging.getLogger("interposer")
_BATCH, _TOKENS = 2, 3
_RELATIVE_TOLERANCE = 1e-5  # some layers compute angles in float32 for any input
# The second scale exposes layers that clamp activations.
_SCALES = (1.0, 1e4)
_MIN_PROJECTIONS = 4
UNREAD_ARGUMENTS = ("position_ids", "use_cache", "output_hidden_states")
"""Arguments that a block ignores: the trace fails if a layer reads one."""


class BlockParts(NamedTuple):
    """The parts of a decoder block, by the names of child modules, and the attention's arguments.

    Attributes:
        query_norm, key_norm: "" for heads without a norm.
        window_tokens: the ``sliding_window`` option of the attention call.
        layer_index: the layer's index in the cache.
    """

    input_norm: str
    attention: str
    post_norm: str
    mlp: str
    query: str
    key: str
    value: str
    output: str
    query_norm: str
    key_norm: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window_tokens: int | None
    layer_index: int


class _Call(NamedTuple):
    label: str
    x: Tensor
    out: Tensor


class _BlockTrace(NamedTuple):
    """The calls and tensors that one trace of a block recorded.

    Attributes:
        states: queries, keys and values passed to the attention, ``[B, N, T, D]``.
        attended: the attention's result, ``[B, T, N, D]``.
        tables: cosines and sines, ``[B, T, D / 2]``.
    """

    calls: list[_Call]
    x: Tensor
    states: tuple[Tensor, Tensor, Tensor]
    attended: Tensor
    tables: list[Tensor]
    out: Any
    attention_call: AttentionCall
    layer_index: int


class _Leaf(nn.Module):
    """Stand-in for a child module that records each call and returns random numbers."""

    def __init__(self, part: nn.Module, label: str, calls: list[_Call], scale: float) -> None:
        super().__init__()
        vars(self).update(part=part, label=label, calls=calls, scale=scale)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["part"], name)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Record the call and return random numbers in the shape of the part's result."""
        part = vars(self)["part"]
        if not isinstance(x, Tensor) or args or kwargs:
            raise TypeError("a trace follows parts that take one tensor")
        size = part.out_features if type(part) is nn.Linear else x.shape[-1]
        generator = torch.Generator().manual_seed(len(self.calls) + 2)
        noise = torch.randn(*x.shape[:-1], size, generator=generator, dtype=x.dtype)
        out: Tensor = noise * self.scale
        self.calls.append(_Call(self.label, x.clone(), out.clone()))
        return out


class _TracingAttention:
    """Interceptor that records attention calls and returns random numbers."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self.calls: list[AttentionCall] = []
        self.out: Tensor | None = None

    def mask(self, make: MakeMask, settings: Mapping[str, Any]) -> Tensor | None:
        return make(**settings)

    def paged_cache(self, module: nn.Module) -> None: ...

    def attend(self, call: AttentionCall) -> Tensor:
        """Record the attention call, and return random numbers of shape ``[B, T, N, D]``."""
        self.calls.append(call)
        generator = torch.Generator().manual_seed(1)
        batch, heads, tokens, size = call.query.shape
        shape = (batch, tokens, heads, size)
        self.out = torch.randn(shape, generator=generator, dtype=call.query.dtype) * self._scale
        return self.out.clone()


class _Cache:
    """A KV cache that records the update of one layer."""

    def __init__(self) -> None:
        self.updates: list[tuple[Tensor, Tensor, int]] = []

    def update(
        self, key: Tensor, value: Tensor, index: int, kwargs: object = None
    ) -> tuple[Tensor, Tensor]:
        self.updates.append((key.clone(), value.clone(), index))
        return key, value


class _Unread:
    """An argument of a traced layer that the layer may pass on, but not read."""

    def __bool__(self) -> bool:
        raise TypeError("a trace follows layers that only pass this on")


def attention_child(module: nn.Module) -> str | None:
    """Return the name of the only child module with an attention's projections, or None."""
    names = [
        label
        for label, child in module._modules.items()
        if child is not None
        and sum(isinstance(grandchild, nn.Linear) for grandchild in child.children())
        >= _MIN_PROJECTIONS
    ]
    return names[0] if len(names) == 1 else None


def trace_block(module: nn.Module, attention: str, hidden_size: int) -> BlockParts | Verdict:
    """Return the parts of a pre-norm block with rotary embedding, or a refusal for other layers.

    Args:
        attention: the name of the child that attends.
    """
    first_parts = None
    for scale in _SCALES:
        parts = _trace(module, attention, hidden_size, scale)
        if isinstance(parts, Verdict):
            return parts
        if first_parts is not None and first_parts != parts:
            return Verdict.refuse("its data flow depends on the values of its input")
        first_parts = parts
    assert first_parts is not None
    return first_parts


def _trace(
    module: nn.Module, attention: str, hidden_size: int, scale: float
) -> BlockParts | Verdict:
    calls: list[_Call] = []
    inner = module._modules[attention]
    assert inner is not None
    layer = _with_leaves(module, "", calls, scale)
    layer._modules[attention] = _with_leaves(inner, f"{attention}.", calls, scale)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    x = random(_BATCH, _TOKENS, hidden_size)
    head_size = getattr(inner, "head_dim", None)
    if not isinstance(head_size, int) or head_size % 2:
        return Verdict.refuse("its attention has no even head_dim")
    tables = [random(_BATCH, _TOKENS, head_size // 2) / scale for _ in range(2)]
    visitor, cache = _TracingAttention(scale), _Cache()
    mask = random(_BATCH, 1, _TOKENS, _TOKENS)
    try:
        with torch.no_grad(), intercepted_by(visitor):
            out = type(module).forward(
                layer,
                x.clone(),
                attention_mask=mask,
                **{cache_argument(type(module).forward): cache},
                **{name: _Unread() for name in UNREAD_ARGUMENTS},
                position_embeddings=tuple(torch.cat((table, table), -1) for table in tables),
            )
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        _log.debug("%s is no block: its trace ended with %r", type(module).__name__, error)
        return Verdict.refuse(f"its trace ended with {type(error).__name__}: {error}")
    if len(visitor.calls) != 1 or len(cache.updates) != 1 or visitor.out is None:
        return Verdict.refuse("it does not attend once over a cache")
    (call,), ((key, value, index),) = visitor.calls, cache.updates
    verdict = _check_attention(call, mask, inner)
    if not verdict:
        return verdict
    if not _is_close(call.key, key) or not _is_close(call.value, value):
        return Verdict.refuse("its attention does not use the keys and values of its cache")
    states = call.query, key, value
    return _match_parts(
        module, attention, _BlockTrace(calls, x, states, visitor.out, tables, out, call, index)
    )


def _with_leaves(module: nn.Module, prefix: str, calls: list[_Call], scale: float) -> nn.Module:
    """Return a shallow copy of a module with stand-ins as children, and the class's forward."""
    # __init__ is skipped: the copy needs the attributes of the instance, not new weights.
    twin: Any = object.__new__(type(module))
    vars(twin).update(vars(module))
    vars(twin).pop("forward", None)
    vars(twin)["_modules"] = {
        name: None if child is None else _Leaf(child, f"{prefix}{name}", calls, scale)
        for name, child in module._modules.items()
    }
    layer: nn.Module = twin
    return layer


def _check_attention(call: AttentionCall, mask: Tensor, inner: nn.Module) -> Verdict:
    """Refuse an attention call whose arguments differ from those of a causal decoder."""
    causal = call.is_causal
    causal = getattr(inner, "is_causal", True) if causal is None else causal
    if call.mask is not mask or not causal:
        return Verdict.refuse("its attention has a mask of its own, or is not causal")
    extra_options = {
        name
        for name, option in call.options.items()
        if name != "sliding_window"
        and option is not None
        and option is not False
        and not isinstance(option, _Unread)
    }
    if extra_options:
        return Verdict.refuse(f"its attention is passed {', '.join(sorted(extra_options))}")
    if call.query.shape[-1] != call.value.shape[-1]:
        return Verdict.refuse("its keys and values differ in size")
    return Verdict.accept()


def _match_parts(module: nn.Module, attention: str, trace: _BlockTrace) -> BlockParts | Verdict:
    """Return the block's parts, found by matching the numbers that parts received and returned."""
    calls, x, states, attended, tables, out, attention_call, index = trace
    labels = {call.label for call in calls}
    if len(labels) != len(calls):
        return Verdict.refuse("it calls a part twice")

    def reading(x: Tensor, kind: type[nn.Module] = nn.Module) -> list[_Call]:
        candidates = (call for call in calls if isinstance(module.get_submodule(call.label), kind))
        return [call for call in candidates if _is_close(call.x, x)]

    # The steps follow the data flow of a block: input norm, projections with optional per-head
    # norms and rotation, output projection, post-attention norm, MLP.
    input_norms = reading(x)
    if len(input_norms) != 1:
        return Verdict.refuse("its input is not read by exactly one norm")
    projections, head_norms = {}, {}
    for label, state, is_rotated in zip(
        ("query", "key", "value"), states, (True, True, False), strict=True
    ):
        for call in reading(input_norms[0].out, nn.Linear):
            per_head = call.out.unflatten(-1, (-1, state.shape[-1]))
            # A query or key may pass a per-head norm before the rotation.
            for norm in (None, *reading(per_head)):
                normalized = per_head if norm is None else norm.out
                candidate = (
                    _rotate(normalized, tables) if is_rotated else normalized.transpose(1, 2)
                )
                if _is_close(candidate, state):
                    projections[label], head_norms[label] = (
                        call.label,
                        "" if norm is None else norm.label,
                    )
    if len(set(projections.values())) != 3 or head_norms["value"]:
        return Verdict.refuse(
            "its queries, keys and values are not projections, rotated as kernels rotate them"
        )
    output_calls = reading(attended.flatten(2), nn.Linear)
    if len(output_calls) != 1:
        return Verdict.refuse("the attention's result is not read by exactly one projection")
    residual = x + output_calls[0].out
    post_norms = reading(residual)
    if len(post_norms) != 1:
        return Verdict.refuse("the sum of input and attention is not read by exactly one norm")
    mlps = reading(post_norms[0].out)
    if len(mlps) != 1 or not isinstance(out, Tensor) or not _is_close(out, residual + mlps[0].out):
        return Verdict.refuse("it does not return the sum of input, attention and one MLP")
    called_labels = {
        input_norms[0].label,
        *projections.values(),
        *filter(None, head_norms.values()),
    }
    called_labels |= {output_calls[0].label, post_norms[0].label, mlps[0].label}
    # An additional call may have an effect that the comparisons above do not show.
    if called_labels != labels:
        return Verdict.refuse("it also calls other parts")
    window = attention_call.options.get("sliding_window")
    size = states[0].shape[-1]
    return BlockParts(
        input_norms[0].label,
        attention,
        post_norms[0].label,
        mlps[0].label,
        projections["query"],
        projections["key"],
        projections["value"],
        output_calls[0].label,
        head_norms["query"],
        head_norms["key"],
        states[0].shape[1],
        states[1].shape[1],
        size,
        size**-0.5 if attention_call.scaling is None else float(attention_call.scaling),
        window if isinstance(window, int) else None,
        index,
    )


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape:
        return False
    return bool((actual - expected).abs().max() <= _RELATIVE_TOLERANCE * expected.abs().max())


def _rotate(rows: Tensor, tables: list[Tensor]) -> Tensor:
    """Rotate ``[B, T, N, D]`` by the rotary op's reference, and return ``[B, N, T, D]``."""
    flat = rows.flatten(0, 1)
    rotated, _ = rotary_embedding.reference(flat, flat, *(table.flatten(0, 1) for table in tables))
    return rotated.view(rows.shape).transpose(1, 2)
