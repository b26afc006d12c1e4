"""Size of a loaded model's KV cache: as requested, or as much as fits into free memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from interposer import Platform
from interposer.errors import ConfigError, PluginError, described, foreign_errors
from interposer_engine._engine import Engine
from interposer_engine._input_encoder import InputEncoder, MeasurableEncoder
from interposer_engine._kv_cache import CacheShape, slots_for
from interposer_engine._kv_cache_budget import (
    CacheBudget,
    EncoderMemory,
    StepMemory,
    cache_budget,
    is_host,
    measure_step,
    one_block_of_each_kind,
    pages_of,
    spare_pages_for,
)
from interposer_engine._plan import Plan
from interposer_engine._prefix_settings import PrefixCache
from interposer_ops.devices.memory_profile import MemoryProfile
from interposer_ops.layers.states import StateLayout


def check_fraction(memory_fraction: float | None, cache_tokens: int | None) -> None:
    """Raise ConfigError if the memory fraction is out of range, or the cache size is set twice."""
    if memory_fraction is None:
        return
    is_number = isinstance(memory_fraction, int | float) and not isinstance(memory_fraction, bool)
    if not (is_number and 0 < memory_fraction <= 1):
        raise ConfigError(
            f"memory_fraction is {memory_fraction!r}, must be a number above 0 and at most 1"
        )
    if cache_tokens is not None:
        raise ConfigError(
            f"memory_fraction is {memory_fraction!r} and cache_tokens {cache_tokens}, which say "
            "the size of the cache twice. Try: leave one out"
        )


def measured_budget(
    planned: Plan,
    engine_of: Callable[[int], Engine],
    fraction: float | None,
    states: int,
    adapter_bytes: int,
    max_sequences: int,
    max_step_tokens: int,
    *,
    encoder: InputEncoder | None = None,
    measures: bool = True,
) -> CacheBudget:
    """Compute the size of the KV cache that fits next to adapters, encoder and largest step.

    Args:
        engine_of: Creates an engine with a cache of this many pages, to run the step.
        states: Result of ``state_bytes``.
        encoder: The input encoder, whose weights are loaded.
        measures: Whether to run the step. Ranks on several platforms would run different steps.
    """
    placement, page_size = planned.placement, planned.page_size
    device = placement.device.torch_device
    on_host = is_host(placement.platform)
    # First, because libraries keep memory after their first use, and the step counts it as used.
    encoder_memory = measure_encoder(
        placement.platform, device, encoder, max_step_tokens, measures=measures
    )
    if not measures:
        memory_now = placement.platform.memory(device)
        # Adapters are loaded after the cache is allocated, so their memory is set aside now.
        free_bytes = memory_now.free_bytes - adapter_bytes
        memory = StepMemory(
            max_step_tokens, None, free_bytes, memory_now.total_bytes, on_host, encoder_memory
        )
        return _budget(planned, memory, fraction, states, max_sequences, max_step_tokens)
    with one_block_of_each_kind(planned.model) if on_host else nullcontext():
        engine = engine_of(pages_of(max_sequences, max_step_tokens, page_size))
        memory = measure_step(placement.platform, engine, max_sequences, max_step_tokens)
        # The small cache of this engine is freed with the engine.
        trial_cache_bytes = engine.runner.cache_bytes
    del engine
    free_bytes = memory.free_bytes - adapter_bytes
    memory = replace(
        memory,
        free_bytes=free_bytes if on_host else free_bytes + trial_cache_bytes,
        encoder=encoder_memory,
    )
    return _budget(planned, memory, fraction, states, max_sequences, max_step_tokens)


def measure_encoder(
    platform: Platform,
    device: str,
    encoder: InputEncoder | None,
    max_step_tokens: int,
    *,
    measures: bool = True,
) -> EncoderMemory | None:
    """Run a step of sample media through an input encoder, and return the memory that it takes.

    On a host no step runs, because an encoder computes its smallest picture for seconds there. The
    memory that the default fraction leaves must hold the step.

    Args:
        measures: Whether to run the step.
    Returns: None if there is no encoder, or if it is no ``MeasurableEncoder``.
    Raises:
        ConfigError: the device has too little memory for the step.
        PluginError: the encoder fails.
    """
    if not isinstance(encoder, MeasurableEncoder):
        return None
    if is_host(platform):
        return EncoderMemory(max_step_tokens, None, encoder.max_cached_bytes)
    unmeasured = EncoderMemory(max_step_tokens, None, 0)
    if not (measures and platform.provides("memory_profile")):
        return unmeasured
    platform.synchronize(device)
    try:
        with platform.memory_profile(device) as profile:
            tokens = encoder.run_sample(max_step_tokens)
            platform.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"A step of up to {max_step_tokens} tokens of the input encoder does not fit into the "
            f"memory of {device} beside the weights: {described(error)}. "
            "Try: load(..., text_only=True), or a smaller max_step_tokens"
        ) from error
    except foreign_errors() as error:
        raise PluginError(
            type(encoder).__name__,
            type(encoder).__module__,
            f"run_sample({max_step_tokens}) failed: {described(error)}",
            "load(..., text_only=True), or report it to its authors",
        ) from error
    if not isinstance(profile, MemoryProfile):
        return unmeasured
    step_bytes = max(profile.after.peak_bytes - profile.before.peak_bytes, 0)
    return EncoderMemory(tokens, step_bytes, 0)


def _budget(
    planned: Plan,
    memory: StepMemory,
    fraction: float | None,
    states: int,
    max_sequences: int,
    max_step_tokens: int,
) -> CacheBudget:
    # The pool of encoder inputs has as many pages as that of the decoder's tokens.
    longest_source: int = getattr(planned.model, "max_source_tokens", 0)
    return cache_budget(
        memory,
        planned.placement.device.torch_device,
        cache_shape(planned, max_sequences, max_step_tokens),
        max_tokens=max_sequences * max(planned.decoder.max_position_embeddings, longest_source),
        fraction=fraction,
        state_bytes=states,
    )


def smaller_cache_notes(planned: Plan, budget: CacheBudget, max_sequences: int) -> list[str]:
    """Suggest a cache of 8 bits if the memory holds fewer tokens of 16 bits than could be used."""
    specs = [layer.backend.spec for layer in planned.model.attention_layers]
    could_use = max_sequences * planned.decoder.max_position_embeddings
    if budget.memory is None or budget.tokens >= could_use:
        return []
    # Latent and quantized caches are small already.
    if not specs or any(spec.latent_size or spec.cache_dtype.itemsize != 2 for spec in specs):
        return []
    return ["Config(kv_cache='fp8') stores twice as many tokens in the memory of the KV cache"]


def cache_shape(planned: Plan, max_sequences: int, max_step_tokens: int) -> CacheShape:
    """Return the layer groups of a model's KV cache, with the page sizes."""
    size = planned.page_size
    spare_pages = spare_pages_for(max_sequences, size) if planned.graphs else 0
    backends = [layer.backend for layer in planned.model.attention_layers]
    return CacheShape.of(backends, size, max_sequences, max_step_tokens, spare_pages)


def state_layouts(planned: Plan) -> list[StateLayout]:
    """Return the layout of each recurrent layer's state."""
    return [layer.state_layout() for layer in planned.model.state_layers]


def state_bytes(planned: Plan, max_sequences: int, shared: PrefixCache | None) -> int:
    """Return the memory of recurrent states, and of their checkpoints in the prefix cache.

    Args:
        shared: Settings of the prefix cache; None without one.
    """
    layouts, num_rows = state_layouts(planned), slots_for(max_sequences)
    if shared is not None:
        num_rows += shared.num_checkpoints(layouts, max_sequences)
    return num_rows * sum(layout.slot_bytes() for layout in layouts)
