from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interposer import Capability, Config, Device, Kernel, Registry, Requires, Resolver, Site
from interposer.errors import RequestError
from interposer.hookspecs import hookimpl
from interposer.records import Record
from interposer.tooling import Plugins
from interposer_ops import plugin
from interposer_ops.layers.sampler import Penalties, Sampler, SamplingBatch
from interposer_ops.sampling import sample_tokens

VOCAB_SIZE = 40
CPU = Device("cpu", "cpu", "test", Capability("x86_64"))


def sampler(dtype: torch.dtype = torch.float32, *records: Record) -> Sampler:
    test = SimpleNamespace(__name__="test", interposer_records=hookimpl(lambda: records))
    config = Config(canary="off")  # the kernels of these tests need not compute what ops define
    resolver = Resolver(Registry(Plugins.of(plugin, test)), CPU, config)
    return Sampler(Site(resolver, "sampler", dtype), VOCAB_SIZE)


def build(rows: int, **columns: Any) -> SamplingBatch:
    """Return a batch of greedy requests, but for ``columns``."""
    settings: dict[str, Any] = {
        "temperature": [0.0] * rows,
        "top_k": [0] * rows,
        "top_p": [1.0] * rows,
        "min_p": [0.0] * rows,
        "seeds": list(range(rows)),
        "steps": [0] * rows,
        "device": "cpu",
    }
    return SamplingBatch.build(**{**settings, **columns})


def penalties_of(rows: int, **columns: Any) -> Penalties:
    """Return penalties that change nothing, but for ``columns``."""
    settings: dict[str, Any] = {
        "repetition": [1.0] * rows,
        "presence": [0.0] * rows,
        "frequency": [0.0] * rows,
        "prompts": [[]] * rows,
        "outputs": [[]] * rows,
        "vocab_size": VOCAB_SIZE,
        "device": "cpu",
    }
    return Penalties.build(**{**settings, **columns})


def normal(rows: int) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(rows))


def test_an_all_greedy_batch_has_no_optional_tensors() -> None:
    batch = build(2, top_k=[5, 0], top_p=[0.5, 0.5], min_p=[0.1, 0.1])
    assert batch.all_greedy
    assert (batch.temperature, batch.top_k, batch.top_p, batch.min_p) == (None,) * 4
    assert batch.penalties is None


def test_a_greedy_batch_is_cached() -> None:
    batch = SamplingBatch.greedy(3, "cpu")
    assert batch is SamplingBatch.greedy(3, "cpu")
    assert batch is not SamplingBatch.greedy(2, "cpu")
    assert batch.all_greedy
    assert not batch.seeds.is_inference()
    logits = normal(3)
    for actual, expected in zip(sampler()(logits, batch), sampler()(logits, build(3)), strict=True):
        assert torch.equal(actual, expected)


def test_a_batch_holds_only_the_fields_that_requests_use() -> None:
    batch = build(2, temperature=[0.0, 0.7], top_k=[5, 9], top_p=[0.5, 1.0], min_p=[0.5, 0.25])
    assert not batch.all_greedy
    torch.testing.assert_close(batch.temperature, torch.tensor([0.0, 0.7]))
    assert batch.top_k is not None
    assert torch.equal(batch.top_k, torch.tensor([5, 9]))
    assert batch.top_p is None  # only the greedy row has one
    torch.testing.assert_close(batch.min_p, torch.tensor([0.5, 0.25]))
    assert (batch.seeds.tolist(), batch.steps.tolist()) == ([0, 1], [0, 0])
    assert batch.seeds.dtype == batch.steps.dtype == torch.int64


def test_seeds_and_top_k_keep_all_bits() -> None:
    batch = build(1, temperature=[1.0], seeds=[2**63 - 1], top_k=[2**62 + 1])
    assert batch.seeds.tolist() == [2**63 - 1]
    assert batch.top_k is not None
    assert batch.top_k.tolist() == [2**62 + 1]


@pytest.mark.parametrize("penalty", ["repetition", "presence", "frequency"])
def test_one_penalty_creates_all_penalty_tensors(penalty: str) -> None:
    values = [1.0 if penalty == "repetition" else 0.0, 0.5]
    tokens = {"prompts": [[1, 1, 3], []], "outputs": [[], [2, 2, 39]]}
    penalties = penalties_of(2, **tokens, **{penalty: values})
    assert penalties.prompt_mask.nonzero().tolist() == [[0, 1], [0, 3]]
    assert penalties.output_counts.nonzero().tolist() == [[1, 2], [1, 39]]
    assert penalties.output_counts[1, 2] == 2
    assert penalties.prompt_mask.shape == penalties.output_counts.shape == (2, VOCAB_SIZE)
    assert getattr(penalties, penalty).tolist() == values
    assert penalties.repetition.shape == penalties.presence.shape == penalties.frequency.shape


def test_penalties_need_no_tokens_yet() -> None:
    penalties = penalties_of(1, presence=[1.0])
    assert not penalties.prompt_mask.any()
    assert not penalties.output_counts.any()


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(RequestError, match=f"Token id {token} is outside the vocabulary of 40"):
        penalties_of(2, presence=[1.0, 0.0], prompts=[[], [3, token]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_largest_logit(dtype: torch.dtype) -> None:
    logits = normal(5).to(dtype)
    tokens, logprobs = sampler(dtype)(logits, build(5))
    assert torch.equal(tokens, logits.argmax(-1))
    expected = logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)


def test_the_layer_equals_the_op() -> None:
    logits = normal(64)
    temperature, top_k = [0.5 + row / 64 for row in range(64)], list(range(64))
    top_p, min_p = [0.9] * 64, [0.05] * 64
    batch = build(64, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, logprobs = sampler()(logits, batch)
    expected = sample_tokens(
        logits,
        torch.tensor(temperature),
        torch.tensor(top_k),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.arange(64),
        torch.zeros(64, dtype=torch.int64),
    )
    assert torch.equal(tokens, expected[0])
    assert torch.equal(logprobs, expected[1])
    assert (tokens != logits.argmax(-1)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_change_the_winner_of_their_row_only(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, VOCAB_SIZE, dtype=dtype)
    logits[:, 4], logits[:, 9] = 3.0, 2.0
    texts = {"prompts": [[4]] * 3, "outputs": [[4], [4], [4, 9]]}
    batch = build(3, penalties=penalties_of(3, presence=[0.0, 1.5, 1.5], **texts))
    tokens, logprobs = sampler(dtype)(logits, batch)
    assert tokens.tolist() == [4, 9, 4]
    penalized = logits.float()
    penalized[1:, 4] -= 1.5
    penalized[2, 9] -= 1.5
    expected = penalized.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)


def test_a_request_gets_the_same_tokens_alone_and_batched() -> None:
    layer, logits = sampler(), normal(6)
    settings: dict[str, list[Any]] = {
        "temperature": [0.0, 0.7, 1.0, 1.5, 1.0, 0.9],
        "top_k": [0, 0, 5, 0, 0, 10],
        "top_p": [1.0, 1.0, 1.0, 0.8, 1.0, 0.9],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.1, 0.05],
        "seeds": [3, 1, 4, 1, 5, 9],
        "steps": [2, 0, 1, 1, 0, 1],
    }
    columns: dict[str, list[Any]] = {
        "repetition": [1.0, 1.0, 1.0, 1.2, 1.0, 1.0],
        "frequency": [0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
        "prompts": [[1, 2], [3], [4], [5], [6], [7]],
        "outputs": [[0, 0], [], [8], [9], [], [10]],
    }
    batch = build(6, **settings, penalties=penalties_of(6, **columns))
    tokens, logprobs = layer(logits, batch)
    for row in range(6):
        row_settings = {name: column[row : row + 1] for name, column in settings.items()}
        row_columns = {name: column[row : row + 1] for name, column in columns.items()}
        batch = build(1, **row_settings, penalties=penalties_of(1, **row_columns))
        alone, logprob = layer(logits[row : row + 1], batch)
        assert alone.tolist() == [tokens[row]]
        torch.testing.assert_close(logprob, logprobs[row : row + 1])


def sample_bfloat16(logits: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Take no other dtype than the one that the record below requires."""
    assert logits.dtype == torch.bfloat16
    return torch.full(logits.shape[:1], 17), torch.zeros(logits.shape[:1])


def test_penalised_logits_go_to_a_kernel_of_their_dtype() -> None:
    kernel = Kernel(
        "sample_tokens",
        "sample_tokens_test",
        f"{__name__}:sample_bfloat16",
        requires=Requires(dtypes=("bfloat16",)),
    )
    layer, logits = sampler(torch.bfloat16, kernel), normal(2).bfloat16()
    assert layer(logits, build(2))[0].tolist() == [17, 17]
    batch = build(2, penalties=penalties_of(2, frequency=[0.5, 0.5]))
    assert torch.equal(layer(logits, batch)[0], logits.argmax(-1))
