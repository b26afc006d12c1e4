"""Attention to a source: what another text stored, all of which every query sees.

Dimensions: T tokens, B sequences, P pages.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from interposer import AttentionBatch, AttentionSpec, Verdict


def judge_source(spec: AttentionSpec) -> Verdict:
    """Accept attention to a source over an unconverted cache, at most softcapped."""
    if spec.window_tokens is not None:
        return Verdict.refuse("has no windows in a source")
    return replace(spec, type="decoder").judge_plain_decoder()


def lone_queries(batch: AttentionBatch) -> AttentionBatch:
    """Return the batch with every query as a sequence of its own, ``[T]``.

    So attention that is causal shows each of them all that is stored. Where sequences have one
    query each, that is what the batch is, and nothing depends on its values.
    """
    if batch.max_query_tokens == 1:
        return batch
    host = batch.on_host()
    rows = torch.repeat_interleave(host.query_starts.diff())
    parts = {
        "query_starts": torch.arange(len(rows) + 1),
        "seq_lens": host.seq_lens[rows],
        "page_table": host.page_table[rows],
    }
    split = replace(host, **parts, max_query_tokens=1, host=None)  # type: ignore[arg-type]
    device = batch.slots.device
    if device.type == "cpu":
        return split
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in parts.items()}
    return replace(split, **moved, slots=batch.slots, host=split)  # type: ignore[arg-type]
