"""A transformers decoder over paged KV caches, with the engine's interface.

The model's own forward runs without a cache, with the tokens of all sequences in one row. Each
attention layer writes its keys and values to pages, and attends over the pages.

Dimensions: N heads, K kv heads, D size of a query and key, E size of a value, T tokens of the step,
V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from interposer import AttentionBackend, Resolver, Site
from interposer.errors import ConfigError
from interposer_models._adapt.attention_interceptor import (
    AttentionCall,
    MakeMask,
    PagedCache,
    intercepted_by,
)
from interposer_models._adapt.attention_registration import (
    configs_naming_attention,
    using_adapted_attention,
)
from interposer_models._adapt.attention_trace import TracedLayer
from interposer_ops.attention import common_page_size


class PagedLayer:
    """One attention layer with a paged backend."""

    def __init__(self, traced: TracedLayer, resolver: Resolver, page_size: int) -> None:
        self.name = traced.name
        self.spec = traced.spec(page_size)
        site = Site(resolver, traced.name, traced.dtype)
        self.backend: AttentionBackend = resolver.attention(self.spec, site)
        self._value_size = traced.value_size

    def attend(self, call: AttentionCall, cache: Tensor, plan: object) -> Tensor:
        """Write the keys and values of the step to pages, and attend, ``[1, T, N, E]``."""
        query, key, value = (self._rows(states) for states in (call.query, call.key, call.value))
        if self.spec.sinks:
            sinks = call.options["s_aux"].to(self.spec.dtype)
            out = self.backend.forward_with_sinks(query, key, value, cache, plan, sinks)
        else:
            out = self.backend.forward(query, key, value, cache, plan)
        return out[..., : self._value_size].unsqueeze(0)

    def _rows(self, states: Tensor) -> Tensor:
        """Return ``[1, N, T, D]`` as ``[T, N, D]``, padded to the head size in pages."""
        rows = states[0].transpose(0, 1)
        num_padded = self.spec.head_size - rows.shape[-1]
        return pad(rows, (0, num_padded)) if num_padded else rows.contiguous()


class _PagedStep:
    """An interceptor that lets every layer attend over a paged cache."""

    def __init__(
        self,
        layers: Mapping[int, tuple[int, PagedLayer]],
        caches: Sequence[Tensor],
        plans: Sequence[object],
    ) -> None:
        self._layers, self._caches, self._plans = layers, caches, plans

    def mask(self, make: MakeMask, settings: Mapping[str, Any]) -> Tensor | None:
        """Return None: each layer's pattern is known from the trace."""
        return None

    def paged_cache(self, module: nn.Module) -> PagedCache | None:
        """Return the cache of a layer, None for a module that was not traced."""
        index_and_layer = self._layers.get(id(module))
        if index_and_layer is None:
            return None
        index, layer = index_and_layer
        return layer.backend, self._caches[index], self._plans[index]

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend over the layer's cache, ``[1, T, N, E]``."""
        index, layer = self._layers[id(call.module)]
        return layer.attend(call, self._caches[index], self._plans[index])


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The sizes against which the engine checks requests."""

    vocab_size: int
    max_position_embeddings: int


class PagedDecoder:
    """The ``PagedModel`` of a transformers model.

    Attributes:
        model: of transformers.
        attention_layers: in the order of calls.
    """

    def __init__(
        self,
        model: nn.Module,
        traced: Sequence[TracedLayer],
        resolver: Resolver,
        config: DecoderSizes,
        in_force: Callable[[], bool],
    ) -> None:
        """Choose a backend for each layer.

        Args:
            in_force: returns False once the model was restored.
        Raises: NoCandidateError: no backend supports a layer.
        """
        self.model = model
        self.config = config
        sites = [(layer.spec(1), Site(resolver, layer.name, layer.dtype)) for layer in traced]
        self.page_size = common_page_size(resolver, sites)
        self.attention_layers = [PagedLayer(layer, resolver, self.page_size) for layer in traced]
        numbered = enumerate(self.attention_layers)
        modules = (layer.module for layer in traced)
        self._layers = {id(m): entry for m, entry in zip(modules, numbered, strict=True)}
        self._configs = configs_naming_attention(model)
        self._in_force = in_force
        self._has_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    def reserve_positions(self, count: int, device: str) -> None:
        """Do nothing: the model's forward computes the rotary angles of each step."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Tensor],
        plans: Sequence[object],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits of the tokens in ``rows``, or of all tokens; see ``CausalLM``."""
        if not self._in_force():
            raise ConfigError("The model was restored. Try: language_model(adapt(model))")
        row_arguments = (
            {} if rows is None or not self._has_logits_to_keep else {"logits_to_keep": rows}
        )
        with (
            # Adapted attention for all layers: eager and sdpa know nothing of pages.
            using_adapted_attention(self._configs),
            intercepted_by(_PagedStep(self._layers, caches, plans)),
        ):
            out = self.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                past_key_values=None,
                use_cache=False,
                return_dict=True,
                **row_arguments,
            )
        logits: Tensor = out.logits[0]
        return logits if rows is None or row_arguments else logits[rows]
