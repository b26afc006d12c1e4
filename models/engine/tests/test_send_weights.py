"""A trainer in another process renews the weights of models: of all of them or of none."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.engine.tests.test_update_weights import WEIGHTS, stored, write
from models.engine.tests.weight_peer import TOKENS, Peer, digest, join, noise
from safetensors.torch import load_file
from tests.landing import landing_sample
from tests.waiting import WAIT_SECONDS
from torch import distributed

from interposer.errors import CheckpointError, ConfigError, RankError
from interposer_engine import AsyncLanguageModel, LanguageModel, WeightsFrom, load, send_weights
from interposer_engine._weight_transfer.protocol import device_of
from interposer_engine._weight_transfer.receiver import offer_of

# All share the processes.
pytestmark = [pytest.mark.process, pytest.mark.xdist_group("weight-peers")]

NUMBERS = count()
Q = "model.layers.0.self_attn.q_proj.weight"


@dataclass
class Group:
    """A trainer, a receiver in a process of its own, and this process, which is rank 1."""

    trainer: Peer
    other: Peer
    folder: Path

    @contextmanager
    def sending(self, sent: str, other: str = "") -> Iterator[list[list[Any]]]:
        """Let the others evaluate these; their answers are there at the end."""
        store, size = self.folder / f"store{next(NUMBERS)}", 3 if other else 2
        peers = [(self.trainer, sent, 0)] + ([(self.other, other, 2)] if other else [])
        for peer, expression, rank in peers:
            peer.begin(expression, store, rank, size)
        join(store, 1, size)
        answers: list[list[Any]] = []
        try:
            yield answers
        finally:
            distributed.destroy_process_group()
            answers += [peer.end() for peer, *_ in peers]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    peers = Peer(), Peer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setattr(sys, "excepthook", sys.excepthook)  # torch wraps it for each group
        yield Group(*peers, tmp_path_factory.mktemp("stores"))
    for peer in peers:
        peer.close()


@pytest.fixture(scope="module")
def written(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """Return two checkpoints of a kind with other weights."""
    folder, tensors = tmp_path_factory.mktemp("sent"), load_file(llama / WEIGHTS)

    def of(kind: str) -> list[Path]:
        folders = [folder / f"{kind}-{seed}" for seed in (1, 2)]
        for seed, path in enumerate(folders, 1):
            if not path.exists():
                write(path, llama, kind, stored(kind, tensors, seed))
        return folders

    return of


@pytest.fixture(scope="module")
def smaller(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of half the vocabulary."""
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = load_file(llama / WEIGHTS)
    tensors |= {name: tensors[name][:128].contiguous() for name in tables}
    path = write(tmp_path_factory.mktemp("smaller") / "model", llama, "plain", tensors)
    facts = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**facts, "vocab_size": 128}))
    return path


def sent(path: Path, options: str = "") -> str:
    return f"send_weights(load_file({str(path / WEIGHTS)!r}){options})"


def there(path: Path, call: str = "updated", dtype: str = "float32", options: str = "") -> str:
    return f"{call}(model({str(path)!r}, {dtype!r}){options})"


@pytest.mark.parametrize(
    ("kind", "dtype", "bucket_bytes"),
    landing_sample(
        [("plain", "float32", 4096), ("plain", "bfloat16", 40_000), ("gptq", "float32", 1 << 20)],
        every=3,
    ),
)
def test_all_receivers_get_the_sent_weights(
    group: Group,
    written: Callable[[str], list[Path]],
    kind: str,
    dtype: str,
    bucket_bytes: int,
) -> None:
    old, new = written(kind)
    lm, expected = load(old, dtype, cache_tokens=64), digest(load(new, dtype, cache_tokens=64))
    options = f", bucket_bytes={bucket_bytes}"
    with group.sending(sent(new, options), there(old, dtype=dtype)) as answers:
        assert lm.update_weights(WeightsFrom()) == ()
    assert answers == [[None, "", ""], [["", expected], "", ""]]
    assert digest(lm) == expected
    with group.sending(sent(old, options), there(old, dtype=dtype)) as answers:
        lm.update_weights(WeightsFrom(source=0))
    assert answers[1][0] == ["", digest(lm)] != ["", expected]


def addresses(lm: LanguageModel) -> list[int]:
    """Return where the large weights lie."""
    pointers = [
        tensor.data_ptr()
        for module in lm.engine.model.modules()
        for operand in getattr(module, "operands", ())
        for tensor in (operand if isinstance(operand, tuple) else (operand,))
        if isinstance(tensor, torch.Tensor) and tensor.nbytes >= 1 << 16
    ]
    assert pointers
    return pointers


def test_kept_memory_serves_the_next_weights(
    group: Group, written: Callable[[str], list[Path]]
) -> None:
    old, new = written("plain")
    lm, expected = (
        load(old, "float32", cache_tokens=64),
        digest(load(new, "float32", cache_tokens=64)),
    )
    before, first = digest(lm), addresses(lm)
    calls = [f"send_weights(load_file({str(path / WEIGHTS)!r}))" for path in (new, old, new)]
    with group.sending(f"[{', '.join(calls)}]") as answers:
        assert lm.update_weights(WeightsFrom(keeps_memory=True)) == ()
        second = addresses(lm)
        assert digest(lm) == expected
        assert lm.update_weights(WeightsFrom(keeps_memory=True)) == ()
        assert digest(lm) == before
        assert (addresses(lm), set(first) & set(second)) == (first, set())
        assert lm.update_weights(WeightsFrom()) == ()
        assert digest(lm) == expected
    assert answers == [[[None] * 3, "", ""]]


WRONG = {
    "unknown": ("{'model.nothing': torch.ones(2)}", "no place for"),
    "shape": (f"{{{Q!r}: torch.ones(3, 3)}}", "shape"),
    "dtype": ("{**load_file(FILE), 'model.norm.weight': torch.ones(64, dtype=torch.int32)}", "int"),
    "part": (f"without(FILE, {Q!r})", "go"),
    "nothing": ("{}", "no tensor of the model"),
    "twice": ("[*load_file(FILE).items()] * 2", "twice"),
}


@pytest.mark.landing(2)
@pytest.mark.parametrize("wrong", sorted(WRONG))
def test_a_refused_tensor_changes_no_model_and_reaches_the_trainer(
    group: Group, written: Callable[[str], list[Path]], wrong: str
) -> None:
    old, new = written("plain")
    tensors, said = WRONG[wrong]
    tensors = tensors.replace("FILE", repr(str(new / WEIGHTS)))
    lm = load(old, "float32", cache_tokens=64)
    before = digest(lm)
    with (
        group.sending(f"send_weights({tensors}, bucket_bytes=4096)", there(old)) as answers,
        pytest.raises(CheckpointError, match=said),
    ):
        lm.update_weights(WeightsFrom())
    assert digest(lm) == before
    (_, error, text), (receiver, *_) = answers
    assert error == "RankError"
    assert "rank 1: CheckpointError" in text
    assert said in text
    assert receiver == ["CheckpointError", True]


def test_a_refusal_of_one_receiver_changes_no_model_and_the_group_stays_usable(
    group: Group, written: Callable[[str], list[Path]]
) -> None:
    old, new = written("plain")
    lm = load(old, "float32", cache_tokens=64)
    before = digest(lm)
    with (
        group.sending(sent(new), there(old, "busy")) as answers,
        pytest.raises(RankError, match=r"rank 2: RequestError: .*requests are unfinished"),
    ):
        lm.update_weights(WeightsFrom())
    assert answers[0][1] == "RankError"
    assert answers[1][0] == ["RequestError", True]
    attempts = f"attempts({str(new / WEIGHTS)!r})"
    with group.sending(attempts, f"[{there(old, 'busy')}, {there(old)}]") as answers:
        with pytest.raises(RankError, match="rank 2: RequestError"):
            lm.update_weights(WeightsFrom())
        lm.update_weights(WeightsFrom())
    assert answers[0][0] == ["RankError", ""]
    assert answers[1][0] == [["RequestError", True], ["", digest(lm)]]
    assert digest(lm) != before


def test_weights_that_one_receiver_cannot_prepare_change_no_model(
    group: Group, written: Callable[[str], list[Path]], smaller: Path
) -> None:
    old, new = written("plain")
    lm = load(old, "float32", cache_tokens=64)
    before = digest(lm)
    with (
        group.sending(sent(new, ", bucket_bytes=9999"), there(smaller)) as answers,
        pytest.raises(RankError, match=r"rank 2: CheckpointError: .*shape"),
    ):
        lm.update_weights(WeightsFrom())
    assert answers[0][1] == "RankError"
    assert answers[1][0][0] == "CheckpointError"
    assert digest(lm) == before


def test_receivers_get_the_error_of_a_failed_trainer(
    group: Group, written: Callable[[str], list[Path]]
) -> None:
    old, new = written("plain")
    lm = load(old, "float32", cache_tokens=64)
    before = digest(lm)
    broken = f"send_weights(breaking({str(new / WEIGHTS)!r}, 5, 'raise'), bucket_bytes=4096)"
    with (
        group.sending(broken, there(old)) as answers,
        pytest.raises(RankError, match=r"rank 0, failed .*OSError: the disk is full"),
    ):
        lm.update_weights(WeightsFrom())
    assert answers[0][1:] == ["OSError", "the disk is full"]
    assert answers[1][0] == ["RankError", True]
    assert digest(lm) == before


@pytest.mark.slow
def test_a_silent_trainer_ends_an_update(
    group: Group, written: Callable[[str], list[Path]]
) -> None:
    old, new = written("plain")
    lm = load(old, "float32", cache_tokens=64)
    before, trainer = digest(lm), Peer()
    silent = f"send_weights(breaking({str(new / WEIGHTS)!r}, 5, 'pause'), bucket_bytes=4096)"
    try:
        with Group(trainer, group.other, group.folder).sending(silent):
            with pytest.raises(RankError, match=r"did not answer for 0.5 s"):
                lm.update_weights(WeightsFrom(timeout_seconds=0.5))
            trainer.kill()  # it would be silent forever
    finally:
        trainer.close()
    assert digest(lm) == before


def test_a_trainer_that_dies_changes_nothing(
    group: Group, written: Callable[[str], list[Path]]
) -> None:
    old, new = written("plain")
    lm = load(old, "float32", cache_tokens=64)
    before, trainer = digest(lm), Peer()
    dying = f"send_weights(breaking({str(new / WEIGHTS)!r}, 9, 'exit'), bucket_bytes=4096)"
    try:
        with (
            Group(trainer, group.other, group.folder).sending(dying, there(old)) as answers,
            pytest.raises(RankError, match="died or did not answer"),
        ):
            lm.update_weights(WeightsFrom(timeout_seconds=WAIT_SECONDS))
    finally:
        trainer.close()
    assert answers == [[], [["RankError", True], "", ""]]
    assert digest(lm) == before


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**31), st.integers(4096, 20_000))
def test_tensors_of_any_form_arrive_unchanged(group: Group, seed: int, bucket_bytes: int) -> None:
    call = f"send_weights(noise({seed}), bucket_bytes={bucket_bytes})"
    with group.sending(call) as answers, offer_of(WeightsFrom()) as offer:
        for (name, tensor), (wanted_name, expected) in zip(
            offer.tensors(lambda *_: None), noise(seed), strict=True
        ):
            assert name == wanted_name
            assert isinstance(tensor, torch.Tensor)
            assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
            codes = [
                values.contiguous().view(-1).view(torch.uint8) for values in (tensor, expected)
            ]
            assert torch.equal(*codes)
        offer.confirm()
    assert answers == [[None, "", ""]]


def test_an_asynchronous_model_updates_between_requests(
    group: Group, written: Callable[[str], list[Path]]
) -> None:
    old, new = written("plain")
    lm = load(old, "float32", cache_tokens=512)
    expected = load(new, "float32", cache_tokens=512).generate([TOKENS], max_new_tokens=8)

    async def run() -> None:
        async with AsyncLanguageModel(lm) as model:
            before = await model.generate([TOKENS], max_new_tokens=8)
            update = asyncio.create_task(model.update_weights(WeightsFrom()))
            await asyncio.sleep(0)
            after = await model.generate([TOKENS], max_new_tokens=8)
            assert await update == ()
            assert after[0].token_ids == expected[0].token_ids
            assert after[0].logprobs == expected[0].logprobs != before[0].logprobs

    with group.sending(sent(new)) as answers:
        asyncio.run(run())
    assert answers == [[None, "", ""]]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("other_vote()", "takes part in another transfer"),
        ("other_bucket()", "broke the protocol of send_weights"),
    ],
)
def test_other_messages_in_the_group_are_refused(
    group: Group, written: Callable[[str], list[Path]], call: str, said: str
) -> None:
    lm = load(written("plain")[0], "float32", cache_tokens=64)
    before = digest(lm)
    with group.sending(call), pytest.raises(RankError, match=said):
        lm.update_weights(WeightsFrom(timeout_seconds=WAIT_SECONDS))
    assert digest(lm) == before


def test_groups_without_trainer_or_receiver_are_refused(
    group: Group, written: Callable[[str], list[Path]]
) -> None:
    lm = load(written("plain")[0], "float32", cache_tokens=64)
    with pytest.raises(ConfigError, match="init_process_group"):
        send_weights({})
    with pytest.raises(ConfigError, match="init_process_group"):
        lm.update_weights(WeightsFrom())
    with group.sending("None"):
        for source in (1, 2, -1):
            with pytest.raises(ConfigError, match=f"source is {source}, and .* rank 1"):
                lm.update_weights(WeightsFrom(source=source))
        with pytest.raises(ConfigError, match="bucket_bytes is 5"):
            send_weights({}, bucket_bytes=5)
    join(group.folder / f"store{next(NUMBERS)}", 0, 1)
    with pytest.raises(ConfigError, match="no other process"):
        send_weights({})
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("config", "device"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:nccl", "cuda"),
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("cpu:gloo,xpu:xccl", "xpu"),
        ("cpu:mpi", "cpu"),
    ],
)
def test_buckets_are_on_the_device_of_the_backend(config: str, device: str) -> None:
    assert device_of(config) == torch.device(device)
