"""Cross attention: every query of a sequence sees all stored tokens of its encoder input.

Dimensions: T tokens, B sequences, P pages.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from interposer import AttentionBatch, AttentionSpec, Verdict


def judge_source(spec: AttentionSpec) -> Verdict:
    """Accept cross attention if the cache is unquantized and there is no sliding window."""
    if spec.window_tokens is not None:
        return Verdict.refuse("has no windows in a source")
    return replace(spec, type="decoder").judge_plain_decoder()


def lone_queries(batch: AttentionBatch) -> AttentionBatch:
    """Split a batch so that every query is a sequence of its own, ``[T]``.

    A causal kernel then shows each query all stored tokens. If each sequence has one query already,
    the batch is returned as it is, without reading its values.
    """
    if batch.max_query_tokens == 1:
        return batch
    # Computed on the host: the result's shape depends on the lengths.
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
