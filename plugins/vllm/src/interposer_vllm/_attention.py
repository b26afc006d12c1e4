"""vLLM's attention backend for CPUs, with the backends of interposer inside.

vLLM builds one ``Impl`` per layer, one ``Builder`` per group of layers, and one ``Metadata`` per
step and group. The builder is the first object that knows a layer's name, scales and block size,
and is built before the first step: it chooses the backend of each layer.

Shapes: T tokens, N heads, K kv heads, D head size, P blocks, S block size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from interposer import AttentionBackend, AttentionBatch
from interposer.errors import ConfigError, InterposerError
from interposer_vllm._attention_request import spec_of
from interposer_vllm._block_views import View, view_for
from interposer_vllm._methods import keep_in_vllm
from interposer_vllm._report import Report
from interposer_vllm._session import session

__all__ = ["Backend", "Builder", "Impl", "Metadata"]


@dataclass
class Metadata(CPUAttentionMetadata):  # type: ignore[misc]
    """The metadata of one step for a group of layers, with the batch for backends of interposer.

    Attributes:
        batch: None if vLLM's kernels compute all layers of the group.
        plans: plans of the step by ``id(backend)``; the first layer of a backend makes the plan.
    """

    batch: AttentionBatch | None = None
    plans: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The attention backend chosen for a layer, with the backend's view of vLLM's cache.

    Attributes:
        view: views vLLM's blocks as the backend's cache.
        attend: attends, given query, key, value, cache and plan.
        takes_out: ``attend`` also takes ``out``.
    """

    backend: AttentionBackend
    view: View
    attend: Callable[..., Tensor]
    takes_out: bool


class Impl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """One attention layer, computed by a backend of interposer, or by vLLM if none was chosen."""

    chosen: Chosen | None = None
    _blocks: Tensor | None = None
    _cache: Tensor

    def choose(self, name: str, layer: Any, page_size: int, config: Any) -> None:
        """Choose a backend for the layer; if none accepts, vLLM's kernels compute the layer.

        Raises: NoCandidateError, UnknownNameError: the user pinned or required a backend that
            cannot be used.
        """
        try:
            worker_session = session()
            spec = spec_of(name, layer, page_size, config)
            backend = worker_session.resolver.attention(spec, worker_session.site(name, spec.dtype))
            attend = self._bind_forward(backend, layer)
            self.chosen = Chosen(backend, view_for(backend), attend, backend.takes("out"))
            worker_session.taken.append(name)
        except InterposerError as error:
            self.chosen = None
            keep_in_vllm(name, error)

    def _bind_forward(self, backend: AttentionBackend, layer: Any) -> Callable[..., Tensor]:
        spec = backend.spec
        options: dict[str, Any] = {}
        if spec.is_quantized:
            scales = (layer._k_scale_float, layer._v_scale_float)
            tensors = (torch.tensor([scale]) for scale in scales)
            options["scales"] = backend.prepare_scales(*tensors)
        if spec.sinks:
            options["sinks"] = self.sinks.detach().to(spec.dtype).contiguous()
        return partial(backend.forward, **options) if options else backend.forward

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store ``key`` and ``value`` in the cache, then compute attention.

        Args:
            query: ``[T, N, D]``, padded at the end.
            key: ``[T, K, D]``.
            value: ``[T, K, D]``.
            kv_cache: ``[P, K, S, 2 D]``.
            attn_metadata: metadata of this step; None while vLLM warms up.
            output: ``[T, N, D]``, written to.
        Returns: ``output``.
        """
        if attn_metadata is None:
            return output
        chosen = self.chosen
        if chosen is None:
            self._store(layer, key, value, kv_cache, attn_metadata)
            return super().forward(  # type: ignore[no-any-return]
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        plans, backend = attn_metadata.plans, chosen.backend
        # Layers with equal requests share a backend, and so the plan of a step.
        plan = plans.get(id(backend))
        if plan is None:
            plan = plans[id(backend)] = backend.plan(attn_metadata.batch)
        # vLLM passes the same tensor in each step, so the view is made once.
        if kv_cache is not self._blocks:
            self._blocks, self._cache = kv_cache, chosen.view(kv_cache)
        out, count = output, attn_metadata.num_actual_tokens
        if count != query.shape[0]:
            query, key, value, out = query[:count], key[:count], value[:count], output[:count]
        if chosen.takes_out:
            chosen.attend(query, key, value, self._cache, plan, out=out)
        else:
            out.copy_(chosen.attend(query, key, value, self._cache, plan))
        return output

    def _store(
        self, layer: Any, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, step: Any
    ) -> None:
        """Store keys and values in the cache, for layers that vLLM's kernels compute."""
        if key is None or value is None or self.kv_sharing_target_layer_name is not None:
            return
        slots = step.slot_mapping
        if self.attn_type == "decoder":
            num_tokens = step.num_actual_tokens
            key, value, slots = key[:num_tokens], value[:num_tokens], slots[:num_tokens]
        self.do_kv_cache_update(layer, key, value, kv_cache, slots)


class Builder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Builds the metadata of each step for vLLM's kernels, interposer's backends, or both."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        for name, layer in layers.items():
            if isinstance(layer.impl, Impl):
                layer.impl.choose(name, layer, kv_cache_spec.block_size, vllm_config)
        has_backend = [getattr(layer.impl, "chosen", None) is not None for layer in layers.values()]
        self._has_any_backend, self._has_all_backends = any(has_backend), all(has_backend)
        if layers:
            _write_report()

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Build the attention metadata of one step.

        Raises: ConfigError: the step is not causal, but the layers were described as causal.
        """
        step = common_attn_metadata
        if not self._has_any_backend:
            return super().build(common_prefix_len, step, fast_build)
        if step.causal is not True:
            raise ConfigError(
                "vLLM runs a step without a causal mask, in layers that it described as causal. "
                "Try: VLLM_PLUGINS without interposer"
            )
        if self._has_all_backends:
            return Metadata(
                num_actual_tokens=step.num_actual_tokens,
                max_query_len=step.max_query_len,
                query_start_loc=step.query_start_loc,
                max_seq_len=step.max_seq_len,
                seq_lens=step.seq_lens,
                block_table=step.block_table_tensor,
                slot_mapping=step.slot_mapping,
                scheduler_metadata=None,
                batch=_batch(step, self.block_size),
            )
        vllm_metadata = super().build(common_prefix_len, step, fast_build)
        return Metadata(**vars(vllm_metadata), batch=_batch(step, self.block_size))


def _batch(step: Any, page_size: int) -> AttentionBatch:
    num_seqs = step.num_reqs
    seq_lens = step.seq_lens[:num_seqs].long()
    # ``step.max_seq_len`` may be an upper bound.
    longest = int(seq_lens.max()) if num_seqs else 0
    pages = -(-longest // page_size)
    return AttentionBatch(
        query_starts=step.query_start_loc[: num_seqs + 1].long(),
        seq_lens=seq_lens,
        page_table=step.block_table_tensor[:num_seqs, :pages].long(),
        slots=step.slot_mapping[: step.num_actual_tokens].long(),
        max_query_tokens=step.max_query_len,
        max_seq_tokens=longest,
    )


def _write_report() -> None:
    # Attention backends are chosen after the weights are loaded and a first report was written. An
    # error was logged at that time.
    with suppress(InterposerError):
        Report.of(session()).write()


class Backend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's attention backend for CPUs, with a ``forward`` that also writes the KV cache."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        """Return the class that computes one layer."""
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """Return the class that builds the metadata of a group of layers."""
        return Builder
