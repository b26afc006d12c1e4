"""A decoder of transformers over paged caches, as the engine calls it.

Its own forward runs as it is, with the tokens of all sequences in one row and no cache. Each layer
that attends writes its keys and values into pages, and attends over these.

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
from interposer_models._adapt.attention_names import following, named_attention
from interposer_models._adapt.attention_trace import TracedLayer
from interposer_models._adapt.visit import Asked, MakeMask, Paged, visited_by
from interposer_ops.attention import common_page_size


class PagedLayer:
    """One layer that attends, and the backend that was chosen for it."""

    def __init__(self, traced: TracedLayer, resolver: Resolver, page_size: int) -> None:
        self.name = traced.name
        self.spec = traced.spec(page_size)
        site = Site(resolver, traced.name, traced.dtype)
        self.backend: AttentionBackend = resolver.attention(self.spec, site)
        self._value_size = traced.value_size

    def attend(self, asked: Asked, cache: Tensor, plan: object) -> Tensor:
        """Write the keys and values of the step, and return ``[1, T, N, E]``."""
        query, key, value = (self._rows(each) for each in (asked.query, asked.key, asked.value))
        if self.spec.sinks:
            sinks = asked.options["s_aux"].to(self.spec.dtype)
            out = self.backend.forward_with_sinks(query, key, value, cache, plan, sinks)
        else:
            out = self.backend.forward(query, key, value, cache, plan)
        return out[..., : self._value_size].unsqueeze(0)

    def _rows(self, states: Tensor) -> Tensor:
        """Return ``[1, N, T, D]`` as ``[T, N, D]``, in the size that pages have."""
        rows = states[0].transpose(0, 1)
        missing = self.spec.head_size - rows.shape[-1]
        return pad(rows, (0, missing)) if missing else rows.contiguous()


class _Step:
    """A visitor by whom every layer attends over its cache."""

    def __init__(
        self,
        layers: Mapping[int, tuple[int, PagedLayer]],
        caches: Sequence[Tensor],
        plans: Sequence[object],
    ) -> None:
        self._layers, self._caches, self._plans = layers, caches, plans

    def mask(self, make: MakeMask, settings: Mapping[str, Any]) -> Tensor | None:
        """Return none: what a layer sees was found when it was traced."""
        return None

    def pages(self, module: nn.Module) -> Paged | None:
        """Return what a layer attends over, where it keeps nothing in pages but keys and values."""
        found = self._layers.get(id(module))
        if found is None:
            return None
        index, layer = found
        return layer.backend, self._caches[index], self._plans[index]

    def attend(self, asked: Asked) -> Tensor:
        """Return ``[1, T, N, E]``."""
        index, layer = self._layers[id(asked.module)]
        return layer.attend(asked, self._caches[index], self._plans[index])


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The sizes by which requests are checked."""

    vocab_size: int
    max_position_embeddings: int


class PagedDecoder:
    """The ``PagedModel`` of a model of transformers.

    Attributes:
        model: of transformers.
        attention_layers: in the order in which they are called.
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
            in_force: says whether the model is adapted still.
        Raises: NoCandidateError: nothing serves a layer.
        """
        self.model = model
        self.config = config
        sites = [(each.spec(1), Site(resolver, each.name, each.dtype)) for each in traced]
        self.page_size = common_page_size(resolver, sites)
        self.attention_layers = [PagedLayer(each, resolver, self.page_size) for each in traced]
        numbered = enumerate(self.attention_layers)
        modules = (each.module for each in traced)
        self._layers = {id(m): each for m, each in zip(modules, numbered, strict=True)}
        self._configs = following(model)
        self._in_force = in_force
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def reserve_positions(self, count: int, device: str) -> None:
        """Do nothing: the model makes the angles of each step itself."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Tensor],
        plans: Sequence[object],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the tokens that ``rows`` names, or of all; see ``CausalLM``."""
        if not self._in_force():
            raise ConfigError("The model was restored. Try: language_model(adapt(model))")
        kept = {} if rows is None or not self._keeps_rows else {"logits_to_keep": rows}
        with named_attention(self._configs), visited_by(_Step(self._layers, caches, plans)):
            out = self.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                past_key_values=None,
                use_cache=False,
                return_dict=True,
                **kept,
            )
        logits: Tensor = out.logits[0]
        return logits if rows is None or kept else logits[rows]
