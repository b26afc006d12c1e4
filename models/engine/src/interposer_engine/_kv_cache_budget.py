"""Memory budget of the KV cache: a fraction of the memory that weights and a step leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from interposer import CausalModel, Platform
from interposer.errors import ConfigError, described
from interposer_engine._encoder_inputs import Source
from interposer_engine._engine import Engine
from interposer_engine._graphs import DecodeGraphs, GraphBuckets
from interposer_engine._kv_cache import CacheShape
from interposer_engine._sampling_params import SamplingParams
from interposer_models import CausalLM
from interposer_models.decoder import SharedCacheAttention
from interposer_ops.devices.memory_profile import MemoryProfile
from interposer_ops.layers.attention import Attention

_OF_ACCELERATOR = 0.9
# Other programs share the host's memory, and an unmeasured step may need any amount of it.
_OF_OTHER = 0.25
# A host computes fewer tokens in a second, and the memory of a step is proportional to its tokens.
_HOST_TOKENS = 512
_WARM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class EncoderMemory:
    """Memory of a device that an encoder of pictures or sounds takes in addition to its weights.

    Attributes:
        tokens: Number of tokens of a step of the encoder.
        step_bytes: Peak memory that the step takes and frees again; None without a measurement.
        cached_bytes: Most memory that cached vectors take; 0 if the device has its own memory,
            because the vectors are kept on the host.
    """

    tokens: int
    step_bytes: int | None
    cached_bytes: int

    @property
    def num_bytes(self) -> int:
        """The memory to leave free for the encoder, in bytes."""
        return (self.step_bytes or 0) + self.cached_bytes


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory of a device: total, free, and the peaks of a step and of the input encoder.

    Attributes:
        tokens: Number of tokens of the step.
        step_bytes: Peak memory that the step takes and frees again; None without a measurement.
        free_bytes: Free memory of the device, without a cache and without the step.
        total_bytes: All memory of the device.
        shared: Whether other programs use the same memory, as on a host.
        encoder: Memory of the input encoder, which runs while a step runs; None without one.
    """

    tokens: int
    step_bytes: int | None
    free_bytes: int
    total_bytes: int
    shared: bool
    encoder: EncoderMemory | None = None

    @property
    def available_bytes(self) -> int:
        """The free memory minus the peaks of a step and of the input encoder, in bytes."""
        encoder_bytes = 0 if self.encoder is None else self.encoder.num_bytes
        return self.free_bytes - (self.step_bytes or 0) - encoder_bytes


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """Size of a KV cache, and the measurements it follows from; ``str`` describes both.

    Attributes:
        tokens: Capacity of the cache in tokens.
        cache_bytes: Memory of the cache.
        state_bytes: Memory of recurrent states, which does not depend on sequence lengths.
        fraction: Fraction of the available memory that the cache may take; None if the user set the
            number of tokens.
        memory: The measured memory; None if the user set the number of tokens.
        parts: Tokens of each group of layers, if groups cache different numbers of tokens.
    """

    device: str
    tokens: int
    cache_bytes: int
    fraction: float | None = None
    memory: StepMemory | None = None
    state_bytes: int = 0
    parts: str = ""

    @classmethod
    def for_tokens(
        cls, device: str, shape: CacheShape, cache_tokens: int, state_bytes: int = 0
    ) -> CacheBudget:
        """Return the budget for a KV cache of the token count that the user set."""
        pages = -(-cache_tokens // shape.page_size)
        cache_bytes, parts = shape.num_bytes(pages), shape.parts(pages)
        return cls(device, cache_tokens, cache_bytes, state_bytes=state_bytes, parts=parts)

    def __str__(self) -> str:
        size = f"KV cache of {self.tokens} tokens, {_size(self.cache_bytes)}"
        if self.parts:
            size += f" ({self.parts})"
        if self.state_bytes:
            size += f", beside {_size(self.state_bytes)} of recurrent states"
        if self.memory is None or self.fraction is None:
            return f"{size}, as cache_tokens says"
        available = _size(max(self.memory.available_bytes, 0))
        return (
            f"{size}, within {self.fraction:g} of the {available} that are left: "
            f"{_parts(self.device, self.memory)}"
        )


def cache_budget(
    memory: StepMemory,
    device: str,
    shape: CacheShape,
    *,
    max_tokens: int,
    fraction: float | None,
    state_bytes: int = 0,
) -> CacheBudget:
    """Compute the size of the KV cache: ``max_tokens``, or as many as fit into the memory fraction.

    Args:
        max_tokens: Largest useful number of tokens.
        fraction: Fraction of the available memory. None takes 0.9 on an accelerator with a measured
            step, else 0.25.
        state_bytes: Memory of recurrent states, which the fraction must hold too.
    Raises: ConfigError: the states and one page do not fit.
    """
    if fraction is None:
        # Only a measured step on memory of its own makes the larger fraction safe.
        is_measured_accelerator = memory.step_bytes is not None and not memory.shared
        fraction = _OF_ACCELERATOR if is_measured_accelerator else _OF_OTHER
    max_pages = -(-max_tokens // shape.page_size)
    cache_capacity_bytes = int(memory.available_bytes * fraction) - state_bytes
    fitting_pages = shape.pages_within(cache_capacity_bytes)
    pages = max_pages if fitting_pages is None else min(max_pages, fitting_pages)
    # Without attention layers the number of pages has no limit, but the states must fit.
    if pages < 1 or cache_capacity_bytes < 0:
        needed = _size(shape.num_bytes(1) + state_bytes)
        text_only = "" if memory.encoder is None else "load(..., text_only=True), "
        raise ConfigError(
            f"No memory is left for the KV cache, which needs {needed} at least and may take "
            f"{fraction:g} of {_size(max(memory.available_bytes, 0))}: {_parts(device, memory)}. "
            f"Try: {text_only}a smaller max_step_tokens or max_sequences, a larger "
            "memory_fraction, weights of fewer bits, or end other programs on the device"
        )
    tokens = min(max_tokens, pages * shape.page_size)
    cache_bytes, parts = shape.num_bytes(pages), shape.parts(pages)
    return CacheBudget(device, tokens, cache_bytes, fraction, memory, state_bytes, parts)


def unmeasured_budget(
    platform: Platform,
    device: str,
    shape: CacheShape,
    max_tokens: int,
    max_step_tokens: int,
    state_bytes: int,
    encoder_cached_bytes: int | None = None,
) -> CacheBudget:
    """Compute the size of the KV cache without running a step; see ``cache_budget``.

    Args:
        encoder_cached_bytes: Most memory of the host that vectors cached by an input encoder take;
            None without an encoder.
    """
    memory_now, is_shared = platform.memory(device), is_host(platform)
    encoder = None
    if encoder_cached_bytes is not None:
        encoder = EncoderMemory(max_step_tokens, None, encoder_cached_bytes if is_shared else 0)
    memory = StepMemory(
        max_step_tokens, None, memory_now.free_bytes, memory_now.total_bytes, is_shared, encoder
    )
    return cache_budget(
        memory,
        device,
        shape,
        max_tokens=max_tokens,
        fraction=None,
        state_bytes=state_bytes,
    )


def check_sizes(**sizes: int | None) -> None:
    """Raise ConfigError if a cache size is neither None nor a positive integer."""
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ConfigError(f"{name} is {size!r}, must be an integer of at least 1")


def check_cache(
    call: str, free_bytes: int, shape: CacheShape, cache_tokens: int, state_bytes: int = 0
) -> None:
    """Raise ConfigError if the free memory cannot hold the recurrent states and ``cache_tokens``.

    Args:
        call: The function that the user called, for the error text.
    """
    if state_bytes > free_bytes:
        raise ConfigError(
            f"the recurrent states take {_size(state_bytes)}, free are {_size(free_bytes)}. "
            "Try: a smaller max_sequences"
        )
    pages = shape.pages_within(free_bytes - state_bytes)
    if pages is not None and cache_tokens > (fitting_tokens := max(pages, 0) * shape.page_size):
        raise ConfigError(
            f"cache_tokens is {cache_tokens}, the free memory holds {fitting_tokens}. "
            f"Try: {call}(..., cache_tokens={fitting_tokens // 4})"
        )


def spare_pages_for(max_sequences: int, page_size: int) -> int:
    """Return the number of spare pages that padding in captured graphs needs."""
    return DecodeGraphs.pages_for(GraphBuckets.up_to(max_sequences, 1), page_size)


def measure_step(
    platform: Platform, engine: Engine, max_sequences: int, max_step_tokens: int
) -> StepMemory:
    """Run the largest step of ``engine``, and return the memory that this step takes.

    The step has as many sequences as run at once: one prompt that is as long as the step allows,
    and short ones. Every sequence samples a token. On a host, a smaller step runs through one block
    of each kind, and the memory is scaled up.
    """
    device, on_host = engine.device, is_host(platform)
    memory_now = platform.memory(device)
    unmeasured = StepMemory(
        max_step_tokens, None, memory_now.free_bytes, memory_now.total_bytes, on_host
    )
    if not platform.provides("memory_profile"):
        return unmeasured
    tokens, sequences = max_step_tokens, max_sequences
    if on_host:
        tokens = min(tokens, _HOST_TOKENS)
        sequences = max(1, sequences * tokens // max_step_tokens)
        # A first run performs one-time setup and reads mapped weights, which are no step memory.
        _run(engine, _lengths(engine, sequences, min(tokens, _WARM_TOKENS)), on_host)
    platform.synchronize(device)
    with platform.memory_profile(device) as profile:
        _run(engine, _lengths(engine, sequences, tokens), on_host)
        platform.synchronize(device)
    if not isinstance(profile, MemoryProfile):
        return unmeasured
    memory_after = profile.after
    # Memory that was in use before the step is not part of the step.
    step_bytes = max(memory_after.peak_bytes - profile.before.peak_bytes, 0)
    # The next step reuses the memory that torch's allocator keeps after this one.
    free_bytes = profile.room_bytes(1.0) + step_bytes
    if on_host:
        step_bytes = step_bytes * max_step_tokens // tokens
    return replace(unmeasured, step_bytes=step_bytes, free_bytes=free_bytes)


@contextmanager
def one_block_of_each_kind(model: CausalModel) -> Iterator[None]:
    """Reduce a ``CausalLM`` to one block of each kind, within a ``with`` block.

    Blocks run one after the other and free memory at the end, so one of each kind has the peak.
    """
    if not isinstance(model, CausalLM):
        yield
        return
    blocks = list(enumerate(model.model.layers))
    # In reversed order the first block of each kind is entered last, and stays.
    firsts = {_kind(block): number for number, block in reversed(blocks)}
    with model.model.only_blocks(sorted(firsts.values())):
        yield


def is_host(platform: Platform) -> bool:
    """Return whether the platform's device memory is the host's memory."""
    return platform.device_type == "cpu"


def pages_of(max_sequences: int, max_step_tokens: int, page_size: int) -> int:
    """Return an upper bound on the cache pages that the sequences of ``measure_step`` fill."""
    return max_sequences + -(-max_step_tokens // page_size)


def _lengths(engine: Engine, sequences: int, tokens: int) -> list[int]:
    """Return prompt lengths in descending order whose sum is ``tokens``, for one step."""
    # The context must hold the prompt and one new token.
    longest = engine.model.config.max_position_embeddings - 1
    lengths = []
    while tokens and sequences and longest:
        # Leave one token for each remaining sequence.
        lengths.append(max(1, min(longest, tokens - (sequences - 1))))
        tokens -= lengths[-1]
        sequences -= 1
    return lengths


def _kind(block: nn.Module) -> tuple[object, ...]:
    """Return a key that is equal for decoder blocks with equal memory needs."""
    parts = list(block.modules())
    attention_classes = Attention, SharedCacheAttention
    backends = (id(part.backend) for part in parts if isinstance(part, attention_classes))
    return (*backends, *map(type, parts))


def _run(engine: Engine, lengths: list[int], greedy: bool) -> None:
    """Run one step of the engine with one prompt of each length.

    Raises: ConfigError: the device has too little memory for the step.
    """
    vocabulary = engine.model.config.vocab_size
    # On a processor, sorting the vocabulary for top-p takes longer than the rest of the step.
    params = SamplingParams(temperature=0.0 if greedy else 1.0, max_new_tokens=1, seed=0)
    if not greedy:
        params = params.model_copy(update={"top_p": 0.5})
    sequences = []
    for length in lengths:
        tokens = [t % vocabulary for t in range(length)]
        source: Source | None = None
        if engine.runner.encoder_inputs is not None:
            source = engine.runner.encoder_inputs.example(tokens)
        sequences.append(engine.add(tokens, params, source))
    try:
        engine.step()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"A step of {sum(lengths)} tokens of {len(lengths)} sequences does not fit into the "
            f"memory of {engine.device} beside the weights: {described(error)}. "
            "Try: a smaller max_step_tokens or max_sequences, or weights of fewer bits"
        ) from error
    finally:
        for sequence in sequences:
            engine.cancel(sequence)


def _parts(device: str, memory: StepMemory) -> str:
    used_size = _size(memory.total_bytes - memory.free_bytes)
    users = [
        f"weights and all else in use take {used_size}",
        f"a step of {memory.tokens} tokens {_known_size(memory.step_bytes)}",
    ]
    if (encoder := memory.encoder) is not None:
        size = _known_size(encoder.step_bytes)
        users.append(f"a step of {encoder.tokens} tokens of the input encoder {size}")
        if encoder.cached_bytes:
            users.append(f"its cached vectors up to {_size(encoder.cached_bytes)}")
    listed = ", ".join(users[:-1])
    return f"{device} has {_size(memory.total_bytes)}, of which {listed}, and {users[-1]}"


def _known_size(num_bytes: int | None) -> str:
    return "an unknown amount" if num_bytes is None else _size(num_bytes)


def _size(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
