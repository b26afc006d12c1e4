"""Weights of a trainer, for a model that two processes compute."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.engine.tests.test_update_weights import WEIGHTS, stored, write
from models.engine.tests.weight_peer import Peer
from safetensors.torch import load_file
from tests.landing import num_examples
from tests.waiting import WAIT_SECONDS
from torch import nn

from interposer.errors import ConfigError, RankError, RequestError
from interposer_engine import LanguageModel, Meeting, WeightsFrom, launched, load, send_weights
from interposer_engine._checkpoint.layers import RowBuffer
from interposer_engine._checkpoint.tensors import TensorPlace
from interposer_ops.layers.tensor_parallel.sharding import Slice

# All share the processes.
pytestmark = pytest.mark.xdist_group("weight-peers")

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def trainer() -> Iterator[Peer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        peer = Peer()
        yield peer
    peer.close()


@pytest.fixture(scope="module")
def paths(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints with other weights."""
    folder, tensors = tmp_path_factory.mktemp("sent"), load_file(llama / WEIGHTS)
    return [
        write(folder / str(seed), llama, "plain", stored("plain", tensors, seed)) for seed in (1, 2)
    ]


@pytest.mark.process
def test_all_ranks_have_shards_of_the_same_weights_after_an_update(
    paths: list[Path], tmp_path: Path
) -> None:
    old, new = paths
    peers = [Peer() for _ in range(3)]
    received = f"received_by_ranks({str(old)!r}, {str(new)!r}, 'float32')"
    try:
        for peer, call in zip(
            peers, [f"send_to_ranks({str(new / WEIGHTS)!r}, 4096)", received, received], strict=True
        ):
            peer.begin(call, tmp_path / "store", peers.index(peer), 3)
        died, *answers = [peer.end() for peer in peers]
    finally:
        for peer in peers:
            peer.close()
    assert died == []
    for answer, *error in answers:
        assert error == ["", ""]
        first, second, refused, went_on, renewed, broken, restored = answer
        assert first != second
        assert refused == ["RequestError", True]
        assert went_on
        assert renewed == ["", second]
        assert broken == ["RankError", True]
        assert restored == first
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.process
def test_followers_join_a_meeting_with_the_trainer(
    paths: list[Path], trainer: Peer, tmp_path: Path
) -> None:
    old, new = paths
    address = f"file://{tmp_path}/meeting"

    def send(tensors: str, number: int) -> None:
        call = (
            f"send_weights({tensors}, Meeting({address + str(number)!r}, 0, 3), bucket_bytes=5000)"
        )
        trainer.begin(call, tmp_path / f"store{number}-{tensors[:3]}", 0, 1)

    def come(lm: LanguageModel, number: int) -> tuple[str, ...]:
        meeting = Meeting(f"{address}{number}", rank=1, size=3)
        return lm.update_weights(WeightsFrom(meeting, timeout_seconds=WAIT_SECONDS))

    tensors = f"load_file({str(new / WEIGHTS)!r})"
    with launched(2, timeout_seconds=WAIT_SECONDS) as load:
        options: dict[str, Any] = {"dtype": "float32", "cache_tokens": 64}
        expected = load(new, **options).logits(PROMPT)
        lm = load(old, **options)
        before = lm.logits(PROMPT)
        with pytest.raises(ConfigError, match="Meeting"):
            lm.update_weights(WeightsFrom())
        undisturbed = lm.generate([PROMPT], max_new_tokens=9)[0].token_ids

        send(tensors, 1)
        stream = lm.stream(PROMPT, max_new_tokens=9)
        tokens = [next(stream).token_id]
        with pytest.raises(RequestError, match="unfinished"):
            come(lm, 1)
        assert [*tokens, *(delta.token_id for delta in stream)] == [*undisturbed]
        assert trainer.end()[1] == "RankError"

        send(tensors + ".items()", 1)  # at the same meeting
        assert come(lm, 1) == ()
        assert trainer.end() == [None, "", ""]
        assert torch.equal(lm.logits(PROMPT), expected)
        assert not torch.equal(before, expected)

        send(f"breaking({str(new / WEIGHTS)!r}, 9, 'exit')", 2)
        with pytest.raises(RankError, match="died or did not answer"):
            come(lm, 2)
        assert torch.equal(lm.logits(PROMPT), expected)
        assert trainer.end() == []


@pytest.mark.slow
@pytest.mark.process
def test_threads_of_a_meeting_end_before_python_does(paths: list[Path], tmp_path: Path) -> None:
    """One that frees a tensor while Python ends would abort the process."""
    old, new = paths
    address = f"file://{tmp_path}/last"
    program = f"""
import atexit
from pathlib import Path

def tell():
    print(*[task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")])

atexit.register(tell)  # before all others, so that it is called last
from interposer_engine import Meeting, send_weights
from safetensors.torch import load_file
send_weights(load_file({str(new / WEIGHTS)!r}), Meeting({address!r}, 0, 2))
tell()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        lm = load(old, dtype="float32", cache_tokens=64)
        source = WeightsFrom(Meeting(address, 1, 2), timeout_seconds=WAIT_SECONDS)
        assert lm.update_weights(source) == ()
        before, last = trainer.communicate(timeout=WAIT_SECONDS)[0].splitlines()
    assert trainer.returncode == 0
    assert "gloo" in before
    assert "gloo" not in last


@pytest.mark.process
def test_a_meeting_needs_a_rank_an_address_and_the_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank of this process .* is 3 of 2"):
        send_weights({}, Meeting("file:///nowhere", 3, 2))
    with pytest.raises(ConfigError, match="'nowhere' is not an address"):
        send_weights({}, Meeting("nowhere", 0, 2))
    with pytest.raises(RankError, match=r"2 processes did not connect at .* within 0.5 s"):
        send_weights({}, Meeting(f"file://{tmp_path}/store", 0, 2), timeout_seconds=0.5)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[TensorPlace, tuple[int, ...], list[int], list[bool]]:
    """Return a place with a share of a tensor, the shape of that, and how its rows come."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    edges = sorted(draw(st.sets(st.integers(0, shape[dim]), min_size=2, max_size=4)))
    ranges = tuple(zip(edges[::2], edges[1::2], strict=False))
    shard_shape = list(shape)
    shard_shape[dim] = sum(stop - start for start, stop in ranges)
    cut = draw(st.sampled_from([None, Slice(dim, shape[dim], ranges)]))
    is_turned = len(shape) == 2 and draw(st.booleans())
    sizes = list(shape) if cut is None else shard_shape
    parameter = nn.Parameter(torch.zeros(sizes[::-1] if is_turned else sizes), requires_grad=False)
    if is_turned:
        parameter.stored_transposed = True  # type: ignore[attr-defined]
        cut = cut and Slice(1 - dim, shape[dim], ranges)
    steps = draw(st.lists(st.integers(1, 4), min_size=shape[0], max_size=shape[0]))
    direct = draw(st.lists(st.booleans(), min_size=shape[0], max_size=shape[0]))
    return TensorPlace(parameter, slice=cut), shape, steps, direct


@settings(max_examples=num_examples(200), deadline=None)
@given(cuts())
def test_rows_that_arrive_apart_fill_the_shard(
    drawn: tuple[TensorPlace, tuple[int, ...], list[int], list[bool]],
) -> None:
    place, shape, steps, direct = drawn
    tensor = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
    expected, received = (torch.zeros_like(place.parameter.data) for _ in range(2))
    place.write("x", place.shard("x", tensor, "test"), expected, "test")
    assert place.takes_rows(shape, torch.bfloat16)
    assert not place.takes_rows((*shape, 2), torch.float32)
    assert not place.takes_rows(shape, torch.int32)
    buffer, start = RowBuffer.of(place, received), 0
    for step, is_direct in zip(steps, direct, strict=True):
        rows = tensor[start : start + step]
        memory = buffer.memory(start, start + len(rows))
        if is_direct and memory is not None and len(rows):
            assert memory.shape == rows.shape
            memory.copy_(rows)
        else:
            buffer.put(start, rows)
        start += len(rows)
    assert torch.equal(received, expected)
