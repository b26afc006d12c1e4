"""Chunked attention: a plain backend computes each chunk as a sequence of its own."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from models.conftest import example, write_checkpoint
from models.tests.interpreter import interpreted

from interposer import AttentionBackend, AttentionBatch, AttentionSpec, Config
from interposer.errors import ConfigError
from interposer_engine import load
from interposer_models._decoder.chunked_attention import ChunkedBackend, FixedPlan, chunks_of
from interposer_models._families import examples

CHUNK, PAGE = 16, 4
SPEC = AttentionSpec(
    num_heads=2,
    num_kv_heads=1,
    head_size=8,
    dtype=torch.float32,
    cache_dtype=torch.float32,
    page_size=PAGE,
    scale=0.3,
)


def batch_of(*sequences: tuple[int, int]) -> AttentionBatch:
    """Build a batch of sequences, each given as its length and its number of new tokens."""
    lengths, counts = zip(*sequences, strict=True)
    pages = max(-(-length // PAGE) for length in lengths)
    return AttentionBatch(
        query_starts=torch.tensor([0, *counts]).cumsum(0),
        seq_lens=torch.tensor(lengths),
        page_table=100 * torch.arange(len(lengths))[:, None] + torch.arange(pages),
        slots=torch.arange(sum(counts)),
        max_query_tokens=max(counts),
        max_seq_tokens=max(lengths),
    )


def attended_positions(batch: AttentionBatch) -> list[list[int]]:
    """Return the cached positions that each new token attends to, as page * 4 + offset."""
    positions = []
    starts = batch.query_starts.tolist()
    for row, length in enumerate(batch.seq_lens.tolist()):
        for remaining in range(starts[row + 1] - starts[row], 0, -1):
            indices = range(length - remaining + 1)
            positions.append(
                [int(batch.page_table[row, i // PAGE]) * PAGE + i % PAGE for i in indices]
            )
    return positions


@pytest.mark.parametrize(
    "sequences",
    [
        ((40, 40),),
        ((40, 3), (16, 16), (17, 1), (33, 20), (3, 2)),
        ((1, 1), (16, 1), (17, 1), (32, 1), (33, 1)),
        ((48, 33), (15, 15)),
    ],
)
def test_a_token_sees_its_chunk_up_to_itself(sequences: tuple[tuple[int, int], ...]) -> None:
    batch = batch_of(*sequences)
    chunks = chunks_of(batch, CHUNK, PAGE)
    expected = [
        [row * 100 * PAGE + i for i in range(position // CHUNK * CHUNK, position + 1)]
        for row, (length, count) in enumerate(sequences)
        for position in range(length - count, length)
    ]
    assert attended_positions(chunks) == expected
    assert torch.equal(chunks.slots, batch.slots)
    counts = chunks.query_starts.diff()
    assert counts.min() > 0
    assert chunks.max_query_tokens == counts.max()
    assert CHUNK >= chunks.max_seq_tokens >= chunks.seq_lens.max()
    assert chunks.page_table.shape[1] <= CHUNK // PAGE


def test_chunks_keep_the_host_copy_of_a_batch() -> None:
    batch = batch_of((17, 1), (40, 1))
    beside = replace(batch, host=batch)
    chunks = chunks_of(beside, CHUNK, PAGE)
    assert chunks.host is not None
    assert (
        attended_positions(chunks.host)
        == attended_positions(chunks)
        == attended_positions(chunks_of(batch, CHUNK, PAGE))
    )


class HostPlanningBackend(AttentionBackend):
    """Plans on the host; the plan is a list with the latest batch."""

    plans_on_host = True

    def __init__(self) -> None:
        self.spec = SPEC

    def plan_fixed(self, batch: AttentionBatch) -> Any:
        return [batch]

    def update_plan(self, plan: Any, batch: AttentionBatch) -> None:
        plan[0] = batch

    accepts = kv_layout = plan = forward = None  # type: ignore[assignment]
    __abstractmethods__ = frozenset[str]()


def test_the_plan_of_a_graph_keeps_its_addresses() -> None:
    backend = ChunkedBackend(HostPlanningBackend(), CHUNK)
    assert backend.plans_on_host
    plan = backend.plan_fixed(batch_of((17, 1), (40, 1)))
    assert isinstance(plan, FixedPlan)
    tensors = [getattr(plan.chunks, f.name) for f in fields(AttentionBatch)]
    later = batch_of((39, 1), (33, 1))
    backend.update_plan(plan, later)
    assert attended_positions(plan.plan[0]) == attended_positions(chunks_of(later, CHUNK, PAGE))
    assert all(
        a is b
        for a, b in zip(
            tensors, [getattr(plan.plan[0], f.name) for f in fields(AttentionBatch)], strict=True
        )
    )


def test_chunks_that_begin_within_a_page_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="attention chunk of 18 tokens is not a multiple of the page size 4"
    ):
        ChunkedBackend(HostPlanningBackend(), 18)


@pytest.fixture(scope="module")
def llama4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("llama4")
    return path, write_checkpoint(example(examples.llama4, "released"), path)


@pytest.mark.landing(2)
@pytest.mark.parametrize("backend", ["paged", "native", "native_rows", "sdpa"])
def test_backends_agree_when_decoding_crosses_chunks(
    llama4: tuple[Path, Any], backend: str
) -> None:
    path, peer = llama4
    lm = load(
        path,
        dtype="float32",
        cache_tokens=1024,
        max_step_tokens=7,
        config=Config(attention={"decoder": backend}),
    )
    prompts = [list(range(3, 3 + n)) for n in (5, 15, 16, 40)]
    completions = lm.generate(prompts, max_new_tokens=40, ignore_eos=True)
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = [*prompt, *completion.token_ids]
        with torch.inference_mode():
            logits = peer(torch.tensor([tokens[:-1]])).logits[0, len(prompt) - 1 :]
        chosen = torch.tensor(completion.token_ids)
        logit_gaps = logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]
        assert float(logit_gaps.max()) < 1e-3


def test_a_chunk_as_long_as_the_context_is_plain_attention(llama4: tuple[Path, Any]) -> None:
    lm = load(llama4[0], dtype="float32", cache_tokens=64)
    kinds = [type(layer.backend) for layer in lm.engine.model.attention_layers]
    assert [kind is ChunkedBackend for kind in kinds] == [True, True, True, False]
    shared = {id(layer.backend) for layer in lm.engine.model.attention_layers}
    assert len(shared) == 2


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.slow
def test_triton_computes_chunked_attention(llama4: tuple[Path, Any]) -> None:
    path, _ = llama4
    report = interpreted("interpreted_chunks.py", path)
    assert "paged_attention_triton" in report["chosen"]
    lm = load(path, dtype="float32", cache_tokens=128)
    prompts = [list(range(3, 18)), [1, 2]]
    expected = lm.generate(prompts, max_new_tokens=3, ignore_eos=True)
    assert report["tokens"] == [[*each.token_ids] for each in expected]
