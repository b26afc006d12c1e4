"""From a model directory to a model that runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from interposer import (
    CausalModel,
    CheckpointFile,
    Config,
    Placement,
    Ranks,
    Resolver,
    Rule,
    Site,
    Verdict,
    current_registry,
    effective_config,
    place,
)
from interposer.errors import (
    ConfigError,
    InterposerError,
    PluginError,
    UnsupportedModelError,
    described,
    foreign_errors,
)
from interposer.tooling import default_store, entry_points
from interposer_engine._checkpoint.dequantize import dequantize_once
from interposer_engine._checkpoint.opening import (
    config_source,
    open_checkpoint,
    tokenizer_of,
    with_weights,
)
from interposer_engine._checkpoint.tensors import check_tied, untied
from interposer_engine._checkpoint.weight_check import WeightCheck
from interposer_engine._checkpoint.weights import Weights
from interposer_engine._compiled import (
    CompiledArtifacts,
    CompiledModel,
    artifacts_key,
    backend_name,
    judge_compiler,
)
from interposer_engine._distributed.estimate import check_placed, cut_notes, estimated
from interposer_engine._distributed.group import described_ranks, facts_of, joined
from interposer_engine._encoder_inputs import reads_sources
from interposer_engine._engine import Engine
from interposer_engine._generation_config import GenerationSettings, start_tokens, stop_tokens
from interposer_engine._graphs import Capture
from interposer_engine._kv_cache_budget import CacheBudget, check_cache, check_sizes, is_host
from interposer_engine._kv_cache_size import (
    cache_shape,
    check_fraction,
    measured_budget,
    state_bytes,
    state_layouts,
)
from interposer_engine._language_model import LanguageModel
from interposer_engine._lora.adapters import AdapterRoom
from interposer_engine._lora.files import read_adapters
from interposer_engine._offload.loading import load_offloaded
from interposer_engine._offload.planning import offloading
from interposer_engine._plan import Plan, compute_dtype
from interposer_engine._prefix_settings import PrefixCache
from interposer_engine._quantize.settings import quantization_settings, stated_in
from interposer_engine._runner import Runner
from interposer_engine._speculation.loading import Preparation
from interposer_engine._speculation.settings import Speculation, Target
from interposer_models.decoder import (
    DecoderSettings,
    blamed_on_family,
    cache_note,
    checked_model,
    choose_family,
    located,
)
from interposer_ops.attention import common_page_size
from interposer_ops.devices.graphs import judge_graphs
from interposer_ops.layers.expert_placement import ExpertParallel
from interposer_ops.layers.sampler import Sampler

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from interposer_engine._distributed.group import Group


GROUP = "interposer.loaders"


def load_without_family(
    path: str | Path, config: Config, options: Mapping[str, Any]
) -> LanguageModel | None:
    """Load a model with a loader of the entry points ``interposer.loaders``.

    A loader is called with the checkpoint (weights may not be downloaded yet), the policy and
    the other arguments of ``load``.

    Args:
        options: arguments of ``load`` by name, except ``path``, ``platform`` and ``config``.
    Returns: None if a family supports the architecture, the checkpoint is no folder, or no loader
        is installed.
    Raises:
        UnsupportedModelError: the loader cannot run the architecture.
        ConfigError: the loader does not accept an option.
        PluginError: the loader failed.
    """
    checkpoint, _ = open_checkpoint(path, config)
    # A file format of a plugin, such as GGUF; loaders read folders only.
    if isinstance(checkpoint, CheckpointFile):
        return None
    architectures = checkpoint.config.get("architectures")
    supported = current_registry(config).subjects("model")
    if not isinstance(architectures, list) or any(str(name) in supported for name in architectures):
        return None
    # With several loaders, the choice must not depend on the order of installation.
    points = sorted(entry_points(GROUP), key=lambda point: (point.name, point.value))
    if not points:
        return None
    point = points[0]
    try:
        loader = point.load()
        model: LanguageModel = loader(checkpoint, config, **options)
    except InterposerError:
        raise
    except foreign_errors() as error:
        origin = point.dist.name if point.dist is not None else point.value
        raise PluginError(
            point.name,
            origin,
            f"its loader failed for {checkpoint.path}: {described(error)}",
            "report it to its authors, or uninstall it",
        ) from error
    return model


_SAMPLER = "sampler"
_log = logging.getLogger("interposer")
_Compiler = Callable[[CausalModel, list[torch.Tensor]], CompiledModel]


def plan(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    platform: str | None = None,
    config: Config | None = None,
    *,
    quantization: str | Mapping[str, Any] | None = None,
    placement: Placement | None = None,
    tensor_parallel: int | Ranks | None = None,
    expert_parallel: bool | ExpertParallel = False,
    offload: bool | int | str | None = None,
) -> Plan:
    """Return what ``load`` would build, without reading weights; ``explain`` takes it as well.

    Args:
        placement: where to plan for; None leaves that to the selection. The others are those of
            ``load``.
        tensor_parallel: the processes that compute the model together, which need not be there.
    """
    config = _policy(config, platform)
    checkpoint, opened = open_checkpoint(path, config)
    placement = placement or place(config)
    ranks = described_ranks(tensor_parallel, placement.platform.name, expert_parallel)
    resolver = Resolver.at(placement, config, ranks)
    if opened is not None:
        resolver.record(opened)
    source = config_source(checkpoint)
    decoder = choose_family(resolver, checkpoint.config, source)
    decoder = untied(decoder, checkpoint, resolver.notes)
    if isinstance(decoder, DecoderSettings):
        resolver.notes += decoder.rotation_notes()
    compute = compute_dtype(dtype, decoder.dtype, placement)
    settings = quantization_settings(
        quantization, decoder.quantization_config, resolver.registry, checkpoint.path
    )
    if settings is not None:
        with stated_in(source, quantization is None):
            resolver.choose_scheme(settings)
    site = Site(resolver, "", compute)
    with torch.device("meta"):
        with blamed_on_family(resolver, "attention"):
            page_size = common_page_size(resolver, decoder.attention(site))
        with located(checkpoint.config, source), blamed_on_family(resolver, "build"):
            model = checked_model(decoder.build(site, page_size))
        sampler = Sampler(site.at(_SAMPLER), decoder.vocab_size)
    check_tied(checkpoint, model)
    check_placed(model, resolver, ranks)
    if note := cache_note(model, config, page_size):
        resolver.notes.append(note)
    generation = GenerationSettings.of_folder(checkpoint.path)
    unapplied = generation.unapplied_note(has_encoder=reads_sources(model))
    resolver.notes += [unapplied] if unapplied else []
    dequantize_once(model, site, placement)
    resolver.check_places()
    offloads = offloading(offload, model, placement, resolver.notes, config.packed, ranks)
    resolver.notes += estimated(model, resolver)
    if ranks is not None and ranks.group is None:
        resolver.notes += cut_notes(model)
    # Tokens are drawn outside of the graph: how, changes with every request.
    graphs = judge_graphs(resolver, placement, frozenset({_SAMPLER}))
    compiled = judge_compiler(config, placement, graphs, [c for c, _ in resolver.choices.values()])
    if offloads is not None:
        graphs, compiled = offloads.judged(graphs), offloads.judged(compiled)
    return Plan(
        checkpoint,
        decoder,
        quantization,
        placement,
        compute,
        resolver,
        page_size,
        model,
        sampler,
        graphs,
        compiled,
        offloads,
    )


def load(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    platform: str | None = None,
    config: Config | None = None,
    *,
    quantization: str | Mapping[str, Any] | None = None,
    cache_tokens: int | None = None,
    memory_fraction: float | None = None,
    max_sequences: int = 64,
    max_step_tokens: int = 2048,
    prefix_cache: bool | PrefixCache = False,
    adapters: Mapping[str, str | Path] | None = None,
    speculation: str | Path | Speculation | None = None,
    tensor_parallel: int | ProcessGroup | Group | None = None,
    expert_parallel: bool | ExpertParallel = False,
    offload: bool | int | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LanguageModel:
    """Load a model of Hugging Face, or a file that a plugin reads, ready to generate.

    Args:
        path: a folder, a file, or the name of a model on the hub, ``"namespace/name"`` or
            ``"namespace/name@revision"``, which is downloaded unless it is in the hub's cache.
        dtype: to compute in; ``"auto"`` takes the checkpoint's where the platform offers it, else
            the platform's preferred one.
        platform: name of the platform; None leaves it to the selection.
        config: policy for this model, above every other source.
        quantization: a method by which plain weights are quantized while they load, such as
            ``"fp8"``, or its settings with the name as ``quant_method``.
        cache_tokens: tokens that the paged cache holds, of layers with windows no more than these
            need, and of what an encoder reads as many besides; None takes what ``max_sequences``
            full contexts need, within ``memory_fraction``.
        memory_fraction: share of the memory that weights and the largest step leave free, which the
            cache may take, above 0 and at most 1. The step is run to know. None takes 0.9 of an
            accelerator; 0.25 of a host, whose memory others use as well, and of platforms that
            measure no step.
        max_sequences: how many requests run at once; more wait.
        max_step_tokens: tokens of one step; a longer prompt is computed in chunks, or refused
            where its tokens see each other in both directions.
        prefix_cache: prompts that begin alike share what is computed of their common beginning,
            which stays in the cache until its room is wanted; ``PrefixCache(...)`` says how much
            memory it has besides. Not for prefix-LMs, nor for models with an encoder.
        adapters: LoRA adapters to load, by the names that requests have for them; see
            ``LanguageModel.load_adapter``. Their memory, and that of replacing one, is taken before
            the cache is settled.
        speculation: what guesses tokens that steps verify: ``"ngram"``, ``"heads"``, the path of
            a head or of a draft model, or ``Speculation(...)``.
        tensor_parallel: how many processes compute the model together: those that torchrun
            started, or that are in torch's default process group; or a process group of some of
            them. Each of them makes this call, and the same calls to what it returns.
        expert_parallel: each process holds some experts of a mixture whole, not a share of all;
            ``ExpertParallel(...)`` says how many have copies, and when tokens are sent to them.
        offload: how much of the weights stays in the memory that computes, in bytes, or as
            ``"8GiB"`` or ``"50%"``, while blocks beyond that come from host memory or the disk when
            they compute; True leaves the size to the memory that is free, None offloads what
            exceeds a host's, False nothing.
        progress: told ``(bytes done, bytes in all)`` while weights load.
    Raises:
        CheckpointError: the directory is incomplete or contradicts itself; there is no model of
            that name, or it cannot be fetched.
        UnsupportedModelError: nothing here implements the architecture.
        UnknownNameError: a name is not known; the text lists the known ones.
        NoCandidateError: nothing that is installed can serve a part of the model.
        ConfigError: a size is not a positive integer, a fraction not one, the cache exceeds the
            free memory, no memory is left for it, a quantized checkpoint is to be quantized by
            another method, or graphs, compilation, a prefix cache or
            speculation or offload are asked for that cannot be; there are not so many processes.
        RankError: another rank failed, left, or was given something else.
    """
    group = joined(tensor_parallel)
    start = time.time_ns()
    placement = group.placement(_policy(config, platform))
    sizes = {"max_sequences": max_sequences, "max_step_tokens": max_step_tokens}
    try:
        with group.together("planning"):
            check_sizes(**sizes, cache_tokens=cache_tokens)
            check_fraction(memory_fraction, cache_tokens)
            guesses = None if speculation is None else Speculation.of(speculation)
            shared = PrefixCache.of(prefix_cache)
            planned = plan(
                path,
                dtype,
                platform,
                config,
                quantization=quantization,
                placement=placement,
                tensor_parallel=group.ranks,
                expert_parallel=expert_parallel,
                offload=offload,
            )
    except UnsupportedModelError:
        if group.ranks is not None:
            raise
        options = {
            "dtype": dtype,
            "quantization": quantization,
            "cache_tokens": cache_tokens,
            "memory_fraction": memory_fraction,
            "prefix_cache": prefix_cache,
            "adapters": adapters,
            "speculation": speculation,
            "expert_parallel": expert_parallel,
            "offload": offload,
            "progress": progress,
        }
        model = load_without_family(path, _policy(config, platform), {**options, **sizes})
        if model is None:
            raise
        return model
    with group.together("checking the plan"):
        for note in planned.resolver.notes:
            _log.warning("%s: %s", path, note)
        if group.ranks is not None:  # cuts are as they should be, of which nobody is warned
            planned.resolver.notes += cut_notes(planned.model)
        if shared is not None:
            shared.check(planned.placement.platform)
        states = state_bytes(planned, max_sequences, shared)
        check = WeightCheck.of(planned)
        read = read_adapters(
            adapters or {}, planned.model, planned.dtype, "cpu", planned.checkpoint, check
        )
        room = AdapterRoom.of(
            read.values(), planned.dtype.itemsize, is_host(planned.placement.platform)
        )
        if read:
            planned.resolver.notes.append(str(room))
        if cache_tokens is not None:
            here = planned.placement
            memory = here.platform.memory(here.device.torch_device)
            free_bytes = memory.free_bytes - room.num_bytes
            check_cache("load", free_bytes, cache_shape(planned, **sizes), cache_tokens, states)
        required = planned.resolver.config.graphs == "on"
        if required and planned.graphs is not None and not planned.graphs:
            raise ConfigError(f"graphs='on' was asked for, but {planned.graphs.reason}")
    given: dict[str, object] = {"cache_tokens": cache_tokens, "prefix_cache": shared}
    given |= {"speculation": guesses, "expert_parallel": expert_parallel, "offload": offload}
    group.agree(facts_of(planned, **sizes, **given, adapters=sorted(read)))
    with group.together("meeting"):
        for communicator in planned.resolver.communicators.values():
            communicator.open()
    device = planned.placement.device.torch_device
    total = done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    runs_on, policy = planned.placement.platform, planned.resolver.config
    with group.together("reading the weights"):
        compiled = None if planned.compiled is None else _compiler(planned, planned.compiled)
        checkpoint = with_weights(planned.checkpoint)
        if checkpoint is not planned.checkpoint:
            check_tied(checkpoint, planned.model)
        tokenizer = tokenizer_of(checkpoint)
        total = checkpoint.num_bytes
        prepared = None
        if guesses is not None:  # in memory before that of the cache is settled
            opened = partial(
                load,
                platform=platform,
                config=config,
                max_sequences=max_sequences,
                max_step_tokens=max_step_tokens,
                tensor_parallel=group.inner(),
            )
            prepared = Preparation(guesses, Target(planned, checkpoint, tokenizer, opened, **sizes))
        weights = Weights(planned.model, device, check)
        if policy.seed is not None:
            runs_on.seed(policy.seed)
        with planned.numerics():
            load_offloaded(planned, checkpoint, weights, advance)
            planned.resolver.notes += check.findings
            planned.model.reserve_positions(0, device)
        stop_token_ids = stop_tokens(checkpoint.path, checkpoint.config, tokenizer)
        starts: tuple[int, ...] = ()
        if reads_sources(planned.model):
            size = planned.decoder.vocab_size
            starts = start_tokens(checkpoint.path, checkpoint.config, size)

    def engine_of(
        num_pages: int,
        capture: Capture | None = None,
        compiled: _Compiler | None = None,
        shared: PrefixCache | None = None,
    ) -> Engine:
        runner = Runner(
            planned.model,
            device,
            page_size=planned.page_size,
            num_pages=num_pages,
            capture=capture,
            graphs_required=required,
            numerics=planned.numerics,
            compiled=compiled,
            prefixes=(
                None if shared is None else partial(shared.shared, device=device, platform=runs_on)
            ),
            **sizes,
        )
        return group.engine(
            runner,
            planned.sampler,
            stop_token_ids=stop_token_ids,
            seed=policy.seed,
            start_token_ids=starts,
        )

    with group.together("settling the cache"):
        if cache_tokens is None:
            budget = measured_budget(
                planned,
                engine_of,
                memory_fraction,
                states,
                room.num_bytes,
                **sizes,
                measures=group.alike,
            )
        else:
            shape = cache_shape(planned, **sizes)
            budget = CacheBudget.asked_for(device, shape, cache_tokens, states)
        planned.resolver.notes.append(str(budget))
    num_tokens = group.smallest(budget.tokens)
    if num_tokens < budget.tokens:
        planned.resolver.notes.append(f"KV cache of {num_tokens} tokens, as another rank has")
    with group.together("making the cache"):
        engine = engine_of(
            -(-num_tokens // planned.page_size),
            runs_on.capture_graph if planned.graphs else None,
            compiled,
            shared,
        )
        if shared is not None and (told := shared.told(state_layouts(planned), max_sequences)):
            planned.resolver.notes.append(told)
        if prepared is not None:
            prepared.start(engine, Site(planned.resolver, _SAMPLER, planned.dtype))
    planned.resolver.registry.plugins.observe(
        "interposer_finished",
        activity="load",
        subject=str(checkpoint.path),
        start_ns=start,
        end_ns=time.time_ns(),
        facts={"bytes": total, "device": device, "dtype": str(planned.dtype)},
    )
    return group.model(engine, tokenizer, planned, weights, read)


def _policy(config: Config | None, platform: str | None) -> Config:
    """Return the policy in force, with the platform that was asked for by name."""
    config = effective_config(config)
    if platform is not None:
        config = config.model_copy(update={"platform": Rule(pin=platform)})
    return config


def _compiler(planned: Plan, verdict: Verdict) -> _Compiler:
    """Return a function that compiles the loaded model of a plan.

    Raises: ConfigError: there is no such backend, or ``verdict`` refuses it.
    """
    resolver, sizes = planned.resolver, planned.checkpoint.config
    backend = backend_name(resolver.config, planned.placement, verdict)
    key = artifacts_key(resolver, backend, {"config": sizes, "dtype": str(planned.dtype)})
    artifacts = CompiledArtifacts(default_store(resolver.config), key)
    return lambda model, caches: CompiledModel(model, caches, backend, resolver, artifacts)
