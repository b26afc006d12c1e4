"""The checks of the properties that an attention backend declares, on scheduler-like steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from interposer import AttentionBackend, AttentionBatch, AttentionSpec, Site
from interposer_testing._checks.attention_steps import chunked_steps, num_pages_needed
from interposer_testing._checks.call import differences
from interposer_testing._checks.fault import Fault
from interposer_testing.workload import moved_batch, random_projections, random_sinks


def check_attention_determinism(
    backend: type[AttentionBackend], spec: AttentionSpec, site: Site, seed: int = 0
) -> list[Fault]:
    """Check that two runs of the same steps, each with a new cache, give the same bits."""
    first, second = (_outputs(backend(spec, site), spec, site, seed, alone=False) for _ in range(2))
    return [
        Fault("determinism", where, f"the second run differs: {difference}")
        for where, difference in differences(first, second)
    ]


def check_attention_batches(
    backend: type[AttentionBackend], spec: AttentionSpec, site: Site, seed: int = 0
) -> list[Fault]:
    """Check that every sequence gives the same bits alone and in the batch of its step."""
    together, alone = (
        _outputs(backend(spec, site), spec, site, seed, alone=alone) for alone in (False, True)
    )
    return [
        Fault("batch", where, f"the batch and single sequences differ: {difference}")
        for where, difference in differences(together, alone)
    ]


def _outputs(
    backend: AttentionBackend, spec: AttentionSpec, site: Site, seed: int, *, alone: bool
) -> dict[str, torch.Tensor]:
    """Run all steps, with all sequences in one batch or ``alone`` in batches of one sequence."""
    generator = torch.Generator().manual_seed(seed)
    device = site.resolver.device.torch_device
    (cache,) = backend.kv_layout().allocate(1, num_pages_needed(spec.page_size), device)
    options = {"sinks": random_sinks(spec, generator).to(device)} if spec.sinks else {}
    outputs_by_step = {}
    for step, batch in enumerate(chunked_steps(spec, generator)):
        num_tokens = int(batch.query_starts[-1])
        projections = random_projections(
            spec, len(batch.slots), generator, fused=False, batch=batch
        )
        query, key, value = (tensor.to(device) for tensor in projections)
        outputs = []
        for start, end, part in (
            _single_sequences(batch, spec) if alone else [(0, num_tokens, batch)]
        ):
            rows = slice(start, end)
            plan = backend.plan(moved_batch(part, device))
            output = backend.forward(query[rows], key[rows], value[rows], cache, plan, **options)
            # A backend may write the next output to the same buffer.
            outputs.append(output.clone())
        outputs_by_step[f"output of step {step}"] = torch.cat(outputs)
    return outputs_by_step


def _single_sequences(
    batch: AttentionBatch, spec: AttentionSpec
) -> Iterator[tuple[int, int, AttentionBatch]]:
    """Yield (first token, end, batch of one sequence) for each sequence of a batch."""
    starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
    for b, (start, end) in enumerate(pairwise(starts)):
        num_pages = -(-lengths[b] // spec.page_size)  # rounded up
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
