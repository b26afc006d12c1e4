"""Mixtures whose experts are whole on two ranks, one of which this process starts for all tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tests.family_checkpoints import family_configs, write_family
from safetensors.torch import load_file, save_file

from interposer import Config, explain
from interposer.errors import ConfigError
from interposer_engine import Completion, ExpertParallel, LanguageModel, launched, load, plan

Loads = Callable[..., LanguageModel]
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "cache_tokens": 256,
    "max_sequences": 4,
    "config": Config(seed=7),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 7, 2], [11] * 20]
ASKED: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
# As of other ranks: 2**-24 for each of some hundred roundings of a logit.
BOUND = 2.0**-14
# Each matrix by itself, five experts; one shared by all tokens besides; gates and ups in turn.
FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss")
pytestmark = [pytest.mark.process, pytest.mark.xdist_group("ranks")]


@pytest.fixture(scope="module")
def loads() -> Iterator[Loads]:
    with launched(2) as found:
        yield found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mixtures")
    found: dict[str, Path] = {}
    for name, config in family_configs():
        family = name.partition("-")[0]
        if family in FAMILIES and family not in found:
            found[family] = write_family(root / family, config)
    return found


def told(found: list[Completion]) -> list[tuple[int, ...]]:
    return [tuple(each.token_ids) for each in found]


def check(lm: LanguageModel, alone: LanguageModel) -> None:
    """Hold that ranks say what one process does."""
    assert told(lm.generate(PROMPTS, **ASKED)) == told(alone.generate(PROMPTS, **ASKED))
    found, expected = lm.logits(PROMPTS[2]), alone.logits(PROMPTS[2])
    torch.testing.assert_close(found, expected, rtol=0, atol=BOUND * float(expected.abs().max()))


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    "settings", [ExpertParallel(2, 4), True, ExpertParallel(0, 1)], ids=["copies", "plain", "often"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_expert_parallel_ranks_generate_the_tokens_of_one_process(
    loads: Loads, checkpoints: dict[str, Path], family: str, settings: ExpertParallel | bool
) -> None:
    path = checkpoints[family]
    alone = load(path, **SMALL)
    lm: Any = loads(path, expert_parallel=settings, **SMALL)
    assert not any(sum(loads.rows) for loads in lm.expert_loads().values())
    check(lm, alone)
    ranks = lm.engine.coordinator.call_on_all("expert_loads", (), lm.expert_loads)
    assert ranks[0] == ranks[1]
    moved = lm.rebalance_experts()
    # Random weights route unevenly, so that moving experts gains something.
    assert moved
    for prefix, counted in moved.items():
        assert counted.rows == ranks[0][prefix].rows
        before = ranks[0][prefix].placement.shares(counted.rows)
        assert max(counted.placement.shares(counted.rows)) < max(before)
        now = lm.expert_loads()[prefix]
        assert (now.placement, sum(now.rows)) == (counted.placement, 0)
    check(lm, alone)
    assert all("redundant ones" in str(each) for each in lm.explanations())


def test_experts_move_while_requests_run(loads: Loads, checkpoints: dict[str, Path]) -> None:
    path = checkpoints["mixtral"]
    alone = load(path, **SMALL)
    lm: Any = loads(path, expert_parallel=ExpertParallel(redundant_experts=1), **SMALL)
    stream = lm.stream(PROMPTS[0], **ASKED)
    first = [next(stream).token_id for _ in range(3)]
    assert lm.rebalance_experts()
    rest = [delta.token_id for delta in stream]
    assert told(alone.generate(PROMPTS[:1], **ASKED)) == [(*first, *rest)]
    note = next(note for note in explain(lm).notes if note.startswith("expert loads: "))
    assert "the most loaded rank has" in note


# Attention stays plain, as a share of its inputs would have other scales than all of them.
PLAIN = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(3) for name in "qkvo"]
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
STORED: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8",
        "weight_block_size": [16, 16],
        "modules_to_not_convert": ["lm_head", *PLAIN],
    },
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
        "quantization_status": "compressed",
        "ignore": ["lm_head", *PLAIN],
    },
}
KERNELS = {
    "fp8": "fused_experts_fp8",
    "int4": "fused_experts_w4a16",
    "int8 while it loads": "int8_linear",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", [pytest.param("fp8", marks=pytest.mark.slow), "int4", "int8 while it loads"]
)
def test_quantized_experts_run_expert_parallel(
    loads: Loads, checkpoints: dict[str, Path], tmp_path: Path, scheme: str
) -> None:
    path, options = checkpoints["mixtral"], dict(SMALL)
    if scheme in STORED:
        config = json.loads((path / "config.json").read_text())
        path = write_family(tmp_path, {**config, "quantization_config": STORED[scheme]})
        tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(5)
        for name, tensor in tensors.items():
            if name.endswith("weight_packed"):
                words = torch.randint(-(2**31), 2**31 - 1, tensor.shape, generator=generator)
                tensors[name] = words.to(torch.int32)
            elif "scale" in name:
                tensors[name] = tensor.abs() + 0.01
        save_file(tensors, path / "model.safetensors")
    else:
        options["quantization"] = {"quant_method": "int8", "modules_to_not_convert": PLAIN}
    alone = load(path, **options)
    lm: Any = loads(path, expert_parallel=ExpertParallel(0, 4), **options)
    kernels = [choice.request.name for choice, _ in alone.resolver.choices.values()]
    assert KERNELS[scheme] in kernels
    check(lm, alone)  # each expert has the codes and scales that it has in one process
    assert lm.rebalance_experts()
    check(lm, alone)


def test_an_update_reaches_experts_on_their_ranks(
    loads: Loads, checkpoints: dict[str, Path]
) -> None:
    path = checkpoints["mixtral"]
    alone = load(path, **SMALL)
    lm: Any = loads(path, expert_parallel=ExpertParallel(redundant_experts=1), **SMALL)
    lm.generate(PROMPTS, **ASKED)
    lm.rebalance_experts()
    prefix = "model.layers.0.block_sparse_moe.experts"
    generator = torch.Generator().manual_seed(3)
    new = {
        name: torch.randn(place.of(place.parameter).shape, generator=generator) / 8
        for group in alone.weights._groups  # type: ignore[union-attr]
        for name, place in group.places.items()
        if name.startswith(f"{prefix}.")
    }
    assert len(new) == 15
    alone.update_weights(new)
    lm.update_weights(new)
    check(lm, alone)
    with pytest.raises(ConfigError, match=r"update_weights\(\) has replaced"):
        lm.rebalance_experts()
    check(lm, alone)


def test_models_without_placeable_experts_are_refused(
    loads: Loads, checkpoints: dict[str, Path], llama: Path
) -> None:
    path = checkpoints["mixtral"]
    with pytest.raises(ConfigError, match="one process holds all experts"):
        load(path, expert_parallel=True)
    with pytest.raises(ConfigError, match="has no MoE layer"):
        loads(llama, expert_parallel=True, **SMALL)
    with pytest.raises(ConfigError, match="can hold 5 redundant copies"):
        loads(path, expert_parallel=ExpertParallel(redundant_experts=6), **SMALL)
    cut: Any = loads(path, **SMALL)
    assert cut.expert_loads() == {}
    with pytest.raises(ConfigError, match="This model runs without expert parallelism"):
        cut.rebalance_experts()


@pytest.mark.slow
def test_expert_parallelism_can_be_planned_without_processes(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["deepseek_v3"]
    found = explain(path, tensor_parallel=4, expert_parallel=ExpertParallel(redundant_experts=2))
    assert "ranks hold 3, 3, 2, 2 of 8 experts and 2 redundant ones" in str(found)
    with pytest.raises(ConfigError, match=r"expert_parallel=True is about a model"):
        explain(expert_parallel=True)
    with pytest.raises(ConfigError, match="takes no expert_parallel for what is built"):
        explain(plan(path), expert_parallel=True)
    on_paper = explain(path, "h200", tensor_parallel=8, expert_parallel=True)
    assert any("estimate: a step of batch size 1 " in note for note in on_paper.notes)
