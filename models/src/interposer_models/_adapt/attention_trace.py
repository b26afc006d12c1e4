"""The trace of a forward: which layers attend, in which order, and to what.

Dimensions: B sequences, N heads, D size of a query and key, E size of a value, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interposer import AttentionSpec
from interposer_models._adapt.attention_options import unknown_option
from interposer_models._adapt.masks import facts_of
from interposer_models._adapt.visit import Asked, MakeMask

_DROPS = frozenset({"softcap", "s_aux"})


class UnservedLayerError(Exception):
    """A layer keeps what pages do not hold, or attends as no backend over pages does."""

    def __init__(self, name: str, kind: str, reason: str) -> None:
        self.layer = f"{name or 'the model'} ({kind})"
        self.reason = reason
        super().__init__(f"{self.layer} {reason}")


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """A layer that attends over the keys of its own sequence.

    Attributes:
        name: dotted, as ``named_modules`` has it.
        key_size: of queries and keys; ``value_size`` may differ.
        sinks: it gives a score per head.
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
        """Return the request of the layer; keys and values have one size in a page."""
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
    """A visitor that notes the layers of a forward of one sequence without a cache.

    Attributes:
        layers: in the order in which they are called.
    """

    def __init__(self, model: nn.Module, sdpa: Callable[..., tuple[Tensor, Any]]) -> None:
        self.layers: list[TracedLayer] = []
        self._sdpa = sdpa
        self._names = {id(module): name for name, module in model.named_modules()}

    def mask(self, make: MakeMask, settings: Mapping[str, Any]) -> Tensor | None:
        """Return a mask that says its pattern, where sdpa would do without."""
        given = {**settings, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return make(**given)

    def pages(self, module: nn.Module) -> None:
        """Return None: every layer is to ask."""

    def attend(self, asked: Asked) -> Tensor:
        """Note the layer, and return what sdpa makes of it, without sinks and softcap.

        Raises: UnservedLayerError: it does not attend as a decoder's layer does.
        """
        name = self._names.get(id(asked.module), type(asked.module).__name__)
        layer = _layer(name, asked)
        if any(known.module is asked.module for known in self.layers):
            raise UnservedLayerError(name, type(asked.module).__name__, "attends twice in a step")
        self.layers.append(layer)
        others = {key: each for key, each in asked.options.items() if key not in _DROPS}
        out, _ = self._sdpa(
            asked.module,
            asked.query,
            asked.key,
            asked.value,
            asked.mask,
            scaling=asked.scaling,
            is_causal=asked.is_causal,
            **others,
        )
        return out


def _layer(name: str, asked: Asked) -> TracedLayer:
    module, query, key, value = asked.module, asked.query, asked.key, asked.value

    def unserved(reason: str) -> UnservedLayerError:
        return UnservedLayerError(name, type(module).__name__, reason)

    _, num_heads, num_tokens, key_size = query.shape
    num_kv_heads, num_keys, value_size = value.shape[1:]
    if num_keys != num_tokens or key.shape[2] != num_tokens:
        raise unserved("attends to keys of other tokens than those of the step")
    if asked.mask is None:
        causal = asked.is_causal
        causal = getattr(module, "is_causal", True) if causal is None else causal
        window = None
    else:
        facts = facts_of(asked.mask)
        if facts is None:
            raise unserved("has a mask that is neither causal nor a window")
        causal, window = facts.pattern.causal, facts.pattern.window
    if not causal:
        raise unserved("attends to tokens that come later")
    if unknown := unknown_option(asked.options):
        raise unserved(f"attends with {unknown}")
    if num_heads % num_kv_heads:
        raise unserved(f"shares {num_kv_heads} kv heads among {num_heads} unevenly")
    scale = key_size**-0.5 if asked.scaling is None else float(asked.scaling)
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
        asked.options.get("softcap"),
        asked.options.get("s_aux") is not None,
    )
