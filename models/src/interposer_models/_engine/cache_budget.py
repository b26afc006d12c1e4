"""The memory that a KV cache may take: what weights, others and the largest step leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from interposer import CausalModel, Platform
from interposer.errors import ConfigError, described
from interposer_models._decoder.decoder import CausalLM
from interposer_models._decoder.stored_attention import StoredAttention
from interposer_models._engine.cache_shape import CacheShape
from interposer_models._engine.decode_graphs import DecodeGraphs
from interposer_models._engine.engine import Engine
from interposer_models._engine.graph_buckets import GraphBuckets
from interposer_models._engine.sampling_params import SamplingParams
from interposer_ops.devices.memory_profile import MemoryProfile
from interposer_ops.layers.attention import Attention

_OF_ACCELERATOR = 0.9
# Others use the host's memory as well, and nobody knows what comes of a step that was not measured.
_OF_OTHER = 0.25
# Of a host, which computes less in a second: what a step takes grows with its tokens.
_HOST_TOKENS = 512
_WARM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of a device around the largest step.

    Attributes:
        tokens: of the step.
        step_bytes: what it takes at its peak and gives back; None where that cannot be told.
        free_bytes, total_bytes: of the device, without a cache and without that step.
        shared: others use it as well, as it is the host's.
    """

    tokens: int
    step_bytes: int | None
    free_bytes: int
    total_bytes: int
    shared: bool

    @property
    def rest_bytes(self) -> int:
        """The bytes that are left beside the step."""
        return self.free_bytes - (self.step_bytes or 0)


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """The size of a cache, and what it was computed from; its text is for people.

    Attributes:
        tokens: that the cache holds.
        cache_bytes: that it takes.
        state_bytes: what layers keep of sequences besides, whatever their lengths.
        fraction: of the rest that the cache may take; None where a number of tokens was asked for.
        memory: None where that was, too.
        parts: of the cache, where some layers hold other tokens than these.
    """

    device: str
    tokens: int
    cache_bytes: int
    fraction: float | None = None
    memory: StepMemory | None = None
    state_bytes: int = 0
    parts: str = ""

    @classmethod
    def asked_for(
        cls, device: str, shape: CacheShape, cache_tokens: int, state_bytes: int = 0
    ) -> CacheBudget:
        """Return the cache of so many tokens as somebody asked for."""
        pages = -(-cache_tokens // shape.page_size)
        taken, parts = shape.num_bytes(pages), shape.parts(pages)
        return cls(device, cache_tokens, taken, state_bytes=state_bytes, parts=parts)

    def __str__(self) -> str:
        size = f"KV cache of {self.tokens} tokens, {_size(self.cache_bytes)}"
        if self.parts:
            size += f" ({self.parts})"
        if self.state_bytes:
            size += f", beside {_size(self.state_bytes)} of recurrent states"
        if self.memory is None or self.fraction is None:
            return f"{size}, as cache_tokens says"
        rest = _size(max(self.memory.rest_bytes, 0))
        return (
            f"{size}, within {self.fraction:g} of the {rest} that are left: "
            f"{_parts(self.device, self.memory)}"
        )


def cache_budget(
    memory: StepMemory,
    device: str,
    shape: CacheShape,
    *,
    wanted_tokens: int,
    fraction: float | None,
    state_bytes: int = 0,
) -> CacheBudget:
    """Return what the cache may hold: ``wanted_tokens``, or what fits into the fraction.

    Args:
        fraction: None takes 0.9 of an accelerator whose steps are measured, else 0.25.
        state_bytes: that the engine takes for states, of the same fraction.
    Raises: ConfigError: not one page fits, or the states do not.
    """
    if fraction is None:
        own = memory.step_bytes is not None and not memory.shared
        fraction = _OF_ACCELERATOR if own else _OF_OTHER
    wanted_pages = -(-wanted_tokens // shape.page_size)
    room_bytes = int(memory.rest_bytes * fraction) - state_bytes
    fitting = shape.fitting(room_bytes)
    pages = wanted_pages if fitting is None else min(wanted_pages, fitting)
    if pages < 1 or room_bytes < 0:
        needed = _size(shape.num_bytes(1) + state_bytes)
        raise ConfigError(
            f"No memory is left for the KV cache, which needs {needed} at least and may take "
            f"{fraction:g} of {_size(max(memory.rest_bytes, 0))}: {_parts(device, memory)}. "
            "Try: a smaller max_step_tokens or max_sequences, a larger memory_fraction, weights of "
            "fewer bits, or end what else uses the device"
        )
    tokens = min(wanted_tokens, pages * shape.page_size)
    cache_bytes, parts = shape.num_bytes(pages), shape.parts(pages)
    return CacheBudget(device, tokens, cache_bytes, fraction, memory, state_bytes, parts)


def unmeasured_budget(
    platform: Platform,
    device: str,
    shape: CacheShape,
    wanted_tokens: int,
    max_step_tokens: int,
    state_bytes: int,
) -> CacheBudget:
    """Return the cache of a model whose steps are not measured; see ``cache_budget``."""
    now, shared = platform.memory(device), is_host(platform)
    memory = StepMemory(max_step_tokens, None, now.free_bytes, now.total_bytes, shared)
    return cache_budget(
        memory,
        device,
        shape,
        wanted_tokens=wanted_tokens,
        fraction=None,
        state_bytes=state_bytes,
    )


def check_sizes(**sizes: int | None) -> None:
    """Raise ConfigError if one that is given is no positive integer."""
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ConfigError(f"{name} is {size!r}, must be an integer of at least 1")


def check_cache(
    call: str, free_bytes: int, shape: CacheShape, cache_tokens: int, state_bytes: int = 0
) -> None:
    """Raise ConfigError if so many tokens do not fit into the free memory beside the states.

    Args:
        call: what the user called.
    """
    if state_bytes > free_bytes:
        raise ConfigError(
            f"the states of sequences take {_size(state_bytes)}, free are {_size(free_bytes)}. "
            "Try: a smaller max_sequences"
        )
    pages = shape.fitting(free_bytes - state_bytes)
    if pages is not None and cache_tokens > (fitting := max(pages, 0) * shape.page_size):
        raise ConfigError(
            f"cache_tokens is {cache_tokens}, the free memory holds {fitting}. "
            f"Try: {call}(..., cache_tokens={fitting // 4})"
        )


def spare_pages_for(max_sequences: int, page_size: int) -> int:
    """Return how many pages graphs of steps of up to so many sequences take besides."""
    return DecodeGraphs.pages_for(GraphBuckets.up_to(max_sequences, 1), page_size)


def measured_step(
    platform: Platform, engine: Engine, max_sequences: int, max_step_tokens: int
) -> StepMemory:
    """Return the memory that the largest step of ``engine`` takes, by running it.

    One prompt is as long as the step allows, beside as many sequences as run at once, and all draw
    their tokens. A host runs a part of it, through one block of each kind.
    """
    device, on_host = engine.device, is_host(platform)
    now = platform.memory(device)
    unknown = StepMemory(max_step_tokens, None, now.free_bytes, now.total_bytes, on_host)
    if not platform.provides("memory_profile"):
        return unknown
    tokens, sequences = max_step_tokens, max_sequences
    if on_host:
        tokens = min(tokens, _HOST_TOKENS)
        sequences = max(1, sequences * tokens // max_step_tokens)
        # What is set up once, and weights that are only mapped, are not a step's.
        _run(engine, _lengths(engine, sequences, min(tokens, _WARM_TOKENS)), on_host)
    platform.synchronize(device)
    with platform.memory_profile(device) as profile:
        _run(engine, _lengths(engine, sequences, tokens), on_host)
        platform.synchronize(device)
    if not isinstance(profile, MemoryProfile):
        return unknown
    after = profile.after
    step_bytes = max(after.peak_bytes - profile.before.peak_bytes, 0)
    # Whatever torch keeps of the step beyond its tensors, the next one takes again.
    free_bytes = profile.room_bytes(1.0) + step_bytes
    if on_host:
        step_bytes = step_bytes * max_step_tokens // tokens
    return replace(unknown, step_bytes=step_bytes, free_bytes=free_bytes)


@contextmanager
def one_block_of_each_kind(model: CausalModel) -> Iterator[None]:
    """Leave one block of each kind in ``model`` within a ``with`` block, if it is a ``CausalLM``.

    Blocks compute one after the other, in memory that they give back.
    """
    if not isinstance(model, CausalLM):
        yield
        return
    blocks = list(enumerate(model.model.layers))
    firsts = {_kind(block): number for number, block in reversed(blocks)}
    with model.model.only(sorted(firsts.values())):
        yield


def is_host(platform: Platform) -> bool:
    """Say whether the platform's memory is the host's."""
    return platform.device_type == "cpu"


def pages_of(max_sequences: int, max_step_tokens: int, page_size: int) -> int:
    """Return how many pages the sequences of ``measured_step`` fill."""
    return max_sequences + -(-max_step_tokens // page_size)


def _lengths(engine: Engine, sequences: int, tokens: int) -> list[int]:
    """Return the lengths of prompts, the longest first, that make a step of so many tokens."""
    # One new token has to fit into the context behind a prompt.
    longest = engine.model.config.max_position_embeddings - 1
    lengths = []
    while tokens and sequences and longest:
        lengths.append(max(1, min(longest, tokens - (sequences - 1))))
        tokens -= lengths[-1]
        sequences -= 1
    return lengths


def _kind(block: nn.Module) -> tuple[object, ...]:
    """Return what blocks with equal needs of memory share: backends, and the classes of parts."""
    parts = list(block.modules())
    attending = Attention, StoredAttention
    backends = (id(part.backend) for part in parts if isinstance(part, attending))
    return (*backends, *map(type, parts))


def _run(engine: Engine, lengths: list[int], greedy: bool) -> None:
    vocabulary = engine.model.config.vocab_size
    # Sorting whole vocabularies takes a processor longer than the rest.
    params = SamplingParams(temperature=0.0 if greedy else 1.0, max_new_tokens=1, seed=0)
    if not greedy:
        params = params.model_copy(update={"top_p": 0.5})
    started = []
    for length in lengths:
        tokens, source = [t % vocabulary for t in range(length)], None
        if engine.runner.sources is not None:
            source = tokens[: engine.runner.sources.longest]
        started.append(engine.add(tokens, params, source))
    try:
        engine.step()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"A step of {sum(lengths)} tokens of {len(lengths)} sequences does not fit into the "
            f"memory of {engine.device} beside the weights: {described(error)}. "
            "Try: a smaller max_step_tokens or max_sequences, or weights of fewer bits"
        ) from error
    finally:
        for sequence in started:
            engine.cancel(sequence)


def _parts(device: str, memory: StepMemory) -> str:
    total, used = _size(memory.total_bytes), _size(memory.total_bytes - memory.free_bytes)
    takes = "nobody knows how much" if memory.step_bytes is None else _size(memory.step_bytes)
    return (
        f"{device} has {total}, of which weights and all else in use take {used}, and a step of "
        f"{memory.tokens} tokens {takes}"
    )


def _size(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
