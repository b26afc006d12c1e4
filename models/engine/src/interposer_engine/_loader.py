"""From a model directory to a model that generates: ``load``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from interposer import CheckpointFile, Config, current_registry
from interposer.errors import (
    InterposerError,
    PluginError,
    UnsupportedModelError,
    described,
    foreign_errors,
)
from interposer.tooling import entry_points
from interposer_engine._checkpoint.opening import open_checkpoint
from interposer_engine._distributed.group import join_ranks
from interposer_engine._engine_build import build_engine
from interposer_engine._language_model import LanguageModel
from interposer_engine._load_options import LoadOptions, policy_in_force
from interposer_engine._planning import plan
from interposer_engine._prefix_settings import PrefixCache
from interposer_engine._speculation.settings import Speculation
from interposer_ops.layers.expert_placement import ExpertParallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from interposer_engine._distributed.group import Group


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
    options = LoadOptions(
        dtype=dtype,
        config=policy_in_force(config, platform),
        quantization=quantization,
        cache_tokens=cache_tokens,
        memory_fraction=memory_fraction,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        prefix_cache=prefix_cache,
        adapters=adapters or {},
        speculation=speculation,
        expert_parallel=expert_parallel,
        offload=offload,
        progress=progress,
    )
    start_ns = time.time_ns()
    group = join_ranks(tensor_parallel)
    placement = group.placement(options.config)
    try:
        with group.raise_together("planning"):
            options.check()
            planned = plan(
                path,
                dtype,
                config=options.config,
                quantization=quantization,
                placement=placement,
                tensor_parallel=group.ranks,
                expert_parallel=expert_parallel,
                offload=offload,
            )
    except UnsupportedModelError:
        model = None if group.ranks is not None else load_without_family(path, options)
        if model is None:
            raise
        return model
    load_draft = partial(
        load,
        config=options.config,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        tensor_parallel=group.draft_group(),
    )
    built = build_engine(planned, options, group, load_draft)
    planned.resolver.registry.plugins.observe(
        "interposer_finished",
        activity="load",
        subject=str(built.checkpoint.path),
        start_ns=start_ns,
        end_ns=time.time_ns(),
        facts={
            "bytes": built.num_bytes,
            "device": planned.placement.device.torch_device,
            "dtype": str(planned.dtype),
        },
    )
    return group.model(built.engine, built.tokenizer, planned, built.weights, built.adapters)


GROUP = "interposer.loaders"


def load_without_family(path: str | Path, options: LoadOptions) -> LanguageModel | None:
    """Load a model with a loader of the entry points ``interposer.loaders``.

    A loader is called with the checkpoint (weights may not be downloaded yet), the policy and
    the other arguments of ``load``.

    Returns: None if a family supports the architecture, the checkpoint is no folder, or no loader
        is installed.
    Raises:
        UnsupportedModelError: the loader cannot run the architecture.
        ConfigError: the loader does not accept an option.
        PluginError: the loader failed.
    """
    checkpoint, _ = open_checkpoint(path, options.config)
    # A file format of a plugin, such as GGUF; loaders read folders only.
    if isinstance(checkpoint, CheckpointFile):
        return None
    architectures = checkpoint.config.get("architectures")
    supported = current_registry(options.config).subjects("model")
    if not isinstance(architectures, list) or any(str(name) in supported for name in architectures):
        return None
    # With several loaders, the choice must not depend on the order of installation.
    points = sorted(entry_points(GROUP), key=lambda point: (point.name, point.value))
    if not points:
        return None
    point = points[0]
    try:
        loader = point.load()
        model: LanguageModel = loader(checkpoint, options.config, **options.for_loader())
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
