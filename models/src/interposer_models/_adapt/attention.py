"""Attention of adapted models: kernels for the patterns they know, sdpa for every other call.

Dimensions: B sequences, N heads, K kv heads, D size of a query and key, E size of a value, T query
tokens, U key tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from interposer import Verdict
from interposer.errors import NoCandidateError
from interposer_models._adapt.adaptation import Adaptation, kernel_name
from interposer_models._adapt.agreement import judge_agreement, normals
from interposer_models._adapt.attention_options import unknown_option
from interposer_models._adapt.compiled_attention import is_traceable, labels, traced_attention
from interposer_models._adapt.mask_pattern import Pattern
from interposer_models._adapt.mask_reading import read_mask
from interposer_models._adapt.masks import MaskFacts, facts_of
from interposer_models._adapt.place import Place
from interposer_models._adapt.plain_attention import plain_attention
from interposer_models._adapt.ragged_layout import flat, layout
from interposer_models._adapt.visit import VISITOR, Asked
from interposer_ops.attention import ragged_attention

OWNER = "_interposer_attention"
_LABEL = "_interposer_label"
_CAPS = "_interposer_caps"
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
    softcapped: bool
    sinks: bool
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
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Result | str:
        """Return what the attention returns, or why the call is to be delegated."""
        num_heads, num_queries, head_size = query.shape[1:]
        num_kv_heads, num_keys, value_size = value.shape[1:]
        facts = None
        if mask is not None:
            facts = facts_of(mask) or read_mask(mask, query.shape[0], num_queries, num_keys)
            if facts is not None and facts.num_keys < num_keys:
                # Of a cache with room for more, it sees no key behind these.
                key, value = key[:, :, : facts.num_keys], value[:, :, : facts.num_keys]
                num_keys = facts.num_keys
        if mask is None:
            pattern = _CAUSAL if _is_causal(module, query, is_causal) else _EVERY_KEY
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
            softcap is not None,
            sinks is not None,
            query.dtype,
        )
        kernel, reason = self._kernel(module, chosen)
        if kernel is None:
            return reason
        window = pattern.window if windowed else None
        scale = head_size**-0.5 if scaling is None else scaling
        more = softcap, sinks
        return _attend(kernel, query, key, value, pattern.causal, window, facts, scale, *more), None

    def compute(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        is_causal: bool | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return ``[B, T, N, E]`` of a call within a compiled graph."""
        module = self._adaptation.model.get_submodule(name)
        states = query, key, value, mask, scaling, is_causal
        found = self(module, *states, softcap, sinks)
        if isinstance(found, str):
            self.delegate(module, found)
            found = _otherwise(module, self._sdpa, *states, {"softcap": softcap, "s_aux": sinks})
        return found[0].contiguous()

    def _kernel(self, module: nn.Module, key: _Key) -> tuple[Callable[..., Tensor] | None, str]:
        """Return the kernel and its name, or None and why there is none."""
        if key not in self._kernels:
            self._kernels[key] = self._bound(self._name(module), key)
        found = self._kernels[key]
        if found[0] is not None:
            self._tell(module, found[1], "")
        return found

    def _bound(self, name: str, key: _Key) -> tuple[Callable[..., Tensor] | None, str]:
        dims = dict(zip(_Key._fields[:-1], key[:-1], strict=True))
        site = self._adaptation.site(name, key.dtype)
        try:
            bound = site.bind_kernel(ragged_attention, **dims, alibi=False)
        except NoCandidateError as error:
            return None, str(error)
        verdict = _judge(bound.function, key, self._adaptation.device, self._sdpa)
        if not verdict:
            return None, f"{kernel_name(bound.choice)}: {verdict.reason}"
        return bound.function, kernel_name(bound.choice)

    def delegate(self, module: nn.Module, reason: str) -> None:
        """Note that a call was left to sdpa, or to what has caps and sinks."""
        other = "plain operations" if vars(module).get(_CAPS) else "sdpa"
        self._tell(module, "", f"calls are delegated to {other}: {reason}")

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
    names = {id(module): name for name, module in adaptation.model.named_modules()}
    known = labels(attention, names)
    for module in adaptation.model.modules():
        adaptation.changes.set(module, OWNER, attention)
        adaptation.changes.set(module, _LABEL, known[id(module)])


def serve_caps(adaptation: Adaptation, config: object) -> None:
    """Pass soft caps and sinks to the modules with this configuration that name them.

    sdpa has neither, and does what it does with those of a model that asks for sdpa.
    """
    for module in adaptation.model.modules():
        if getattr(module, "config", None) is config:
            adaptation.changes.set(module, _CAPS, True)


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
            asked = Asked(module, query, key, value, attention_mask, scaling, is_causal, options)
            return visitor.attend(asked), None
        held = vars(module)
        owner: AdaptedAttention | None = held.get(OWNER)
        caps = (options.get("softcap"), options.get("s_aux")) if held.get(_CAPS) else (None, None)
        states = query, key, value, attention_mask, scaling, is_causal
        if owner is not None:
            found: Result | str = ""
            if dropout:
                found = "it drops out"
            elif unknown := unknown_option(options):
                found = f"its attention is passed {unknown!r}, which no kernel takes"
            elif options.get("softcap") is not None and not held.get(_CAPS):
                found = "it caps its scores, which sdpa does not"
            elif options.get("output_attentions") and held.get(_CAPS):
                found = "its weights are asked for"
            elif not is_compiling():
                found = owner(module, *states, *caps)
            elif is_traceable(query, key, value):
                return traced_attention(held[_LABEL], *states, *caps), None
            if not isinstance(found, str):
                return found
            if not is_compiling():
                owner.delegate(module, found)
        return _otherwise(module, sdpa, *states, options, dropout)

    return attention


def _otherwise(
    module: nn.Module,
    sdpa: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
    options: Mapping[str, Any],
    dropout: float = 0.0,
) -> Result:
    """Compute attention by sdpa, or by plain operations if there are soft caps or sinks."""
    if vars(module).get(_CAPS) and not dropout:
        if unknown := unknown_option(options):
            raise NotImplementedError(
                f"The attention of {type(module).__name__} is passed {unknown!r}, which no kernel "
                "takes. Try: leave it out of the call, or adapted.restore()"
            )
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        causal = _is_causal(module, query, is_causal)
        caps = options.get("softcap"), options.get("s_aux")
        return plain_attention(query, key, value, mask, scale, causal, *caps)
    if options.get("softcap") is None:
        options = {name: each for name, each in options.items() if name != "softcap"}
    return sdpa(
        module,
        query,
        key,
        value,
        mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **options,
    )


def _is_causal(module: nn.Module, query: Tensor, asked: bool | None) -> bool:
    """Say whether a call without a mask is causal."""
    causal = asked if asked is not None else getattr(module, "is_causal", True)
    return bool(causal) and query.shape[2] > 1


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
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return ``[B, T, N, E]``."""
    batch, num_heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    queries = query.transpose(1, 2).reshape(batch * num_queries, num_heads, -1)
    (keys, values), distance = flat((key, value))
    runs = None if facts is None else facts.runs
    starts = layout(batch, num_queries, num_keys, distance, runs, causal, query.device)
    if sinks is not None:
        sinks = sinks.detach().to(query.dtype)
    out = kernel(queries, keys, values, *starts, scale, causal, window, softcap, sinks, None)
    return out.view(batch, num_queries, num_heads, -1)


_JUDGED_CAP = 1.5
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
        mask = seen[None, None].to(device)
        more: tuple[float | None, Tensor | None] = (None, None)
        if key.softcapped or key.sinks:
            cap = _JUDGED_CAP if key.softcapped else None
            more = cap, normals((key.num_heads,), key.dtype, device) if key.sinks else None
            expected, _ = plain_attention(query, keys, values, mask, 0.25, False, *more)
        else:
            groups = key.num_heads // key.num_kv_heads
            wide = (keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1))
            expected, _ = sdpa(nn.Module(), query, *wide, mask, scaling=0.25, is_causal=False)
        found = _attend(kernel, query, keys, values, key.causal, window, None, 0.25, *more)
        largest = float(values.abs().max())
        reduction = num_keys + key.head_size
        verdict = judge_agreement(
            ragged_attention.tolerance, expected, found, reduction, largest, largest
        )
        if not verdict:
            return verdict
    return Verdict.accept()
