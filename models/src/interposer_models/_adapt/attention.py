"""Attention of adapted models: kernels for the patterns they know, sdpa for every other call.

Dimensions: B sequences, N heads, K kv heads, D size of a query and key, E size of a value, T query
tokens, U key tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from interposer import Verdict
from interposer.errors import NoCandidateError
from interposer_models._adapt.adaptation import Adaptation, kernel_name
from interposer_models._adapt.agreement import judge_agreement, normals
from interposer_models._adapt.mask_pattern import Pattern
from interposer_models._adapt.masks import MaskFacts, facts_of
from interposer_models._adapt.place import Place
from interposer_models._adapt.ragged_layout import flat, layout
from interposer_models._adapt.visit import VISITOR, Asked
from interposer_ops.attention import ragged_attention

OWNER = "_interposer_attention"
Result = tuple[Tensor, Tensor | None]
Attend = Callable[..., Result]

_EVERY_KEY = Pattern(False)
_CAUSAL = Pattern(True)


class _Key(NamedTuple):
    """The sizes that a kernel is chosen by."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    causal: bool
    windowed: bool
    dtype: torch.dtype


class AdaptedAttention:
    """The attention of one adapted model.

    Args:
        sdpa: what calls are delegated to.
    """

    def __init__(self, adaptation: Adaptation, sdpa: Attend) -> None:
        self._adaptation = adaptation
        self._sdpa = sdpa
        self._names = {id(module): name for name, module in adaptation.model.named_modules()}
        self._kernels: dict[_Key, tuple[Callable[..., Tensor] | None, str]] = {}
        self._known: dict[tuple[int, str], None] = {}

    def __deepcopy__(self, memo: object) -> AdaptedAttention:
        return self

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        is_causal: bool | None,
    ) -> Result | str:
        """Return what the attention returns, or why the call is to be delegated."""
        num_heads, num_queries, head_size = query.shape[1:]
        num_kv_heads, num_keys, value_size = value.shape[1:]
        facts = None if mask is None else facts_of(mask)
        if mask is None:
            causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
            pattern = _CAUSAL if causal and num_queries > 1 else _EVERY_KEY
            if pattern.causal and num_keys > num_queries:
                # What lies behind is not filled yet.
                key, value = key[:, :, :num_queries], value[:, :, :num_queries]
                num_keys = num_queries
        elif facts is None:
            return "its mask is none of the patterns that kernels know"
        elif (facts.num_queries, facts.num_keys) != (num_queries, num_keys):
            return "its mask is made for other queries and keys"
        else:
            pattern = facts.pattern
        unfit = _unfit(query, key, value, self._adaptation.device)
        if unfit:
            return unfit
        windowed = pattern.window is not None and pattern.window <= num_keys
        chosen = _Key(
            num_heads,
            num_kv_heads,
            head_size,
            value_size,
            pattern.causal,
            windowed,
            query.dtype,
        )
        kernel, reason = self._kernel(module, chosen)
        if kernel is None:
            return reason
        window = pattern.window if windowed else None
        scale = head_size**-0.5 if scaling is None else scaling
        return _attend(kernel, query, key, value, pattern.causal, window, facts, scale), None

    def _kernel(self, module: nn.Module, key: _Key) -> tuple[Callable[..., Tensor] | None, str]:
        """Return the kernel and its name, or None and why there is none."""
        if key not in self._kernels:
            self._kernels[key] = self._bound(self._name(module), key)
        found = self._kernels[key]
        if found[0] is not None:
            self._tell(module, found[1], "")
        return found

    def _bound(self, name: str, key: _Key) -> tuple[Callable[..., Tensor] | None, str]:
        *_, windowed, dtype = key
        dims = dict(zip(_Key._fields[:5], key[:5], strict=True))
        options = {"softcapped": False, "sinks": False, "alibi": False}
        site = self._adaptation.site(name, dtype)
        try:
            bound = site.bind_kernel(ragged_attention, **dims, windowed=windowed, **options)
        except NoCandidateError as error:
            return None, str(error)
        verdict = _judge(bound.function, key, self._adaptation.device, self._sdpa)
        if not verdict:
            return None, f"{kernel_name(bound.choice)}: {verdict.reason}"
        return bound.function, kernel_name(bound.choice)

    def delegate(self, module: nn.Module, reason: str) -> None:
        """Note that a call was left to sdpa."""
        self._tell(module, "", f"calls are delegated to sdpa: {reason}")

    def _name(self, module: nn.Module) -> str:
        found: str | None = self._names.get(id(module))
        return type(module).__name__ if found is None else found

    def _tell(self, module: nn.Module, kernel: str, reason: str) -> None:
        if (id(module), kernel or reason) in self._known:
            return
        self._known[id(module), kernel or reason] = None
        name, places = self._name(module), self._adaptation.places
        before = places.get(name)
        if before is not None:
            kernel = kernel or before.kernel
            reason = "; ".join(dict.fromkeys(filter(None, (before.reason, reason))))
        places[name] = Place(name, type(module).__name__, kernel, reason)


def own(attention: AdaptedAttention, adaptation: Adaptation) -> None:
    """Let ``attention`` serve the modules of its model until the changes are undone."""
    for module in adaptation.model.modules():
        adaptation.changes.set(module, OWNER, attention)


def attention_by(sdpa: Attend) -> Attend:
    """Return the function that transformers calls by the name of this attention."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> Result:
        visitor = None if is_compiling() else VISITOR.get()
        if visitor is not None:
            states = (query, key, value, attention_mask)
            return visitor.attend(Asked(module, *states, scaling, is_causal, options)), None
        owner: AdaptedAttention | None = vars(module).get(OWNER)
        if owner is not None and not is_compiling():
            found: Result | str
            if dropout:
                found = "it drops out"
            elif options.get("position_bias") is not None or options.get("cache") is not None:
                found = "it has a position bias or a paged cache"
            else:
                found = owner(module, query, key, value, attention_mask, scaling, is_causal)
            if not isinstance(found, str):
                return found
            owner.delegate(module, found)
        return sdpa(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **options,
        )

    return attention


def _unfit(query: Tensor, key: Tensor, value: Tensor, device: torch.device) -> str:
    """Return why tensors cannot be read by a kernel, an empty text if they can."""
    if not query.dtype == key.dtype == value.dtype:
        return "query, key and value differ in their dtype"
    if query.device.type != device.type:
        return f"it runs on {query.device}"
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return "it records gradients"
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3]:
        return "query, key and value are of different batches"
    if not (query.shape[0] and query.shape[2] and key.shape[2]) or query.shape[1] % key.shape[1]:
        return "it is empty, or its heads share no keys evenly"
    return ""


def _attend(
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: int | None,
    facts: MaskFacts | None,
    scale: float,
) -> Tensor:
    """Return ``[B, T, N, E]``."""
    batch, num_heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    queries = query.transpose(1, 2).reshape(batch * num_queries, num_heads, -1)
    (keys, values), distance = flat((key, value))
    runs = None if facts is None else facts.runs
    starts = layout(batch, num_queries, num_keys, distance, runs, causal, query.device)
    out = kernel(queries, keys, values, *starts, scale, causal, window, None, None, None)
    return out.view(batch, num_queries, num_heads, -1)


_JUDGED = ((1, 1, 7), (2, 5, 9), (2, 6, 6))  # B, T, U


def _judge(kernel: Callable[..., Tensor], key: _Key, device: torch.device, sdpa: Attend) -> Verdict:
    """Refuse a kernel that disagrees with sdpa on small batches under a mask."""
    window = 3 if key.windowed else None
    for batch, num_queries, num_keys in _JUDGED:
        sizes = (
            (key.num_heads, num_queries, key.head_size),
            (key.num_kv_heads, num_keys, key.head_size),
            (key.num_kv_heads, num_keys, key.value_size),
        )
        query, keys, values = (normals((batch, *size), key.dtype, device) for size in sizes)
        distance = torch.arange(num_queries)[:, None] + num_keys - num_queries
        distance = distance - torch.arange(num_keys)
        seen = distance >= 0 if key.causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            seen = seen & (distance.abs() < window)
        groups = key.num_heads // key.num_kv_heads
        wide = (keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1))
        expected, _ = sdpa(
            nn.Module(), query, *wide, seen[None, None].to(device), scaling=0.25, is_causal=False
        )
        found = _attend(kernel, query, keys, values, key.causal, window, None, 0.25)
        largest = float(values.abs().max())
        reduction = num_keys + key.head_size
        verdict = judge_agreement(
            ragged_attention.tolerance, expected, found, reduction, largest, largest
        )
        if not verdict:
            return verdict
    return Verdict.accept()
