"""Every feature of the engine with every other gives the tokens of an engine that has none."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.conftest import CONFIGS, SIZES, write_checkpoint
from models.engine.tests.test_prediction_heads import write_holder
from safetensors.torch import load_file, save_file
from tests.adapter_files import write_adapter
from tests.landing import num_examples
from transformers import LlamaConfig

from interposer_engine import (
    Constraint,
    LanguageModel,
    PrefixCache,
    PromptLogprob,
    SamplingParams,
    Speculation,
    load,
)

LARGE, SMALL = 4096, 144
"""Tokens of the cache: room for all requests, and for one of the longest and not much more."""
BEGINNING = [7 * place % 251 for place in range(48)]
ADAPTED = "model.layers.0.self_attn.q_proj", "model.layers.0.linear_attn.out_proj"
MODELS = ("plain", "rounded", "windowed", "hybrid")
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.3, "seed": 5, "top_k": 20, "frequency_penalty": 0.7},
    {"constraint": Constraint.regex("[a-f]{3,40}")},
    {"constraint": Constraint.choice(["import os", "import sys"]), "temperature": 1.0, "seed": 1},
    {"logit_bias": {5: 4.0, 6: -100.0}, "min_tokens": 2},
    {"prompt_logprobs": 2},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of models whose caches are of all kinds, a smaller one, and adapters."""
    folder = tmp_path_factory.mktemp("together")
    write_checkpoint(CONFIGS["llama"](), folder / "plain")
    write_checkpoint(CONFIGS["mistral"](), folder / "windowed")
    write_holder(folder / "hybrid", "qwen3_next")  # with states, and a head that predicts
    write_checkpoint(LlamaConfig(**{**SIZES, "num_hidden_layers": 1}), folder / "draft")
    write_eight_bit_cache(folder / "plain", folder / "rounded")
    for model in MODELS:
        tensors = load_file(folder / model / "model.safetensors")
        adapted = {
            name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
            for name, tensor in tensors.items()
            if name.startswith(("lm_head", *ADAPTED))
        }
        assert len(adapted) == 2
        for seed, name in enumerate(("one", "two")):
            write_adapter(folder / model / name, adapted, rank=2 + seed, seed=seed)
    return folder


def write_eight_bit_cache(plain: Path, rounded: Path) -> None:
    """Copy a model to one whose keys and values are stored in 8-bit floats."""
    shutil.copytree(plain, rounded)
    tensors = load_file(plain / "model.safetensors")
    for layer in range(SIZES["num_hidden_layers"]):
        for name, scale in (("k_scale", 0.02), ("v_scale", 0.01)):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    save_file(tensors, rounded / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    stored = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "int-quantized",
        # No layer is left for the group.
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["re:.*"],
        "kv_cache_scheme": {**stored, "symmetric": True},
    }
    (rounded / "config.json").write_text(json.dumps(config))


STORED: dict[str, Callable[[Path], PrefixCache]] = {
    "cache": lambda folder: PrefixCache(),
    "file": lambda folder: PrefixCache(offload_bytes=2**20, offload_dir=folder),
}
"""Where shared beginnings are."""


@functools.lru_cache
def engine(
    folder: Path,
    model: str,
    guesses: str | None = None,
    shares: str | None = None,
    room: int = LARGE,
) -> LanguageModel:
    speculation = None
    if guesses is not None:
        draft = folder / guesses if guesses == "draft" else guesses
        speculation = Speculation(draft, adaptive=False)
    lm = load(
        folder / model,
        "float32",
        cache_tokens=room,
        max_sequences=4,
        max_step_tokens=2048 if room == LARGE else 24,
        prefix_cache=STORED[shares](folder) if shares else False,
        speculation=speculation,
    )
    for name in ("one", "two"):
        lm.load_adapter(name, folder / model / name)
    return lm


Drawn = tuple[int, list[int], int, dict[str, Any], str | None, bool]
requests = st.lists(
    st.tuples(
        st.integers(0, len(BEGINNING)),  # tokens of the common beginning
        st.lists(st.integers(0, 255), min_size=1, max_size=30),
        st.integers(1, 30),
        st.sampled_from(KINDS),
        st.sampled_from([None, "one", "two"]),
        st.booleans(),  # cancelled on the way
    ),
    min_size=1,
    max_size=6,
)


@settings(
    max_examples=num_examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    model=st.sampled_from(MODELS),
    guesses=st.sampled_from([None, "ngram", "draft", "heads"]),
    shares=st.sampled_from([None, *STORED]),
    room=st.sampled_from([LARGE, SMALL]),
    drawn=requests,
    rest=st.integers(0, 6),
)
def test_combined_features_give_the_tokens_of_a_plain_engine(
    folder: Path,
    model: str,
    guesses: str | None,
    shares: str | None,
    room: int,
    drawn: list[Drawn],
    rest: int,
) -> None:
    if guesses == "heads":
        model = "hybrid"  # the one that has some
    agree(engine(folder, model, guesses, shares, room), engine(folder, model), drawn, rest)


def agree(lm: LanguageModel, plain: LanguageModel, drawn: list[Drawn], rest: int) -> None:
    """Run requests in an engine as they come, and each of them alone in a plain one."""
    running = []
    for shared, own, count, kind, adapter, leaves in drawn:
        most = max(count, kind.get("min_tokens", 1))
        params = SamplingParams(max_new_tokens=most, adapter=adapter, **kind)
        running.append(lm.engine.add(BEGINNING[:shared] + own, params))
        for _ in range(rest):
            lm.engine.step()
        if leaves:
            lm.engine.cancel(running[-1])
    while lm.engine.busy:
        lm.engine.step()
    for sequence in running:
        (alone,) = plain.generate([sequence.prompt], sequence.params)
        found = tuple(sequence.output)
        assert found == alone.token_ids[: len(found)]
        if sequence.finish_reason != "cancelled":
            assert (found, sequence.finish_reason) == (alone.token_ids, alone.finish_reason)
            assert sequence.logprobs == pytest.approx(alone.logprobs, abs=1e-3)
            assert told(sequence.prompt_logprobs) == pytest.approx(
                told(alone.prompt_logprobs), abs=1e-3
            )
    for pool in lm.engine.pools:
        assert pool.num_free == pool.num_pages


def told(prompt_logprobs: Sequence[PromptLogprob]) -> list[float]:
    return [each.logprob for each in prompt_logprobs]


def test_a_schedule_in_which_all_of_them_have_a_part(folder: Path) -> None:
    lm = engine(folder, "rounded", "draft", "cache", SMALL)
    assert lm.speculation is not None
    assert lm.engine.prefixes is not None
    assert lm.engine.runner.caches[0].dtype == torch.float8_e4m3fn
    before = lm.speculation.drafted_tokens, lm.engine.prefixes.shared_tokens
    # All four need more than twice the cache.
    kinds = zip((KINDS[0], KINDS[1], KINDS[3], KINDS[0]), (None, "one", "two", "one"), strict=True)
    drawn = [(48, [n] * 20, 30, kind, adapter, False) for n, (kind, adapter) in enumerate(kinds)]
    agree(lm, engine(folder, "rounded"), [*drawn, drawn[0]], 3)
    assert lm.speculation.drafted_tokens > before[0]
    assert lm.engine.prefixes.shared_tokens > before[1]
