"""Builds the engine of a planned model: reads the weights, sizes and allocates the KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from interposer import CausalModel, CheckpointFile, Site, Verdict
from interposer.errors import ConfigError
from interposer.tooling import default_store
from interposer_engine._checkpoint.files import Checkpoint
from interposer_engine._checkpoint.opening import download_weights, tokenizer_of
from interposer_engine._checkpoint.tensors import check_tied
from interposer_engine._checkpoint.weight_check import WeightCheck
from interposer_engine._checkpoint.weights import Weights
from interposer_engine._compiled import (
    CompiledArtifacts,
    CompiledModel,
    artifacts_key,
    backend_name,
)
from interposer_engine._distributed.estimate import shard_notes
from interposer_engine._distributed.group import Group, SingleProcess, facts_of
from interposer_engine._encoder_inputs import has_encoder_inputs
from interposer_engine._engine import Engine
from interposer_engine._generation_config import start_tokens, stop_tokens
from interposer_engine._graphs import Capture
from interposer_engine._input_encoder import InputEncoder, load_input_encoder
from interposer_engine._kv_cache_budget import CacheBudget, check_cache, is_host
from interposer_engine._kv_cache_size import (
    cache_shape,
    measured_budget,
    smaller_cache_notes,
    state_bytes,
    state_layouts,
)
from interposer_engine._load_options import LoadOptions
from interposer_engine._lora.adapters import AdapterMemory
from interposer_engine._lora.files import Adapter, read_adapters
from interposer_engine._offload.loading import load_offloaded
from interposer_engine._plan import Plan
from interposer_engine._planning import SAMPLER
from interposer_engine._prefix_settings import PrefixCache
from interposer_engine._runner import Runner
from interposer_engine._speculation.loading import SpeculationSetup
from interposer_engine._speculation.settings import Target
from interposer_engine._tokenizer import TextTokenizer

_log = logging.getLogger("interposer")
_Compiler = Callable[[CausalModel, list[torch.Tensor]], CompiledModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine with weights and KV cache, and the parts from which its ``LanguageModel`` is made.

    Attributes:
        adapters: LoRA adapters by name, read but not yet attached.
        num_bytes: size of the checkpoint's weights.
        input_encoder: see ``LanguageModel.input_encoder``.
    """

    engine: Engine
    checkpoint: Checkpoint | CheckpointFile
    tokenizer: TextTokenizer
    weights: Weights
    adapters: Mapping[str, Adapter]
    num_bytes: int
    input_encoder: InputEncoder | None


@dataclass(slots=True)
class _Memory:
    """Memory that is reserved before the KV cache: loaded adapters and recurrent states."""

    weight_check: WeightCheck
    adapters: Mapping[str, Adapter]
    adapter_memory: AdapterMemory
    state_bytes: int


@dataclass(slots=True)
class _Loaded:
    """The loaded weights and tokenizer of a model, with its end tokens and draft source."""

    checkpoint: Checkpoint | CheckpointFile
    tokenizer: TextTokenizer
    weights: Weights
    speculation: SpeculationSetup | None
    stop_token_ids: frozenset[int]
    start_token_ids: tuple[int, ...]
    notes: list[str] = field(default_factory=list)


def build_engine(
    planned: Plan,
    options: LoadOptions,
    group: Group | SingleProcess,
    load_draft: Callable[..., Any],
) -> BuiltEngine:
    """Read the weights of a planned model, size its KV cache, and create its engine.

    All ranks of ``group`` load together: a failure of one rank is raised on every rank. Notes on
    weights and memory are added to those of the plan's resolver.

    Args:
        load_draft: loads a draft model for the same device, see ``load``.
    Raises: errors of ``load`` that need weights or memory.
    """
    resolver = planned.resolver
    with group.raise_together("checking the plan"):
        for note in resolver.notes:
            _log.warning("%s: %s", planned.path, note)
        # Shards are normal: note them without a warning.
        notes = [] if group.ranks is None else shard_notes(planned.model)
        memory = _reserve_memory(planned, options)
        if memory.adapters:
            notes.append(str(memory.adapter_memory))
    group.agree(
        facts_of(
            planned,
            **options.sizes,
            cache_tokens=options.cache_tokens,
            prefix_cache=options.prefix_settings,
            speculation=options.speculation_settings,
            expert_parallel=options.expert_parallel,
            offload=options.offload,
            text_only=options.text_only,
            adapters=sorted(memory.adapters),
        )
    )
    with group.raise_together("connecting the ranks"):
        for communicator in resolver.communicators.values():
            communicator.open()
    with group.raise_together("reading the weights"):
        compiled = None if planned.compiled is None else _compiler(planned, planned.compiled)
        loaded = _load_weights(planned, options, memory.weight_check, load_draft)
        if planned.offload is not None:  # the sizes of loaded weights are exact
            estimates = planned.offload.plan.notes()
            resolver.notes[:] = [note for note in resolver.notes if note not in estimates]
        notes += loaded.notes
    input_encoder = None
    if not options.text_only:
        # Before the cache is sized, because the encoder takes memory as well.
        with group.raise_together("loading the input encoder"):
            input_encoder, encoder_notes = load_input_encoder(
                loaded.checkpoint, planned, options.max_step_tokens
            )
            notes += encoder_notes

    new_engine = partial(_new_engine, planned, options, group, loaded)
    with group.raise_together("sizing the cache"):
        budget = _cache_budget(planned, options, group, memory, new_engine, input_encoder)
        notes.append(str(budget))
        notes += smaller_cache_notes(planned, budget, options.max_sequences)
    num_tokens = group.smallest(budget.tokens)
    if num_tokens < budget.tokens:
        notes.append(f"KV cache of {num_tokens} tokens, limited by another rank")
    with group.raise_together("allocating the cache"):
        prefixes = options.prefix_settings
        engine = new_engine(
            -(-num_tokens // planned.page_size),
            capture=planned.placement.platform.capture_graph if planned.graphs else None,
            compiled=compiled,
            prefixes=prefixes,
        )
        if prefixes is not None:
            note = prefixes.description(state_layouts(planned), options.max_sequences)
            notes += [note] if note else []
        if loaded.speculation is not None:
            site = Site(resolver, SAMPLER, planned.dtype)
            notes += loaded.speculation.start(engine, site)
    resolver.notes += notes
    return BuiltEngine(
        engine=engine,
        checkpoint=loaded.checkpoint,
        tokenizer=loaded.tokenizer,
        weights=loaded.weights,
        adapters=memory.adapters,
        num_bytes=loaded.checkpoint.num_bytes,
        input_encoder=input_encoder,
    )


def _reserve_memory(planned: Plan, options: LoadOptions) -> _Memory:
    """Load the adapters, and check the requested sizes against the plan and the free memory.

    Raises: ConfigError: the cache exceeds the free memory, or graphs are required but refused.
    """
    platform, device = planned.placement.platform, planned.placement.device.torch_device
    prefixes = options.prefix_settings
    if prefixes is not None:
        prefixes.check(platform)
    num_state_bytes = state_bytes(planned, options.max_sequences, prefixes)
    check = WeightCheck.of(planned)
    adapters = read_adapters(
        options.adapters, planned.model, planned.dtype, "cpu", planned.checkpoint, check
    )
    adapter_memory = AdapterMemory.of(adapters.values(), planned.dtype.itemsize, is_host(platform))
    if options.cache_tokens is not None:
        free_bytes = platform.memory(device).free_bytes - adapter_memory.num_bytes
        shape = cache_shape(planned, **options.sizes)
        check_cache("load", free_bytes, shape, options.cache_tokens, num_state_bytes)
    if _requires_graphs(planned) and planned.graphs is not None and not planned.graphs:
        raise ConfigError(f"graphs='on' was requested, but {planned.graphs.reason}")
    return _Memory(check, adapters, adapter_memory, num_state_bytes)


def _load_weights(
    planned: Plan, options: LoadOptions, check: WeightCheck, load_draft: Callable[..., Any]
) -> _Loaded:
    """Read the tokenizer and the weights, after allocating memory for speculative decoding."""
    platform, device = planned.placement.platform, planned.placement.device.torch_device
    checkpoint = download_weights(planned.checkpoint)
    if checkpoint is not planned.checkpoint:  # downloaded now, so not yet compared by the plan
        check_tied(checkpoint, planned.model)
    tokenizer = tokenizer_of(checkpoint)
    total_bytes, done_bytes = checkpoint.num_bytes, 0

    def advance(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        if options.progress is not None:
            options.progress(done_bytes, total_bytes)

    speculation = None
    if (settings := options.speculation_settings) is not None:
        target = Target(planned, checkpoint, tokenizer, load_draft, **options.sizes)
        speculation = SpeculationSetup(settings, target)
    weights = Weights(planned.model, device, check)
    if (seed := planned.resolver.config.seed) is not None:
        platform.seed(seed)
    with planned.numerics():
        notes = load_offloaded(planned, checkpoint, weights, advance)
        planned.model.reserve_positions(0, device)
    start_token_ids: tuple[int, ...] = ()
    if has_encoder_inputs(planned.model):
        vocab_size = planned.decoder.vocab_size
        start_token_ids = start_tokens(checkpoint.path, checkpoint.config, vocab_size)
    return _Loaded(
        checkpoint,
        tokenizer,
        weights,
        speculation,
        stop_tokens(checkpoint.path, checkpoint.config, tokenizer),
        start_token_ids,
        [*notes, *check.findings],
    )


def _new_engine(
    planned: Plan,
    options: LoadOptions,
    group: Group | SingleProcess,
    loaded: _Loaded,
    num_pages: int,
    *,
    capture: Capture | None = None,
    compiled: _Compiler | None = None,
    prefixes: PrefixCache | None = None,
) -> Engine:
    """Create an engine with a KV cache of ``num_pages``.

    Without the keyword arguments the engine only serves to measure a step.
    """
    platform, device = planned.placement.platform, planned.placement.device.torch_device
    runner = Runner(
        planned.model,
        device,
        page_size=planned.page_size,
        num_pages=num_pages,
        capture=capture,
        graphs_required=_requires_graphs(planned),
        numerics=planned.numerics,
        compiled=compiled,
        prefixes=(
            None if prefixes is None else partial(prefixes.shared, device=device, platform=platform)
        ),
        **options.sizes,
    )
    return group.engine(
        runner,
        planned.sampler,
        stop_token_ids=loaded.stop_token_ids,
        seed=planned.resolver.config.seed,
        start_token_ids=loaded.start_token_ids,
    )


def _cache_budget(
    planned: Plan,
    options: LoadOptions,
    group: Group | SingleProcess,
    memory: _Memory,
    new_engine: Callable[[int], Engine],
    input_encoder: InputEncoder | None,
) -> CacheBudget:
    """Size the KV cache: as requested, or from the memory that the largest step leaves free."""
    if options.cache_tokens is not None:
        device, shape = planned.placement.device.torch_device, cache_shape(planned, **options.sizes)
        return CacheBudget.for_tokens(device, shape, options.cache_tokens, memory.state_bytes)
    return measured_budget(
        planned,
        new_engine,
        options.memory_fraction,
        memory.state_bytes,
        memory.adapter_memory.num_bytes,
        **options.sizes,
        encoder=input_encoder,
        measures=group.is_one_platform,
    )


def _requires_graphs(planned: Plan) -> bool:
    return planned.resolver.config.graphs == "on"


def _compiler(planned: Plan, verdict: Verdict) -> _Compiler:
    """Return a function that compiles a loaded model with the settings of its plan.

    Raises: ConfigError: there is no such backend, or ``verdict`` refuses it.
    """
    resolver, sizes = planned.resolver, planned.checkpoint.config
    backend = backend_name(resolver.config, planned.placement, verdict)
    key = artifacts_key(resolver, backend, {"config": sizes, "dtype": str(planned.dtype)})
    artifacts = CompiledArtifacts(default_store(resolver.config), key)
    return lambda model, caches: CompiledModel(model, caches, backend, resolver, artifacts)
