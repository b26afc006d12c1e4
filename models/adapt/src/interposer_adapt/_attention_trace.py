"""A trace of a forward pass that records which layers attend, in which order, and to which tokens.

Dimensions: B sequences, N heads, D size of a query and key, E size of a value, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interposer import AttentionSpec
from interposer_adapt._attention_options import unknown_option
from interposer_adapt._forwards import AttentionCall, MakeMask
from interposer_adapt._masks import mask_facts

# sdpa supports neither; the traced values do not matter.
_NOT_FOR_SDPA = frozenset({"softcap", "s_aux"})


class UnsupportedLayerError(Exception):
    """A layer attends in an unsupported way, or keeps a state that a paged cache cannot hold."""

    def __init__(self, name: str, kind: str, reason: str) -> None:
        self.layer = f"{name or 'the model'} ({kind})"
        self.reason = reason
        super().__init__(f"{self.layer} {reason}")


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """A layer whose attention to the keys of its own sequence was traced.

    Attributes:
        name: dotted, as in ``named_modules``.
        key_size: elements of a query or key head; ``value_size`` may differ.
        sinks: the layer passes a sink for each head.
    """

    name: str
    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    scale: float
    window_tokens: int | None
    softcap: float | None
    sinks: bool

    def spec(self, page_size: int) -> AttentionSpec:
        """Return the ``AttentionSpec`` of the layer, with one size for keys and values."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=max(self.key_size, self.value_size),
            dtype=self.dtype,
            cache_dtype=self.dtype,
            page_size=page_size,
            scale=self.scale,
            window_tokens=self.window_tokens,
            softcap=self.softcap,
            sinks=self.sinks,
        )


class AttentionTrace:
    """Interceptor that records the attention layers of a forward of one sequence without a cache.

    Attributes:
        layers: the recorded layers, in the order of their calls.
    """

    def __init__(self, model: nn.Module, sdpa: Callable[..., tuple[Tensor, Any]]) -> None:
        self.layers: list[TracedLayer] = []
        self._sdpa = sdpa
        self._names = {id(module): name for name, module in model.named_modules()}

    def mask(self, make: MakeMask, settings: Mapping[str, Any]) -> Tensor | None:
        """Return a mask with ``MaskFacts`` attached, also in cases where sdpa needs no mask."""
        explicit_settings = {
            **settings,
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
        }
        return make(**explicit_settings)

    def paged_cache(self, module: nn.Module) -> None:
        """Return None instead of a paged cache, so that every layer calls ``attend``."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Record the attention layer, and compute attention by sdpa, without sinks and softcap.

        Raises: UnsupportedLayerError: the layer does not attend as a decoder layer does.
        """
        name = self._names.get(id(call.module), type(call.module).__name__)
        layer = _traced_layer(name, call)
        if any(traced.module is call.module for traced in self.layers):
            raise UnsupportedLayerError(name, type(call.module).__name__, "attends twice in a step")
        self.layers.append(layer)
        sdpa_options = {
            key: option for key, option in call.options.items() if key not in _NOT_FOR_SDPA
        }
        out, _ = self._sdpa(
            call.module,
            call.query,
            call.key,
            call.value,
            call.mask,
            scaling=call.scaling,
            is_causal=call.is_causal,
            **sdpa_options,
        )
        return out


def _traced_layer(name: str, call: AttentionCall) -> TracedLayer:
    module, query, key, value = call.module, call.query, call.key, call.value

    def unsupported(reason: str) -> UnsupportedLayerError:
        return UnsupportedLayerError(name, type(module).__name__, reason)

    _, num_heads, num_tokens, key_size = query.shape
    num_kv_heads, num_keys, value_size = value.shape[1:]
    if num_keys != num_tokens or key.shape[2] != num_tokens:
        raise unsupported("attends to keys of other tokens than those of the step")
    if call.mask is None:
        causal = call.is_causal
        causal = getattr(module, "is_causal", True) if causal is None else causal
        window = None
    else:
        facts = mask_facts(call.mask)
        if facts is None:
            raise unsupported("has a mask that is neither causal nor a window")
        causal, window = facts.pattern.causal, facts.pattern.window
    if not causal:
        raise unsupported("attends to tokens that come later")
    if unknown := unknown_option(call.options):
        raise unsupported(f"attends with {unknown}")
    if num_heads % num_kv_heads:
        raise unsupported(f"shares {num_kv_heads} kv heads among {num_heads} unevenly")
    scale = key_size**-0.5 if call.scaling is None else float(call.scaling)
    return TracedLayer(
        name,
        module,
        num_heads,
        num_kv_heads,
        key_size,
        value_size,
        query.dtype,
        scale,
        window,
        call.options.get("softcap"),
        call.options.get("s_aux") is not None,
    )
