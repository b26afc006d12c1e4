from __future__ import annotations

import pytest
import torch

from interposer import Capability, Config, Device, Registry, Resolver, Rule, Site
from interposer.errors import UnknownNameError
from interposer.tooling import Plugins
from interposer_ops import plugin
from interposer_ops.layers.logit_edits import MOST_LIKELY, LogitEditor, LogitEdits
from interposer_ops.layers.sampler import Penalties, Sampler, SamplingBatch
from interposer_ops.sampling import mask_min_p

VOCAB_SIZE = 40
CPU = Device("cpu", "cpu", "test", Capability("x86_64"))


def sampler(dtype: torch.dtype = torch.float32, config: Config | None = None) -> Sampler:
    resolver = Resolver(Registry(Plugins.of(plugin)), CPU, config or Config(canary="off"))
    return Sampler(Site(resolver, "sampler", dtype), VOCAB_SIZE)


def bound(layer: Sampler) -> set[str]:
    resolver = layer.editor._site.resolver
    return {choice.request.name for choice, _ in resolver.choices.values()}


def normal(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (2 * torch.randn(rows, VOCAB_SIZE, generator=generator)).to(dtype)


def test_kernels_are_bound_when_a_request_needs_them() -> None:
    layer = sampler(torch.bfloat16)
    plain = {"apply_penalties", "sample_tokens", "sampler"}
    assert bound(layer) <= plain
    layer(normal(2, torch.bfloat16), SamplingBatch.greedy(2, "cpu"))
    assert bound(layer) <= plain
    layer.editor.prepare(bias=True)
    assert bound(layer) - plain == {"apply_logit_bias"}
    layer.editor.prepare(least=True, bitmask=True, top=True)
    edits = {"apply_logit_bias", "suppress_tokens_until", "apply_token_bitmask", "token_logprobs"}
    assert bound(layer) - plain == edits


def test_a_policy_without_a_kernel_fails_when_a_request_is_prepared() -> None:
    layer = sampler(config=Config(canary="off", kernels={"apply_token_bitmask": Rule(pin="none")}))
    layer.editor.prepare(bias=True)
    with pytest.raises(UnknownNameError, match="apply_token_bitmask"):
        layer.editor.prepare(bitmask=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_edits_are_unchanged(dtype: torch.dtype) -> None:
    logits = normal(3, dtype)
    none, some = torch.tensor([[-1], [-1], [7]]), torch.tensor([[0.0], [0.0], [3.0]])
    mask = torch.full((3, 2), -1, dtype=torch.int32)
    mask[2] = torch.tensor([1 << 7, 0])
    edits = LogitEdits(
        bias=(none, some),
        least=(torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1]), none + (none > 0)),
        bitmask=mask,
    )
    edited = sampler(dtype).editor.edit(logits, edits)
    assert torch.equal(edited[:2], logits[:2])
    assert edited[2].isfinite().nonzero().tolist() == [[7]]
    torch.testing.assert_close(edited[2, 7], (logits[2, 7].float() + 3).to(dtype))


def test_ops_with_one_value_per_row_apply_after_the_mask() -> None:
    layer, logits = sampler(), normal(2)
    layer.editor.prepare(ops=[mask_min_p])
    assert "mask_min_p" in bound(layer)
    mask = torch.full((2, 2), -1, dtype=torch.int32)
    mask[1, 0] = ~(1 << 3)
    min_p = torch.tensor([0.0, 0.5])
    edits = LogitEdits(bitmask=mask, columns=((mask_min_p, min_p),))
    masked = layer.editor.edit(logits, LogitEdits(bitmask=mask))
    assert torch.equal(layer.editor.edit(logits, edits), mask_min_p(masked, min_p))


def test_no_edits_call_no_kernel() -> None:
    logits = normal(2)
    assert sampler().editor.edit(logits, LogitEdits()) is logits


def test_top_tokens_share_the_softmax_of_the_log_probabilities() -> None:
    layer, logits = sampler(torch.bfloat16), normal(4, torch.bfloat16)
    batch = SamplingBatch.build(
        temperature=[0.0] * 4,
        top_k=[0] * 4,
        top_p=[1.0] * 4,
        min_p=[0.0] * 4,
        seeds=[0] * 4,
        steps=[0] * 4,
        penalties=Penalties.build(
            repetition=[1.0, 2.0, 1.0, 1.0],
            presence=[0.0, 0.0, 1.5, 0.0],
            frequency=[0.0] * 4,
            prompts=[[1, 2]] * 4,
            outputs=[[int(row.argmax())] for row in logits],
            vocab_size=VOCAB_SIZE,
            device="cpu",
        ),
        device="cpu",
    )
    for each in (batch, SamplingBatch.greedy(4, "cpu")):
        tokens, logprobs = layer(logits, each)
        top, ids = layer.top_logprobs(logits, each, tokens)
        assert top.shape == ids.shape == (4, MOST_LIKELY)
        assert torch.equal(ids[:, 0], tokens)
        torch.testing.assert_close(top[:, 0], logprobs)
        assert bool((top.diff(dim=1) <= 0).all())


def test_a_small_vocabulary_has_fewer_likely_tokens() -> None:
    site = sampler().editor._site
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    _, ranks, top, ids = LogitEditor(site, 3).top(logits, torch.tensor([0]))
    assert (ids.tolist(), ranks.tolist()) == ([[1, 2, 0]], [3])
    torch.testing.assert_close(top, logits.log_softmax(-1)[:, [1, 2, 0]])
