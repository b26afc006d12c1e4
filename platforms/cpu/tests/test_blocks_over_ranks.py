"""Fused blocks with all-reduce over ranks, compared with one process and with standard layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.landing import landing_sample
from tests.waiting import WAIT_SECONDS

from interposer import Config
from interposer_cpu import native
from interposer_engine import LanguageModel, SamplingParams, launched, load

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent()),
    pytest.mark.xdist_group("ranks"),
]

SHIPPED = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
PROMPTS = ["def main(", "import os\n"]
FUSED = "all_reduce_add_rms_norm"
Loads = Callable[..., Any]


@pytest.fixture(scope="module")
def loads() -> Iterator[Loads]:
    with launched(2, timeout_seconds=WAIT_SECONDS) as report:
        yield report


def options(dtype: str, quantization: str = "", **rules: Any) -> dict[str, Any]:
    layers = {"rms_norm": "standard", **rules.pop("layers", {})}
    config = Config(
        disable=("interposer-example-norm",), layers=layers, packed="off", seed=7, **rules
    )
    more: dict[str, Any] = {"quantization": quantization} if quantization else {}
    return {"dtype": dtype, "config": config, "max_sequences": 4, "cache_tokens": 512, **more}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, *names: str) -> Iterator[dict[str, int]]:
    """Count calls of methods on rank 0."""
    calls = dict.fromkeys(names, 0)
    with monkeypatch.context() as patched:
        for name in names:
            whole = getattr(owner, name)

            def count(*arguments: Any, name: str = name, whole: Any = whole) -> Any:
                calls[name] += 1
                return whole(*arguments)

            patched.setattr(owner, name, count)
        yield calls


def told(lm: LanguageModel) -> tuple[list[tuple[int, ...]], list[float]]:
    """Generate the tokens of all prompts, with their log probabilities."""
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    report = lm.generate(PROMPTS, params)
    return [tuple(one.token_ids) for one in report], [p for one in report for p in one.logprobs]


def chosen(lm: Any, name: str) -> list[dict[str, Any]]:
    """Return the selected layer or communicator on each rank."""
    report = [
        [choice for choice in rank["choices"] if choice["name"] == name]
        for rank in lm.explanations()
    ]
    assert len(report) == 2
    assert report[0] == report[1]
    return report[0]


def test_blocks_on_two_ranks_give_the_results_of_one_process(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, alone = loads(SHIPPED, **options("float32")), load(SHIPPED, **options("float32"))
    with counted(monkeypatch, native.library(), "decoder_blocks", "decoder_block") as calls:
        tokens, logprobs = told(lm)
    assert calls["decoder_blocks"] > 0
    assert calls["decoder_block"] == 0
    (block,) = chosen(lm, "decoder_block")
    assert block["chosen"] == "native"
    assert block["dims"] == {"ranks": 2, "all_reduce": "shared_memory"}
    expected, logs = told(alone)
    assert tokens == expected
    # As of families over ranks: each logit is a sum of some hundred products in float32.
    assert logprobs == pytest.approx(logs, abs=2e-4)
    # Blocks that rank 0 calls one by one have the same bits as those of one call on rank 1.
    lm.engine.model.model.layers[0].register_forward_hook(lambda *_: None)
    with counted(monkeypatch, native.library(), "decoder_block") as calls:
        assert told(lm) == (tokens, logprobs)
    assert calls["decoder_block"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", landing_sample(["", "int8", "int4"], every=3))
def test_fused_blocks_give_the_results_of_their_parts_in_16_bits(loads: Loads, method: str) -> None:
    report = []
    for layers in ({}, {"decoder_block": "standard", "gated_mlp": "standard"}):
        lm = loads(SHIPPED, **options("bfloat16", method, layers=layers))
        report.append(lm.logits(lm.tokenizer.encode(PROMPTS[0])))
    own, parts = report
    # Fused products keep the elements between gate and down in float32. What parts round there is
    # off by 2**-9 of itself in each of L blocks, and so is the stream at most.
    bound = own.abs().max() * 2**-9 * math.sqrt(len(lm.engine.model.model.layers)) * 4
    torch.testing.assert_close(own, parts, rtol=0, atol=float(bound))


def test_standard_layers_fuse_all_reduce_and_rms_norm(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = options("float32", layers={"decoder_block": "standard"})
    lm, alone = loads(SHIPPED, **rules), load(SHIPPED, **rules)
    with counted(monkeypatch, native.library(), FUSED) as calls:
        lm.logits([1, 2, 3])
    assert calls == {FUSED: 2 * len(lm.engine.model.model.layers)}
    choices = chosen(lm, FUSED)
    assert {choice["chosen"] for choice in choices} == {"shared_memory"}
    (tokens, logprobs), (expected, logs) = told(lm), told(alone)
    assert tokens == expected
    assert logprobs == pytest.approx(logs, abs=2e-4)


def test_a_hook_on_a_row_parallel_projection_gets_the_reduced_result(loads: Loads) -> None:
    rules = options("float32", layers={"decoder_block": "standard"})
    heard = []
    for lm in (loads(SHIPPED, **rules), load(SHIPPED, **rules)):
        block = lm.engine.model.model.layers[0]
        for part in (block.self_attn.o_proj, block.mlp.down_proj):
            part.register_forward_hook(lambda _module, _given, out: heard.append(out.clone()))
        lm.logits([1, 2, 3])
    for own, alone in zip(heard[:2], heard[2:], strict=True):
        torch.testing.assert_close(own, alone, rtol=0, atol=2e-4)


def test_blocks_call_their_parts_with_another_communicator(loads: Loads) -> None:
    rules = options("float32", communicators={"all_reduce": "torch"})
    lm, alone = loads(SHIPPED, **rules), load(SHIPPED, **rules)
    (block,) = chosen(lm, "decoder_block")
    assert block["chosen"] != "native"
    (refusal,) = (refused for refused in block["refused"] if refused["candidate"] == "native")
    assert "by shared_memory, but torch is chosen here" in refusal["reason"]
    assert not chosen(lm, FUSED)
    notes = [note for choice in chosen(lm, "all_reduce") for note in choice["notes"]]
    assert f"the next norm is not fused with the all-reduce: torch has no {FUSED}" in notes
    assert told(lm)[0] == told(alone)[0]
