"""Planning of a checkpoint's model: the choice of device, kernels and settings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from interposer import Config, Placement, Ranks, Resolver, Site, place
from interposer_engine._checkpoint.dequantize import dequantize_once
from interposer_engine._checkpoint.opening import config_source, open_checkpoint
from interposer_engine._checkpoint.tensors import check_tied, stored_names, with_untied_head
from interposer_engine._compiled import check_compiler
from interposer_engine._distributed.estimate import (
    check_expert_parallel,
    estimate_notes,
    shard_notes,
)
from interposer_engine._distributed.group import planned_ranks
from interposer_engine._encoder_inputs import has_encoder_inputs
from interposer_engine._generation_config import GenerationSettings
from interposer_engine._input_encoder import encoder_kinds
from interposer_engine._load_options import policy_in_force
from interposer_engine._offload.planning import plan_offloading
from interposer_engine._plan import Plan, compute_dtype
from interposer_engine._quantize.settings import quantization_settings, stated_in
from interposer_models.decoder import (
    DecoderSettings,
    cache_note,
    checked_model,
    choose_family,
    family_errors,
    with_location,
)
from interposer_ops.attention import common_page_size
from interposer_ops.devices.graphs import judge_graphs
from interposer_ops.layers.moe.placement import ExpertParallel
from interposer_ops.layers.sampler import Sampler

SAMPLER = "sampler"
"""The name of the sampler's place in a model."""


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
    text_only: bool = False,
) -> Plan:
    """Plan the model that ``load`` would build, without reading weights.

    Args:
        placement: the device to plan for; None leaves the device to the selection.
        tensor_parallel: number of processes that would compute the model together; the processes
            need not exist.
        path, dtype, platform, config, quantization, expert_parallel, offload, text_only: see
            ``load``.
    Raises: errors of ``load`` that need no weights.
    """
    config = policy_in_force(config, platform)
    checkpoint, opened = open_checkpoint(path, config)
    placement = placement or place(config)
    ranks = planned_ranks(tensor_parallel, placement.platform.name, expert_parallel)
    resolver = Resolver.at(placement, config, ranks)
    if opened is not None:
        resolver.record(opened)
    source = config_source(checkpoint)
    decoder, notes = with_untied_head(
        choose_family(resolver, checkpoint.config, source), checkpoint
    )
    if isinstance(decoder, DecoderSettings):
        # Few families ask, and a plan needs no weights otherwise.
        names = partial(stored_names, checkpoint, decoder.renamed, decoder.frame.decoder)
        decoder = decoder.for_tensors(names)
        notes += decoder.rotation_notes()
        if encoder_kinds(checkpoint.config) and not text_only:
            decoder = decoder.with_encoder()
    resolver.notes += notes
    compute = compute_dtype(dtype, decoder.dtype, placement)
    settings = quantization_settings(
        quantization, decoder.quantization_config, resolver.registry, checkpoint.path
    )
    if settings is not None:
        with stated_in(source, quantization is None):
            resolver.choose_scheme(settings)
    site = Site(resolver, "", compute)
    # Building a layer selects its kernels; on the meta device this takes no memory.
    with torch.device("meta"):
        with family_errors(resolver, "attention"):
            page_size = common_page_size(resolver, decoder.attention(site))
        with with_location(checkpoint.config, source), family_errors(resolver, "build"):
            model = checked_model(decoder.build(site, page_size))
        sampler = Sampler(site.at(SAMPLER), decoder.vocab_size)
    check_tied(checkpoint, model)
    check_expert_parallel(model, resolver, ranks)
    generation = GenerationSettings.of_folder(checkpoint.path)
    optional_notes = (
        cache_note(model, config, page_size),
        generation.unapplied_note(
            has_encoder=has_encoder_inputs(model),
            transcribes=getattr(model, "feature_shape", None) is not None,
        ),
    )
    notes = [note for note in optional_notes if note]
    notes += dequantize_once(model, site, placement)
    resolver.check_places()
    offloads, offload_notes = plan_offloading(offload, model, placement, config.packed, ranks)
    notes += [*offload_notes, *estimate_notes(model, resolver)]
    if ranks is not None and ranks.group is None:
        notes += shard_notes(model)
    resolver.notes += notes
    # Tokens are sampled outside of the graph, because sampling settings change with every request.
    graphs = judge_graphs(resolver, placement, frozenset({SAMPLER}))
    choices = [choice for choice, _ in resolver.choices.values()]
    compiled = check_compiler(config, placement, graphs, choices)
    if offloads is not None:
        graphs, compiled = offloads.judge_capture(graphs), offloads.judge_capture(compiled)
    return Plan(
        checkpoint=checkpoint,
        decoder=decoder,
        quantization=quantization,
        placement=placement,
        dtype=compute,
        resolver=resolver,
        page_size=page_size,
        model=model,
        sampler=sampler,
        graphs=graphs,
        compiled=compiled,
        offload=offloads,
    )
