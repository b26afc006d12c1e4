"""The function ``load``, which makes a model ready to generate from a model directory."""

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
from interposer_engine._load_options import (
    DEFAULT_MAX_SEQUENCES,
    DEFAULT_MAX_STEP_TOKENS,
    LoadOptions,
    policy_in_force,
)
from interposer_engine._planning import plan
from interposer_engine._prefix_settings import PrefixCache
from interposer_engine._speculation.settings import Speculation
from interposer_models.decoder import UnknownDecoderError
from interposer_ops.layers.moe.placement import ExpertParallel

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
    max_sequences: int = DEFAULT_MAX_SEQUENCES,
    max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS,
    prefix_cache: bool | PrefixCache = False,
    adapters: Mapping[str, str | Path] | None = None,
    speculation: str | Path | Speculation | None = None,
    tensor_parallel: int | ProcessGroup | Group | None = None,
    expert_parallel: bool | ExpertParallel = False,
    offload: bool | int | str | None = None,
    text_only: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> LanguageModel:
    """Load a Hugging Face model, or a file that a plugin reads, ready to generate.

    Args:
        path: a folder, a file, or the name of a model on the hub, ``"namespace/name"`` or
            ``"namespace/name@revision"``. A named model is downloaded unless the hub's cache has
            it.
        dtype: the dtype to compute in. ``"auto"`` takes the checkpoint's dtype if the platform
            supports it, else the dtype that the platform prefers.
        platform: name of the platform; None leaves the choice to the selection.
        config: policy for this model; it overrides every other source.
        quantization: a method that quantizes plain weights while they load, such as ``"fp8"``, or
            the settings of the method with its name as ``quant_method``.
        cache_tokens: capacity of the paged KV cache in tokens. Layers with a sliding window cache
            no more tokens than their windows need. Encoder inputs have the same capacity in
            addition. None takes the tokens of ``max_sequences`` full contexts, or as many as
            ``memory_fraction`` allows.
        memory_fraction: fraction of the free memory that the cache may take, above 0 and at most 1.
            Free memory is what weights and the largest step leave; the step is run once to measure
            this. None takes 0.9 on an accelerator. On a host, whose memory other programs use as
            well, and on platforms that measure no step, None takes 0.25.
        max_sequences: number of requests that run at once; further requests wait.
        max_step_tokens: number of tokens of one step. A longer prompt is computed in chunks, or
            refused if its tokens attend to each other in both directions.
        prefix_cache: True lets prompts with an equal prefix share the cached results of that
            prefix, which stay in the cache until their memory is needed. ``PrefixCache(...)`` adds
            memory. Not supported for prefix-LMs and for models with an encoder.
        adapters: LoRA adapters to load, by the names with which requests select them; see
            ``LanguageModel.load_adapter``. Memory for the adapters, and for replacing one of them,
            is reserved before the size of the cache is computed.
        speculation: source of the draft tokens that steps verify: ``"ngram"``, ``"heads"``, the
            path of a head or of a draft model, or ``Speculation(...)``.
        tensor_parallel: number of processes that compute the model together: those that torchrun
            started, or those of torch's default process group. Or a process group of some of them.
            Every process must make this call, and then the same calls on the returned model.
        expert_parallel: True places complete experts of an MoE layer on each process, instead of a
            shard of every expert. ``ExpertParallel(...)`` sets the number of redundant experts, and
            the step size from which tokens are sent to the experts' processes.
        offload: size of the weights that stay resident in the memory of the computing device, in
            bytes, or as ``"8GiB"`` or ``"50%"``. The blocks beyond that size are read from host
            memory or the disk when they compute. True derives the size from the free memory, None
            offloads only weights that exceed a host's memory, and False offloads nothing.
        text_only: True loads no encoder of images or sounds that the checkpoint has, and refuses
            prompts with such inputs.
        progress: called with ``(bytes done, bytes in all)`` while weights load.
    Raises:
        CheckpointError: the directory is incomplete or contradicts itself; or there is no model of
            that name, or the model cannot be downloaded.
        UnsupportedModelError: no installed family or loader implements the architecture.
        UnknownNameError: a name is unknown; the text lists the known names.
        NoCandidateError: no installed kernel or backend can serve a part of the model.
        ConfigError: a size is not a positive integer, or a fraction is out of range; the cache
            exceeds the free memory, or no memory is left for it; a quantized checkpoint would be
            quantized by another method; graphs, compilation, a prefix cache, speculation or offload
            are requested but impossible; or there are fewer processes than requested.
        RankError: another rank failed, left, or got other arguments.
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
        text_only=text_only,
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
                text_only=text_only,
            )
    except UnsupportedModelError as error:
        model = None if group.ranks is not None else load_without_family(path, options, error)
        if model is None:
            raise
        return model
    load_draft = partial(
        load,
        config=options.config,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        tensor_parallel=group.draft_group(),
        text_only=True,
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
    model = group.model(built.engine, built.tokenizer, planned, built.weights, built.adapters)
    model.input_encoder = built.input_encoder
    return model


GROUP = "interposer.loaders"


def load_without_family(
    path: str | Path, options: LoadOptions, refusal: UnsupportedModelError
) -> LanguageModel | None:
    """Load a model that has no model family, by a loader of the group ``interposer.loaders``.

    A loader is called with the checkpoint (weights may not be downloaded yet), the policy and
    the other arguments of ``load``.

    Args:
        refusal: why no family supports the checkpoint.
    Returns: None if a family supports the architecture and its decoder, the checkpoint is no
        folder, or no loader is installed.
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
    if not isinstance(architectures, list):
        return None
    has_family = any(str(name) in supported for name in architectures)
    if has_family and not isinstance(refusal, UnknownDecoderError):
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
