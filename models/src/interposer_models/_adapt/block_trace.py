"""The trace that finds blocks of decoders: what a layer does with its parts, these being leaves.

Leaves return random numbers in float64, and so does the attention. What a layer makes of them is
compared with what a block does: each part gets what it should, if the numbers are the same.

Dimensions: B sequences, T tokens, H hidden size, N heads, K kv heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_models._adapt.visit import Asked, MakeMask, visited_by
from interposer_ops.rotary import rotary_embedding

_log = logging.getLogger("interposer")
_BATCH, _TOKENS = 2, 3
_CLOSE = 1e-5  # some compute angles in float32, whatever they get
# What clamps numbers does nothing to small ones.
_SCALES = (1.0, 1e4)
_FEWEST_PROJECTIONS = 4
UNREAD = ("position_ids", "use_cache", "output_hidden_states")
"""Arguments of a layer that the trace shows to be passed on unread."""


class BlockParts(NamedTuple):
    """The parts of a block, by the names of children, and what its attention asks for.

    Attributes:
        query_norm, key_norm: empty where heads are not normalised.
        window_tokens: what the attention is told besides its mask.
        layer_index: of the cache.
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


class _Traced(NamedTuple):
    """The findings of one trace.

    Attributes:
        states: queries, keys and values as the attention gets them, ``[B, N, T, D]``.
        attended: ``[B, T, N, D]``.
        tables: cosines and sines, ``[B, T, D / 2]``.
    """

    calls: list[_Call]
    x: Tensor
    states: tuple[Tensor, Tensor, Tensor]
    attended: Tensor
    tables: list[Tensor]
    out: Any
    asked: Asked
    layer_index: int


class _Leaf(nn.Module):
    """A part that returns random numbers."""

    def __init__(self, part: nn.Module, label: str, calls: list[_Call], scale: float) -> None:
        super().__init__()
        vars(self).update(part=part, label=label, calls=calls, scale=scale)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["part"], name)

    def forward(self, x: Any, *args: Any, **named: Any) -> Tensor:
        """Return numbers in the shape of what the part would return."""
        part = vars(self)["part"]
        if not isinstance(x, Tensor) or args or named:
            raise TypeError("a trace follows parts that take one tensor")
        size = part.out_features if type(part) is nn.Linear else x.shape[-1]
        generator = torch.Generator().manual_seed(len(self.calls) + 2)
        drawn = torch.randn(*x.shape[:-1], size, generator=generator, dtype=x.dtype)
        out: Tensor = drawn * self.scale
        self.calls.append(_Call(self.label, x.clone(), out.clone()))
        return out


class _Attention:
    """A visitor whose attention returns random numbers."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self.asked: list[Asked] = []
        self.out: Tensor | None = None

    def mask(self, make: MakeMask, settings: Mapping[str, Any]) -> Tensor | None:
        """Return what is made."""
        return make(**settings)

    def pages(self, module: nn.Module) -> None:
        """Return None: nothing is computed over pages."""

    def attend(self, asked: Asked) -> Tensor:
        """Note the call, and return ``[B, T, N, D]``."""
        self.asked.append(asked)
        generator = torch.Generator().manual_seed(1)
        batch, heads, tokens, size = asked.query.shape
        shape = (batch, tokens, heads, size)
        self.out = torch.randn(shape, generator=generator, dtype=asked.query.dtype) * self._scale
        return self.out.clone()


class _Cache:
    """A cache that only says which layer of it is written to."""

    def __init__(self) -> None:
        self.held: list[tuple[Tensor, Tensor, int]] = []

    def update(self, key: Tensor, value: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return what is written."""
        self.held.append((key.clone(), value.clone(), index))
        return key, value


class _Unread:
    """An argument that a block does without, so that its layer may only pass it on."""

    def __bool__(self) -> bool:
        raise TypeError("a trace follows layers that only pass this on")


def attention_child(module: nn.Module) -> str | None:
    """Return the one child that has projections for an attention, None if there is no such one."""
    found = [
        label
        for label, child in module._modules.items()
        if child is not None
        and sum(isinstance(each, nn.Linear) for each in child.children()) >= _FEWEST_PROJECTIONS
    ]
    return found[0] if len(found) == 1 else None


def trace_block(module: nn.Module, attention: str, hidden_size: int) -> BlockParts | Verdict:
    """Return the parts of a pre-norm block with rotary embedding; a refusal if it is another.

    Args:
        attention: the name of the child that attends.
    """
    found = None
    for scale in _SCALES:
        parts = _traced(module, attention, hidden_size, scale)
        if isinstance(parts, Verdict):
            return parts
        if found is not None and found != parts:
            return Verdict.refuse("what it does depends on the numbers that it gets")
        found = parts
    assert found is not None
    return found


def _traced(
    module: nn.Module, attention: str, hidden_size: int, scale: float
) -> BlockParts | Verdict:
    calls: list[_Call] = []
    inner = module._modules[attention]
    assert inner is not None
    layer = _with_leaves(module, "", calls, scale)
    layer._modules[attention] = _with_leaves(inner, f"{attention}.", calls, scale)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    x = drawn(_BATCH, _TOKENS, hidden_size)
    size = getattr(inner, "head_dim", None)
    if not isinstance(size, int) or size % 2:
        return Verdict.refuse("its attention names no size of heads")
    tables = [drawn(_BATCH, _TOKENS, size // 2) / scale for _ in range(2)]
    visitor, cache = _Attention(scale), _Cache()
    mask = drawn(_BATCH, 1, _TOKENS, _TOKENS)
    try:
        with torch.no_grad(), visited_by(visitor):
            out = type(module).forward(
                layer,
                x.clone(),
                attention_mask=mask,
                past_key_values=cache,
                **{name: _Unread() for name in UNREAD},
                position_embeddings=tuple(torch.cat((each, each), -1) for each in tables),
            )
    except Exception as error:  # noqa: BLE001 - where a trace ends is no fault of the class
        _log.debug("%s is no block: its trace ended with %r", type(module).__name__, error)
        return Verdict.refuse(f"its trace ended with {type(error).__name__}: {error}")
    if len(visitor.asked) != 1 or len(cache.held) != 1 or visitor.out is None:
        return Verdict.refuse("it does not attend once over a cache")
    (asked,), ((key, value, index),) = visitor.asked, cache.held
    verdict = _judge_attention(asked, mask, inner)
    if not verdict:
        return verdict
    if not _same(asked.key, key) or not _same(asked.value, value):
        return Verdict.refuse("it attends to others than the keys and values of its cache")
    states = asked.query, key, value
    return _matched(
        module, attention, _Traced(calls, x, states, visitor.out, tables, out, asked, index)
    )


def _with_leaves(module: nn.Module, prefix: str, calls: list[_Call], scale: float) -> nn.Module:
    """Return a copy of a module without a forward of its own, whose children are leaves."""
    twin: Any = object.__new__(type(module))
    vars(twin).update(vars(module))
    vars(twin).pop("forward", None)
    vars(twin)["_modules"] = {
        name: None if child is None else _Leaf(child, f"{prefix}{name}", calls, scale)
        for name, child in module._modules.items()
    }
    found: nn.Module = twin
    return found


def _judge_attention(asked: Asked, mask: Tensor, inner: nn.Module) -> Verdict:
    """Refuse an attention that is told more than a causal decoder's."""
    causal = asked.is_causal
    causal = getattr(inner, "is_causal", True) if causal is None else causal
    if asked.mask is not mask or not causal:
        return Verdict.refuse("its attention has a mask of its own, or is not causal")
    told = {
        name
        for name, each in asked.options.items()
        if name != "sliding_window"
        and each is not None
        and each is not False
        and not isinstance(each, _Unread)
    }
    if told:
        return Verdict.refuse(f"its attention is told {', '.join(sorted(told))}")
    if asked.query.shape[-1] != asked.value.shape[-1]:
        return Verdict.refuse("its keys and values differ in size")
    return Verdict.accept()


def _matched(module: nn.Module, attention: str, traced: _Traced) -> BlockParts | Verdict:
    """Return the parts, found by who got and gave which numbers."""
    calls, x, states, attended, tables, out, asked, index = traced
    labels = {call.label for call in calls}
    if len(labels) != len(calls):
        return Verdict.refuse("it calls a part twice")

    def reading(x: Tensor, kind: type[nn.Module] = nn.Module) -> list[_Call]:
        found = (call for call in calls if isinstance(module.get_submodule(call.label), kind))
        return [call for call in found if _same(call.x, x)]

    first = reading(x)
    if len(first) != 1:
        return Verdict.refuse("no norm alone reads what it is given")
    names, heads = {}, {}
    for label, state, turned in zip(
        ("query", "key", "value"), states, (True, True, False), strict=True
    ):
        for call in reading(first[0].out, nn.Linear):
            whole = call.out.unflatten(-1, (-1, state.shape[-1]))
            for norm in (None, *reading(whole)):
                plain = whole if norm is None else norm.out
                made = _turned(plain, tables) if turned else plain.transpose(1, 2)
                if _same(made, state):
                    names[label], heads[label] = call.label, "" if norm is None else norm.label
    if len(set(names.values())) != 3 or heads["value"]:
        return Verdict.refuse(
            "its queries, keys and values are not projections, rotated as kernels rotate them"
        )
    mixed = reading(attended.flatten(2), nn.Linear)
    if len(mixed) != 1:
        return Verdict.refuse("no projection alone reads what is attended to")
    stream = x + mixed[0].out
    second = reading(stream)
    if len(second) != 1:
        return Verdict.refuse("no norm alone reads the sum of its input and its attention")
    last = reading(second[0].out)
    if len(last) != 1 or not isinstance(out, Tensor) or not _same(out, stream + last[0].out):
        return Verdict.refuse("it does not return the sum of both and of one perceptron")
    used = {first[0].label, *names.values(), *filter(None, heads.values())}
    used |= {mixed[0].label, second[0].label, last[0].label}
    if used != labels:
        return Verdict.refuse("it calls other parts besides")
    window = asked.options.get("sliding_window")
    size = states[0].shape[-1]
    return BlockParts(
        first[0].label,
        attention,
        second[0].label,
        last[0].label,
        names["query"],
        names["key"],
        names["value"],
        mixed[0].label,
        heads["query"],
        heads["key"],
        states[0].shape[1],
        states[1].shape[1],
        size,
        size**-0.5 if asked.scaling is None else float(asked.scaling),
        window if isinstance(window, int) else None,
        index,
    )


def _same(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() <= _CLOSE * expected.abs().max())


def _turned(rows: Tensor, tables: list[Tensor]) -> Tensor:
    """Return ``[B, N, T, D]`` of ``[B, T, N, D]`` rotated by the op."""
    flat = rows.flatten(0, 1)
    rotated, _ = rotary_embedding.reference(flat, flat, *(each.flatten(0, 1) for each in tables))
    return rotated.view(rows.shape).transpose(1, 2)
