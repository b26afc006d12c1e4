"""The time of a step over several ranks, on paper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interposer import Ranks, current_registry, explain
from interposer_engine import plan
from interposer_engine._distributed.estimate import Links
from interposer_testing.described import described_placement

LINKS = Links(4e11, 2e-6, 5e10, 2e-5)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Return the directory of a model of 8.9 billion parameters, of which no weight is there."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def planned_notes(path: Path, size: int, hosts: tuple[int, ...]) -> list[str]:
    placement = described_placement(current_registry(), "h200")
    ranks = Ranks(0, size, hosts, ("cuda",) * size)
    notes = plan(path, placement=placement, tensor_parallel=ranks).resolver.notes
    return [note for note in notes if "of weights for each" in note or note.startswith("estimate:")]


def test_an_all_reduce_uses_the_faster_algorithm() -> None:
    # Each of 8 reads 7 parts of 16 KiB, 115 kB, at 400 GB/s.
    assert LINKS.all_reduce(16384, 8) == pytest.approx(2e-6 + 7 * 16384 / 4e11)
    # Of 16 MiB it sends and gets seven eighths, in two steps.
    assert LINKS.all_reduce(1 << 24, 8) == pytest.approx(4e-6 + 2 * 7 / 8 * (1 << 24) / 4e11)


def test_nodes_all_reduce_the_shard_of_each_rank() -> None:
    inside = 2 * (2e-6 + 7 / 8 * 16384 / 4e11)
    assert LINKS.all_reduce(16384, 16, 2) == pytest.approx(inside + 2e-5 + 16384 / 8 / 5e10)
    # One rank on each node has nobody beside it.
    assert LINKS.all_reduce(16384, 2, 2) == pytest.approx(2e-5 + 16384 / 5e10)


@given(st.integers(1, 1 << 28), st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_more_bytes_and_more_nodes_take_longer(size: int, inside: int, nodes: int) -> None:
    ranks = inside * nodes
    for collective in (LINKS.all_reduce, LINKS.all_gather):
        seconds = collective(size, ranks, nodes)
        assert collective(2 * size, ranks, nodes) > seconds
        assert collective(size, ranks * 2, nodes * 2) > seconds


def test_a_plan_says_whether_ranks_hold_a_model_and_what_bounds_a_step(llama: Path) -> None:
    fits, batch_of_1, batch_of_64 = planned_notes(llama, 8, (0,) * 8)
    # 7.9e9 weights, without the table that a step does not read, in two bytes over eight ranks.
    assert fits.startswith("1.8 GiB of weights for each of 8 ranks, of 139.8 GiB: they fit")
    # 8 layers with two sums, the sum of the table and the head's logits.
    assert "bound by memory" in batch_of_1
    assert batch_of_1.endswith("in 18 collectives")
    assert "a step of batch size 64 after 1024 cached tokens" in batch_of_64


def test_ranks_can_be_explained_without_processes(llama: Path) -> None:
    explanation = explain(llama, "h200", tensor_parallel=8)
    assert any(
        note.startswith("1.8 GiB of weights for each of 8 ranks") for note in explanation.notes
    )
    chosen = {
        row.choice.request.name
        for row in explanation.rows
        if row.choice.request.kind == "communicator"
    }
    assert chosen == {"all_reduce", "all_gather"}


def test_a_second_node_makes_collectives_the_bound(llama: Path) -> None:
    _, batch_of_1, _ = planned_notes(llama, 16, (0,) * 8 + (1,) * 8)
    assert "bound by collectives" in batch_of_1


def test_a_device_without_rates_has_no_estimate(llama: Path) -> None:
    placement = described_placement(current_registry(), "t4")
    ranks = Ranks(0, 2, (0, 0), ("cuda", "cuda"))
    notes = plan(llama, placement=placement, tensor_parallel=ranks).resolver.notes
    assert not [note for note in notes if "estimate:" in note]
