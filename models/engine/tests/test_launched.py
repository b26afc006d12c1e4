"""Models whose other ranks this process starts: one process follows in all of these tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.conftest import SIZES, write_checkpoint
from tests.adapter_files import write_adapter
from tests.waiting import WAIT_SECONDS
from transformers import LlamaConfig

from interposer import Config
from interposer.errors import CheckpointError, ConfigError, RankError, RequestError
from interposer_engine import (
    AsyncLanguageModel,
    Completion,
    EmbeddedInput,
    LanguageModel,
    SamplingParams,
    Speculation,
    WeightsFrom,
    launched,
    load,
)
from interposer_engine._speculation.speculator import DraftCostModel

Loads = Callable[..., LanguageModel]
SMALL: dict[str, Any] = {"max_sequences": 4, "max_step_tokens": 48, "config": Config(seed=7)}
PROMPTS = [
    [(7 * place + 3 * n) % 250 for n in range(length)]
    for place, length in enumerate((3, 40, 1, 17, 64, 9, 30, 5))
]
pytestmark = [pytest.mark.process, pytest.mark.xdist_group("ranks")]


@pytest.fixture(scope="module")
def loads() -> Iterator[Loads]:
    with launched(2, timeout_seconds=WAIT_SECONDS) as load:
        yield load


def told(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [tuple(completion.token_ids) for completion in completions]


def both(loads: Loads, path: Path, **options: Any) -> tuple[LanguageModel, LanguageModel]:
    """Return the model of two ranks, and that of one."""
    return loads(path, **SMALL, **options), load(path, **SMALL, **options)


def test_encoded_runs_reach_every_rank(loads: Loads, llama: Path) -> None:
    lm, alone = both(loads, llama, cache_tokens=512)
    vectors = torch.randn(70, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))
    run = EmbeddedInput("image", b"1", vectors, num_positions=9, layer_embeddings=vectors[None])
    prompt: list[int | EmbeddedInput] = [5, 9, run, 3]
    actual, expected = (
        told(model.generate([prompt, PROMPTS[1], [run]], max_new_tokens=9, ignore_eos=True))
        for model in (lm, alone)
    )
    assert actual == expected
    torch.testing.assert_close(lm.logits(prompt), alone.logits(prompt), atol=1e-4, rtol=0)


def test_many_requests_get_the_tokens_of_one_process(loads: Loads, llama: Path) -> None:
    lm, alone = both(loads, llama, cache_tokens=512)
    params = [
        SamplingParams(max_new_tokens=4 + 5 * place, temperature=place % 3 / 2, top_p=0.9)
        for place in range(len(PROMPTS))
    ]
    for _ in range(2):  # the noise of requests without a seed goes on with a second call
        assert told(lm.generate(PROMPTS, params)) == told(alone.generate(PROMPTS, params))
    # Sums over ranks have other roundings: of 2**-24 each, over some hundred numbers of a logit.
    logits, expected = lm.logits(PROMPTS[1]), alone.logits(PROMPTS[1])
    torch.testing.assert_close(logits, expected, rtol=0, atol=2**-14 * float(expected.abs().max()))
    first, second = lm.explanations()
    assert first["choices"] == second["choices"]


def test_both_ranks_preempt_requests_if_the_cache_is_too_small(loads: Loads, llama: Path) -> None:
    lm, alone = both(loads, llama, cache_tokens=96, prefix_cache=True)
    prompts = [PROMPTS[1][:30] + extra for extra in PROMPTS[:6] if len(extra) < 20]
    for _ in range(2):
        completions = lm.generate(prompts, max_new_tokens=30, temperature=0.7)
        assert told(completions) == told(
            alone.generate(prompts, max_new_tokens=30, temperature=0.7)
        )
    assert lm.engine.prefixes is not None
    assert lm.engine.prefixes == alone.engine.prefixes


def test_rank_0_decides_when_speculation_pays_off(loads: Loads, llama: Path) -> None:
    lm, alone = both(loads, llama, cache_tokens=512, speculation=Speculation("ngram"))
    prompt = [5, 6, 7, 8] * 8
    completions = lm.generate([prompt, prompt[1:]], max_new_tokens=80)
    assert told(completions) == told(alone.generate([prompt, prompt[1:]], max_new_tokens=80))
    assert lm.speculation is not None
    assert lm.speculation.plain_steps + lm.speculation.drafted_steps > 0


def test_ranks_agree_on_answers_of_a_clock() -> None:
    ahead, behind = DraftCostModel(lambda _: True), DraftCostModel(lambda _: False)
    for balance, says in ((ahead, True), (behind, False)):
        assert balance.skips_measurement() is balance.allows_drafts(1) is says
        for _ in range(8):
            balance.record_plain_step(1, 1.0, 0.0)
        assert balance.skips_measurement() is balance.allows_drafts(1) is says


def test_request_errors_keep_the_ranks_equal(loads: Loads, llama: Path) -> None:
    lm, alone = both(loads, llama, cache_tokens=128)
    with pytest.raises(RequestError, match="999999"):
        lm.generate([[999_999]])
    with pytest.raises(RequestError):
        lm.logits([])
    stream = lm.stream(PROMPTS[0], max_new_tokens=50)
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # cancels it
    # That request drew no noise of its own, as it was greedy; its seed was drawn all the same.
    alone.generate([[1]], max_new_tokens=1)
    options: dict[str, Any] = {"max_new_tokens": 20, "seed": 3, "temperature": 1.0}
    assert told(lm.generate(PROMPTS[:3], **options)) == told(alone.generate(PROMPTS[:3], **options))


def test_adapters_and_weights_change_on_both_ranks(
    loads: Loads, llama: Path, tmp_path: Path
) -> None:
    lm, alone = both(loads, llama, cache_tokens=128)
    write_adapter(tmp_path / "a", {"model.layers.0.self_attn.q_proj": (64, 64)})
    for model in (lm, alone):
        model.load_adapter("a", tmp_path / "a")
    options: dict[str, Any] = {"max_new_tokens": 12, "adapter": "a"}
    assert told(lm.generate(PROMPTS[:2], **options)) == told(alone.generate(PROMPTS[:2], **options))
    with pytest.raises(ConfigError, match="Meeting"):
        lm.update_weights(WeightsFrom(source=1))
    with pytest.raises(CheckpointError):
        lm.load_adapter("b", tmp_path / "none")
    lm.remove_adapter("a")
    name = "model.norm.weight"
    new = {name: torch.linspace(-1, 1, 64)}
    assert lm.update_weights(new) == alone.update_weights(new)
    completions = lm.generate(PROMPTS[:2], max_new_tokens=12)
    assert told(completions) == told(alone.generate(PROMPTS[:2], max_new_tokens=12))


def test_the_thread_of_an_asynchronous_model_coordinates_ranks(loads: Loads, llama: Path) -> None:
    lm, alone = both(loads, llama, cache_tokens=512)

    async def answers() -> list[tuple[int, ...]]:
        async with AsyncLanguageModel(lm) as front:
            tasks = [front.generate([p], max_new_tokens=15, seed=1) for p in PROMPTS]
            return [told(each)[0] for each in await asyncio.gather(*tasks)]

    assert asyncio.run(answers()) == told(alone.generate(PROMPTS, max_new_tokens=15, seed=1))


def test_each_rank_offloads_its_shard(loads: Loads, tmp_path: Path) -> None:
    write_checkpoint(LlamaConfig(**{**SIZES, "num_hidden_layers": 9}), tmp_path)
    expected = told(load(tmp_path, **SMALL, cache_tokens=256).generate(PROMPTS, max_new_tokens=6))
    for _ in range(2):  # a packed file of each rank is written, and then found
        lm = loads(tmp_path, **SMALL, cache_tokens=256, offload="65%")
        assert told(lm.generate(PROMPTS, max_new_tokens=6)) == expected
    for of_rank in lm.explanations():
        assert any("streamed" in note for note in of_rank["notes"])


@pytest.mark.skipif("not os.path.isdir('/proc/self/fd')", reason="needs /proc")
def test_a_loading_error_of_one_rank_names_the_rank(loads: Loads, llama: Path) -> None:
    folder = os.open(llama, os.O_RDONLY)
    try:
        with pytest.raises(RankError, match=r"rank 1 failed during planning: CheckpointError"):
            loads(f"/proc/self/fd/{folder}", **SMALL)  # which that process does not have
    finally:
        os.close(folder)
    with pytest.raises(CheckpointError):
        loads(llama / "none", **SMALL)
    assert loads(llama, **SMALL, cache_tokens=64).generate([[1]], max_new_tokens=2)


@pytest.mark.skipif(
    "not hasattr(os, 'sched_getaffinity') or (os.cpu_count() or 1) < 2",
    reason="needs Linux with two processors",
)
def test_ranks_compute_on_disjoint_cores(loads: Loads, llama: Path) -> None:
    loads(llama, **SMALL, cache_tokens=64)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    (follower,) = (
        child
        for child in children
        if "_distributed.launcher" in Path(f"/proc/{child}/cmdline").read_text()
    )
    assert not os.sched_getaffinity(0) & os.sched_getaffinity(int(follower))


def test_impossible_numbers_of_processes_are_refused(loads: Loads, llama: Path) -> None:
    for number in (0, -1, True, 2.0):
        with pytest.raises(ConfigError, match="tensor_parallel is"):
            load(llama, tensor_parallel=number)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has peers already"), launched(2):
        pass
    with pytest.raises(ConfigError, match="tensor_parallel is 4, and there are 2 processes"):
        load(llama, tensor_parallel=4)


def test_ranks_connect_through_a_private_file(loads: Loads) -> None:
    """A store with a port takes writes of every local process."""
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    assert type(store).__name__ == "FileStore"
    folder = Path(store.path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_uid == os.getuid()
