"""Decode steps as graphs: the same tokens come out, and what cannot be captured is not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.tape import TapePlatform

from interposer import Config, Platform, explain, register
from interposer.errors import ConfigError, GraphError
from interposer.hookspecs import hookimpl
from interposer.records import Kernel, LayerEntry, PlatformEntry, Record
from interposer_engine import Completion, LanguageModel, SamplingParams, load
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.linear import linear
from interposer_tools import doctor

PLUGINS = ("interposer-models", "interposer-ops", "interposer-quantization")
Graphs = Literal["auto", "on", "off"]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [1] * 30]


class PlainPlatform(TapePlatform):
    name = "plain"
    capture_graph = Platform.capture_graph


class OtherNorm(RMSNorm):
    """Replaces a layer; what its code does is its own affair."""


def waiting_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Project ``x``; the host waits for a number of it."""
    assert float(x.abs().amax()) >= 0
    return linear.reference(x, weight, bias)


def plugin(*records: Record) -> Any:
    class Tapes:
        @staticmethod
        @hookimpl
        def interposer_records() -> list[Record]:
            return [
                PlatformEntry("tape", "tests.tape:TapePlatform"),
                PlatformEntry("plain", f"{__name__}:PlainPlatform"),
                *records,
            ]

    return Tapes


@pytest.fixture(autouse=True)
def platform() -> Iterator[None]:
    TapePlatform.captured = TapePlatform.replayed = 0
    with register(plugin(), "tapes"):
        yield


def config(graphs: Graphs = "auto", platform: str = "tape", **more: Any) -> Config:
    return Config(graphs=graphs, platform=platform, plugins=PLUGINS, canary="off", **more)


def loaded(path: Path, graphs: Graphs = "auto", **more: Any) -> LanguageModel:
    return load(path, config=config(graphs, **more), cache_tokens=512, max_sequences=8)


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.landing(1)
def test_greedy_tokens_are_equal_with_and_without_graphs(pair: tuple[Path, Any]) -> None:
    path, _ = pair
    # Of experts, the kernels that hold least wait for numbers of tokens.
    plain, graphed = (loaded(path, g, require={"graph_safe"}) for g in ("off", "on"))
    settings = SamplingParams(max_new_tokens=20, ignore_eos=True)
    # The numbers of sequences fall from three over two to one while they decode.
    params = [settings, SamplingParams(max_new_tokens=9), SamplingParams(max_new_tokens=14)]
    expected, actual = (lm.generate(PROMPTS, params) for lm in (plain, graphed))
    assert tokens(actual) == tokens(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-4)
    assert TapePlatform.captured == len(graphed.engine.runner.graphs or ()) == 3
    assert TapePlatform.replayed == 19
    assert plain.engine.runner.graphs is None


def test_longer_sequences_get_wider_graphs(llama: Path) -> None:
    plain, graphed = (
        load(llama, config=config(graphs), cache_tokens=512, max_sequences=2)
        for graphs in ("off", "auto")
    )
    assert graphed.engine.runner.graphs is not None
    assert graphed.engine.runner.graphs.buckets.widths == (32,)
    for length in (3, 300, 5):
        prompt = [[7, 3, 1] * (length // 3)]
        expected, actual = (
            lm.generate(prompt, max_new_tokens=6, ignore_eos=True) for lm in (plain, graphed)
        )
        assert tokens(actual) == tokens(expected)
    assert TapePlatform.captured == 1


def test_penalties_and_noise_are_outside_of_the_graph(llama: Path) -> None:
    params = SamplingParams(
        max_new_tokens=12, temperature=1.0, top_k=20, seed=11, repetition_penalty=1.2
    )
    plain, graphed = loaded(llama, "off"), loaded(llama)
    assert tokens(graphed.generate(PROMPTS, params)) == tokens(plain.generate(PROMPTS, params))
    assert TapePlatform.replayed == 11


def test_logits_are_not_overwritten_by_later_steps(llama: Path) -> None:
    lm = loaded(llama)
    first = lm.logits([5])
    kept = first.clone()
    lm.generate(PROMPTS, max_new_tokens=5)
    assert torch.equal(first, kept)


def test_a_preempted_sequence_decodes_on(llama: Path) -> None:
    plain, graphed = (
        load(llama, config=config(graphs), cache_tokens=96, max_sequences=3)
        for graphs in ("off", "on")
    )
    expected, actual = (
        lm.generate(PROMPTS, max_new_tokens=30, ignore_eos=True) for lm in (plain, graphed)
    )
    assert tokens(actual) == tokens(expected)
    assert graphed.engine.pool.num_free == graphed.engine.pool.num_pages == 6


def test_new_weights_are_read_by_graphs(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = {name: t * 1.5 for name, t in load_file(llama / "model.safetensors").items()}
    plain, graphed = loaded(llama, "off"), loaded(llama)
    before = tokens(graphed.generate(PROMPTS, max_new_tokens=8))
    for lm in (plain, graphed):
        lm.update_weights(weights)
    expected = tokens(plain.generate(PROMPTS, max_new_tokens=8))
    assert tokens(graphed.generate(PROMPTS, max_new_tokens=8)) == expected != before


def test_by_default_a_model_that_cannot_be_captured_runs_without(llama: Path) -> None:
    slow = Kernel("linear", "linear_waiting", f"{__name__}:waiting_linear", "tape")
    expected = tokens(loaded(llama, "off").generate(PROMPTS, max_new_tokens=4))
    with register(kernels(slow), "waits"):
        lm = loaded(llama)
        assert lm.engine.runner.graphs is None
        assert tokens(lm.generate(PROMPTS, max_new_tokens=4)) == expected
        reason = (
            "cannot be captured: linear_waiting of waits for 'linear' does not promise to be "
            "graph_safe. Try: Config(require={'graph_safe'})"
        )
        assert f"note: decode steps run without graphs: {reason}" in str(explain(lm))
        assert f"without graphs: {reason}" in str(explain(llama, config=config()))
        with pytest.raises(ConfigError, match=r"graphs='on' was requested, but cannot be capt"):
            loaded(llama, "on")
        assert loaded(llama, "on", require={"graph_safe"}).engine.runner.graphs is not None


def kernels(*records: Record) -> Any:
    class Kernels:
        @staticmethod
        @hookimpl
        def interposer_records() -> list[Record]:
            return [*records]

    return Kernels


def test_a_replaced_layer_has_to_promise_for_its_code(llama: Path) -> None:
    safe = frozenset({"graph_safe"})
    entry = LayerEntry("rms_norm", "other", f"{__name__}:OtherNorm", properties=safe)
    with register(kernels(entry), "norms"):
        assert loaded(llama, "on").engine.runner.graphs is not None
    with register(kernels(LayerEntry("rms_norm", "other", f"{__name__}:OtherNorm")), "norms"):
        lm = loaded(llama)
        assert lm.engine.runner.graphs is None
        assert lm.graphs is not None
        assert lm.graphs.reason == (
            "cannot be captured: the layer other of norms for 'rms_norm' has code of its own, "
            "which does not promise to be graph_safe. Try: Config(layers={'rms_norm': 'standard'})"
        )
        assert loaded(llama, "on", layers={"rms_norm": "standard"}).engine.runner.graphs is not None


def test_all_obstacles_to_graphs_are_named_at_once(llama: Path) -> None:
    slow = Kernel("linear", "linear_waiting", f"{__name__}:waiting_linear", "tape")
    norm = LayerEntry("rms_norm", "other", f"{__name__}:OtherNorm")
    with register(kernels(slow, norm), "several"):
        (note,) = [n for n in explain(llama, config=config()).notes if "graphs" in n]
        assert note == (
            "decode steps run without graphs: cannot be captured: linear_waiting of several for "
            "'linear' does not promise to be graph_safe, and the layer other of several for "
            "'rms_norm' has code of its own, which does not promise to be graph_safe. "
            "Try: Config(require={'graph_safe'}, layers={'rms_norm': 'standard'})"
        )
        kept = config(require={"graph_safe"}, layers={"rms_norm": "standard"})
        assert "decode steps run as graphs" in explain(llama, config=kept).notes


def test_a_broken_graph_safe_promise_is_an_error(llama: Path) -> None:
    target = f"{__name__}:waiting_linear"
    liar = Kernel("linear", "lies", target, "tape", properties=frozenset({"graph_safe"}))
    with register(kernels(liar), "liars"):
        lm = loaded(llama)
        with pytest.raises(GraphError, match=r"1 sequences could not be captured.*host waits"):
            lm.generate(PROMPTS[0:1], max_new_tokens=3)


def test_a_compiled_model_is_not_captured(llama: Path) -> None:
    expected = tokens(loaded(llama, "off").generate(PROMPTS, max_new_tokens=4))
    lm = loaded(llama)
    lm.engine.model.model.norm.compile(backend="eager")
    assert lm.graphs
    assert tokens(lm.generate(PROMPTS, max_new_tokens=4)) == expected
    assert TapePlatform.captured == 0
    assert lm.graphs.reason.startswith(
        "RMSNorm, a part of the step, is compiled by torch.compile, which may capture graphs"
    )
    assert f"without graphs: {lm.graphs.reason}" in str(explain(lm))
    required = loaded(llama, "on")
    required.engine.model.model.norm.compile(backend="eager")
    with pytest.raises(ConfigError, match=r"graphs='on' was requested, but RMSNorm, a part"):
        required.generate(PROMPTS, max_new_tokens=4)


def test_graphs_off_captures_nothing(llama: Path) -> None:
    assert "decode steps run as graphs" in str(explain(llama, config=config()))
    lm = loaded(llama, "off")
    assert lm.engine.runner.graphs is None
    assert "decode steps run without graphs: Config(graphs='off') says so" in str(explain(lm))


def test_a_platform_without_graphs_gives_no_note(llama: Path) -> None:
    lm = loaded(llama, platform="plain")
    assert lm.engine.runner.graphs is None
    assert lm.graphs is None
    assert "decode steps" not in str(explain(lm))
    with pytest.raises(ConfigError, match="'plain' does not provide 'capture_graph'"):
        loaded(llama, "on", platform="plain")


def test_a_described_device_answers_as_its_platform_would(llama: Path, tmp_path: Path) -> None:
    described = {
        "version": 1,
        "name": "Reel 9",
        "torch_device": "cpu",
        "architecture": "any",
        "features": [],
        "formats": [],
        "units": 1,
        "memory_bytes": 2**30,
        "caches_bytes": {},
        "dtypes": ["float32"],
    }
    for platform, expected in (("tape", True), ("plain", False)):
        file = tmp_path / f"{platform}.json"
        file.write_text(json.dumps({**described, "platform": platform}))
        text = str(explain(llama, file, Config(plugins=PLUGINS)))
        assert ("note: decode steps run as graphs" in text) is expected


@pytest.mark.slow
def test_doctor_says_whether_graphs_are_used() -> None:
    said = {graphs: doctor(config(graphs)).machine for graphs in ("auto", "on", "off")}
    assert "if every selected kernel is safe in a graph" in said["auto"]["graphs"]
    assert "required for decode steps" in said["on"]["graphs"]
    assert "not used" in said["off"]["graphs"]
    assert "graphs" not in doctor(config(platform="plain")).machine
