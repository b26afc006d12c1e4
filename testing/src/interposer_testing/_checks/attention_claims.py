"""The checks of an attention backend's properties, on steps as a scheduler would batch them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from interposer import AttentionBackend, AttentionBatch, AttentionSpec, Site
from interposer_testing._checks.call import differences
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.scenario import chunked_steps, pages_needed
from interposer_testing.workload import moved_batch, random_projections, random_sinks


def check_attention_determinism(
    backend: type[AttentionBackend], spec: AttentionSpec, site: Site, seed: int = 0
) -> list[Fault]:
    """Return where the same steps over a cache of its own give other bits the second time."""
    first, second = (_outputs(backend(spec, site), spec, site, seed, alone=False) for _ in range(2))
    found = differences(first, second)
    return [Fault("determinism", where, f"once more it is {how}") for where, how in found]


def check_attention_batches(
    backend: type[AttentionBackend], spec: AttentionSpec, site: Site, seed: int = 0
) -> list[Fault]:
    """Return where a sequence by itself gives other bits than in the batch of its step."""
    together, alone = (
        _outputs(backend(spec, site), spec, site, seed, alone=alone) for alone in (False, True)
    )
    found = differences(together, alone)
    return [Fault("batch", where, f"each sequence by itself it is {how}") for where, how in found]


def _outputs(
    backend: AttentionBackend, spec: AttentionSpec, site: Site, seed: int, *, alone: bool
) -> dict[str, torch.Tensor]:
    """Return the output of every step, of all sequences at once or ``alone``, one by one."""
    generator = torch.Generator().manual_seed(seed)
    device = site.resolver.device.torch_device
    (cache,) = backend.kv_layout().allocate(1, pages_needed(spec.page_size), device)
    sinks = random_sinks(spec, generator).to(device) if spec.sinks else None
    found = {}
    for step, batch in enumerate(chunked_steps(spec, generator)):
        num_tokens = int(batch.query_starts[-1])
        given = random_projections(spec, len(batch.slots), generator, fused=False, batch=batch)
        query, key, value = (tensor.to(device) for tensor in given)
        outputs = []
        for start, end, part in _single(batch, spec) if alone else [(0, num_tokens, batch)]:
            rows = slice(start, end)
            plan = backend.plan(moved_batch(part, device))
            part_of_step = (query[rows], key[rows], value[rows], cache, plan)
            if sinks is None:
                output = backend.forward(*part_of_step)
            else:
                output = backend.forward_with_sinks(*part_of_step, sinks)
            outputs.append(output.clone())
        found[f"output of step {step}"] = torch.cat(outputs)
    return found


def _single(
    batch: AttentionBatch, spec: AttentionSpec
) -> Iterator[tuple[int, int, AttentionBatch]]:
    """Yield the first token, the end and the batch of each sequence."""
    starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
    for b, (start, end) in enumerate(pairwise(starts)):
        num_pages = -(-lengths[b] // spec.page_size)
        prefixes = batch.prefix_lens
        yield (
            start,
            end,
            replace(
                batch,
                query_starts=torch.tensor([0, end - start]),
                seq_lens=batch.seq_lens[b : b + 1],
                page_table=batch.page_table[b : b + 1, :num_pages].contiguous(),
                slots=batch.slots[start:end],
                max_query_tokens=end - start,
                max_seq_tokens=lengths[b],
                prefix_lens=None if prefixes is None else prefixes[b : b + 1],
            ),
        )
