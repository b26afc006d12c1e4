"""Heads that checkpoints hold: what they compute, and that guesses by them change no token."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.conftest import SIZES, example, write_checkpoint
from models.engine.tests.test_speculation import (
    KINDS,
    SMALL,
    always,
    assert_drawn_from_the_distribution,
    idle,
    prompts_of,
)
from models.tests.family_checkpoints import examples
from models.tests.schedules import beside_one_that_leaves, kinds_of_requests
from safetensors.torch import load_file, save_file
from tests.adapter_files import write_adapter
from tests.landing import num_examples
from tests.tape import TapePlatform
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from interposer import Config, explain, register
from interposer.errors import CheckpointError, ConfigError
from interposer.hookspecs import hookimpl
from interposer.records import PlatformEntry, Record
from interposer_engine import LanguageModel, SamplingParams, Speculation, load

Stored = dict[str, Tensor]


def copied(stored: Stored, source: str, target: str) -> Stored:
    """Return the tensors below one prefix, below another one."""
    return {
        target + name.removeprefix(source): tensor.clone()
        for name, tensor in stored.items()
        if name.startswith(source)
    }


def appended(stored: Stored, last: int) -> Stored:
    """Return a head as DeepSeek-V3 and GLM-4.5 store it, whose block is that of the last layer."""
    size, place = stored["model.norm.weight"].shape[0], f"model.layers.{last + 1}."
    return {
        **copied(stored, f"model.layers.{last}.", place),
        f"{place}enorm.weight": torch.rand(size) + 0.5,
        f"{place}hnorm.weight": torch.rand(size) + 0.5,
        f"{place}eh_proj.weight": torch.randn(size, 2 * size) / size**0.5,
        f"{place}shared_head.norm.weight": torch.rand(size) + 0.5,
        # The model's again.
        f"{place}embed_tokens.weight": stored["model.embed_tokens.weight"].clone(),
        f"{place}shared_head.head.weight": torch.zeros(256, size),
    }


def beside(stored: Stored, last: int) -> Stored:
    """Return a head as Qwen3-Next and Qwen3.5 store it."""
    size = stored["model.norm.weight"].shape[0]
    return {
        **copied(stored, f"model.layers.{last}.", "mtp.layers.0."),
        "mtp.pre_fc_norm_embedding.weight": torch.rand(size) - 0.5,
        "mtp.pre_fc_norm_hidden.weight": torch.rand(size) - 0.5,
        "mtp.fc.weight": torch.randn(size, 2 * size) / size**0.5,
        "mtp.norm.weight": torch.rand(size) - 0.5,
    }


HOLDERS: dict[str, tuple[str, Callable[[Stored, int], Stored]]] = {
    "deepseek_v3": ("groups", appended),
    "glm4_moe": ("groups", appended),
    "qwen3_next": ("some", beside),
    "qwen3_5": ("usual", beside),
}


@pytest.fixture(scope="module", params=HOLDERS)
def holder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model with a head of random weights."""
    path: Path = tmp_path_factory.mktemp(request.param)
    write_holder(path, request.param)
    return path


def write_holder(path: Path, family: str) -> None:
    label, head = HOLDERS[family]
    config = example(getattr(examples, family), label)
    if head is appended:
        config.num_nextn_predict_layers = 1
    write_checkpoint(config, path)
    stored = load_file(path / "model.safetensors")
    last = config.num_hidden_layers - 1
    save_file({**stored, **head(stored, last)}, path / "model.safetensors")


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directories of a Llama and of an EAGLE-3 head for it, both of random weights."""
    path, head = (tmp_path_factory.mktemp(name) for name in ("model", "head"))
    write_checkpoint(LlamaConfig(**{**SIZES, "num_hidden_layers": 8}), path)
    write_eagle(head)
    return path, head


def write_eagle(path: Path, **fields: Any) -> None:
    """Write a head of 100 tokens, every second one of the model's."""
    torch.manual_seed(11)
    sizes = {"hidden_size": 64, "intermediate_size": 80, "vocab_size": 256, "rms_norm_eps": 1e-5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    named = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 100}
    config = {**sizes, **heads, **named, "num_hidden_layers": 1, **fields}
    (path / "config.json").write_text(json.dumps(config))
    shapes = {
        "fc": (64, 192),
        "midlayer.self_attn.q_proj": (64, 128),
        "midlayer.self_attn.k_proj": (32, 128),
        "midlayer.self_attn.v_proj": (32, 128),
        "midlayer.self_attn.o_proj": (64, 64),
        "midlayer.mlp.gate_proj": (80, 64),
        "midlayer.mlp.up_proj": (80, 64),
        "midlayer.mlp.down_proj": (64, 80),
        "lm_head": (100, 64),
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm")
    stored = {f"{n}.weight": torch.randn(s) / s[1] ** 0.5 for n, s in shapes.items()}
    for name in (*norms, "midlayer.post_attention_layernorm"):
        stored[f"{name}.weight"] = torch.rand(64) + 0.5
    stored["d2t"] = torch.arange(100)
    stored["t2d"] = torch.zeros(256, dtype=torch.bool)
    save_file(stored, path / "model.safetensors")


class Watched:
    """The guesses that a model verifies, with the tokens before them."""

    def __init__(self, lm: LanguageModel) -> None:
        self.found: list[tuple[list[int], list[int]]] = []
        compute = lm.engine.runner.compute

        def watching(chunks: Any) -> Tensor:
            for chunk in chunks:
                known = chunk.sequence.tokens(0, len(chunk.sequence))
                self.found.append((known, list(chunk.drafts)))
            return compute(chunks)

        lm.engine.runner.compute = watching  # type: ignore[method-assign]


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@functools.cache
def of_transformers(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


def block_inputs(model: Any, tokens: list[int]) -> list[Tensor]:
    """Return the input of each block, ``[T, H]``, and behind them what the last norm returns."""
    with torch.no_grad():
        states = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return [each[0] for each in states]


def run_block(model: Any, block: Any, x: Tensor) -> Tensor:
    """Return the output ``[T, H]`` of a transformers block for ``x``, under a causal mask."""
    count = len(x)
    mask = torch.full((1, 1, count, count), float("-inf")).triu(1)
    places = torch.arange(count)[None]
    angles = model.model.rotary_emb(x[None], places)
    with torch.no_grad():
        result = block(
            x[None], attention_mask=mask, position_ids=places, position_embeddings=angles
        )
    made: Tensor = (result[0] if isinstance(result, tuple) else result)[0]
    return made


def expected_of_stored(path: Path, tokens: list[int], count: int) -> list[int]:
    """Return the tokens that a stored MTP head predicts, by transformers' blocks and torch."""
    model = of_transformers(path)
    stored, config = load_file(path / "model.safetensors"), model.config
    last, eps = config.num_hidden_layers - 1, config.rms_norm_eps
    at, names, shift = f"model.layers.{last + 1}.", ("enorm", "hnorm", "shared_head.norm"), 0.0
    projection, block = stored.get(f"{at}eh_proj.weight"), model.model.layers[last]
    if projection is None:
        at, names, shift = "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), 1.0
        projection = stored["mtp.fc.weight"]
    of_token, of_state, behind = (stored[f"{at}{name}.weight"] + shift for name in names)
    states = block_inputs(model, tokens[:-1])[-1]
    following, recorded = list(tokens[1:]), []
    for _ in range(count):
        embedded = model.model.embed_tokens.weight[torch.tensor(following)]
        pairs = [rms(embedded, of_token, eps), rms(states, of_state, eps)]
        made = rms(run_block(model, block, torch.cat(pairs, -1) @ projection.T), behind, eps)
        states = torch.cat([states, made[-1:]])
        recorded.append(int(model.lm_head(made[-1]).argmax()))
        following.append(recorded[-1])
    return recorded


def expected_of_eagle(path: Path, head: Path, tokens: list[int], count: int) -> list[int]:
    """Return the tokens that an EAGLE-3 head predicts, in plain torch."""
    model = of_transformers(path)
    stored = load_file(head / "model.safetensors")
    weight = {name.removesuffix(".weight"): tensor for name, tensor in stored.items()}
    inputs = block_inputs(model, tokens[:-1])
    states = torch.cat([inputs[2], inputs[4], inputs[5]], -1) @ weight["fc"].T
    following, recorded = list(tokens[1:]), []
    for _ in range(count):
        embedded = model.model.embed_tokens.weight[torch.tensor(following)]
        token = rms(embedded, weight["midlayer.input_layernorm"], 1e-5)
        x = torch.cat([token, rms(states, weight["midlayer.hidden_norm"], 1e-5)], -1)
        query, key, value = (
            (x @ weight[f"midlayer.self_attn.{n}_proj"].T).unflatten(-1, (-1, 16)) for n in "qkv"
        )
        turned = torch.arange(len(x))[:, None] / 10000 ** (torch.arange(0, 16, 2) / 16)
        cos, sin = turned.cos()[:, None], turned.sin()[:, None]
        query, key = (
            torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
            for a, b in (part.chunk(2, -1) for part in (query, key))
        )
        key, value = (part.repeat_interleave(2, 1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / 4
        scores += torch.full(scores.shape[1:], float("-inf")).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        y = states + mixed @ weight["midlayer.self_attn.o_proj"].T
        inner = rms(y, weight["midlayer.post_attention_layernorm"], 1e-5)
        gate, up, down = (weight[f"midlayer.mlp.{n}_proj"] for n in ("gate", "up", "down"))
        y = y + (torch.nn.functional.silu(inner @ gate.T) * (inner @ up.T)) @ down.T
        states = torch.cat([states, y[-1:]])
        place = (rms(y[-1], weight["norm"], 1e-5) @ weight["lm_head"].T).argmax()
        recorded.append(int(place + stored["d2t"][place]))
        following.append(recorded[-1])
    return recorded


@pytest.mark.landing(1)
def test_a_stored_head_equals_its_definition(holder: Path) -> None:
    lm = load(holder, "float32", speculation=always("heads", tokens=3), **SMALL)
    watched = Watched(lm)
    lm.generate(prompts_of((30, 5)), max_new_tokens=16)
    checked = [each for each in watched.found if each[1]]
    assert len(checked) > 8
    for known, drafts in (*checked[:3], *checked[-3:]):
        assert drafts == expected_of_stored(holder, known, len(drafts))


def test_an_eagle3_head_equals_its_definition(eagle: tuple[Path, Path]) -> None:
    lm = load(eagle[0], "float32", speculation=always(eagle[1], tokens=3), **SMALL)
    watched = Watched(lm)
    lm.generate(prompts_of((30, 5)), max_new_tokens=8)
    checked = [each for each in watched.found if each[1]]
    assert len(checked) > 8
    for known, drafts in (*checked[:3], *checked[-3:]):
        assert drafts == expected_of_eagle(*eagle, known, len(drafts))
    assert f"EAGLE-3 head {eagle[1]}" in str(explain(lm))


@pytest.fixture(scope="module")
def pair(eagle: tuple[Path, Path]) -> dict[str, LanguageModel]:
    """A model without guesses, and with those of a head, whose cache some sequences do not fit."""
    path, head = eagle
    few = Speculation(head, tokens=3, cache_tokens=48, adaptive=False)
    return {
        "plain": load(path, "float32", cache_tokens=2048),
        "head": load(path, "float32", speculation=always(head), **SMALL),
        "few pages": load(path, "float32", speculation=few, **SMALL),
        "prefixes": load(path, "float32", speculation=always(head), prefix_cache=True, **SMALL),
    }


@settings(
    max_examples=num_examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=kinds_of_requests(KINDS),
    leaver=st.integers(0, 20),
    name=st.sampled_from(["head", "few pages", "prefixes"]),
)
def test_any_schedule_gives_the_tokens_of_plain_decoding(
    pair: dict[str, LanguageModel],
    requests: list[tuple[int, int, dict[str, Any]]],
    leaver: int,
    name: str,
) -> None:
    lm = pair[name]
    prompts = prompts_of(length for length, _, _ in requests)
    params = [SamplingParams(max_new_tokens=count, **kind) for _, count, kind in requests]
    expected = pair["plain"].generate(prompts, params)
    actual = beside_one_that_leaves(lm, prompts, params, leaver)
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
    assert not lm.engine.busy


@pytest.mark.landing(1)
def test_stored_heads_change_no_token(holder: Path) -> None:
    plain = load(holder, "float32", cache_tokens=2048)
    lm = load(holder, "float32", speculation=always("heads"), **SMALL)
    prompts = prompts_of((70, 3, 20, 9))
    params = [SamplingParams(max_new_tokens=24, **kind) for kind in KINDS[:4]]
    expected = [each.token_ids for each in plain.generate(prompts, params)]
    assert [each.token_ids for each in lm.generate(prompts, params)] == expected
    assert lm.speculation is not None
    assert lm.speculation.drafted_tokens > 50
    assert idle(lm)
    assert "the checkpoint's own head" in str(explain(lm))


def known_next(path: Path, holder: Path, noise: float) -> Path:
    """Write a copy in which a token decides the next one, which the head knows but for noise."""
    shutil.copytree(holder, path)
    stored = load_file(path / "model.safetensors")
    torch.manual_seed(5)
    for name, tensor in stored.items():
        if any(part in name for part in ("o_proj", "down_proj", "out_proj")):
            tensor.zero_()  # what a block would add
        if name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            size = len(tensor)
            tensor.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], 1))
        shift = float(name.startswith("mtp."))
        if name.endswith((".enorm.weight", "pre_fc_norm_embedding.weight")):
            tensor.copy_(1 - shift + noise * torch.randn_like(tensor))
        if name.endswith(("shared_head.norm.weight", "mtp.norm.weight")):
            tensor.copy_(stored["model.norm.weight"])
    save_file(stored, path / "model.safetensors")
    return path


@pytest.mark.landing(2)
@pytest.mark.parametrize("kind", KINDS[:3], ids=["greedy", "seeded", "cut"])
def test_a_head_that_is_right_is_accepted_and_saves_steps(
    holder: Path, tmp_path: Path, kind: dict[str, Any]
) -> None:
    path = known_next(tmp_path / "known", holder, noise=0)
    lm = load(path, "float32", cache_tokens=512, speculation=always("heads"))
    (actual,) = lm.generate([[1, 2, 3]], max_new_tokens=41, **kind)
    plain = load(path, "float32", cache_tokens=512)
    assert actual.token_ids == plain.generate([[1, 2, 3]], max_new_tokens=41, **kind)[0].token_ids
    counts = lm.speculation
    assert counts is not None
    assert (counts.acceptance, counts.drafted_steps, counts.drafted_tokens) == (1, 8, 32)


def test_unseeded_requests_are_drawn_from_the_distribution(tmp_path: Path) -> None:
    write_holder(tmp_path / "held", "glm4_moe")
    path = known_next(tmp_path / "known", tmp_path / "held", noise=0.6)
    plain = load(path, "float32", cache_tokens=1024)
    sizes: dict[str, Any] = {"cache_tokens": 8192, "max_step_tokens": 4096, "max_sequences": 1024}
    lm = load(path, "float32", speculation=always("heads"), **sizes)
    assert_drawn_from_the_distribution(lm, plain, [1, 2, 3])


def test_states_of_long_prompts_are_computed_before_drafting(
    eagle: tuple[Path, Path],
) -> None:
    path, head = eagle
    sizes: dict[str, Any] = {"cache_tokens": 1024, "max_step_tokens": 128}
    lm = load(path, "float32", speculation=always(head, tokens=2), **sizes)
    watched = Watched(lm)
    lm.generate(prompts_of((300, 9)), max_new_tokens=8)
    known, drafts = next(each for each in watched.found if each[1] and len(each[0]) > 300)
    assert drafts == expected_of_eagle(*eagle, known, 2)


def test_adapters_are_verified_with(eagle: tuple[Path, Path], tmp_path: Path) -> None:
    modules = {"model.layers.0.self_attn.o_proj": (64, 64), "lm_head": (256, 64)}
    folder = write_adapter(tmp_path / "own", modules)
    recorded = []
    for speculation in (None, always(eagle[1])):
        lm = load(eagle[0], "float32", cache_tokens=512, speculation=speculation)
        lm.load_adapter("own", folder)
        params = [SamplingParams(max_new_tokens=20, adapter=name) for name in ("own", None)]
        recorded.append([each.token_ids for each in lm.generate([[1, 2], [1, 2]], params)])
    assert recorded[0] == recorded[1]
    assert recorded[0][0] != recorded[0][1]


def test_graphs_return_the_hidden_states(eagle: tuple[Path, Path]) -> None:
    """Draft tokens behind replayed steps are those that are made without graphs."""

    class Tapes:
        @staticmethod
        @hookimpl
        def interposer_records() -> list[Record]:
            return [PlatformEntry("tape", "tests.tape:TapePlatform")]

    plugins = ("interposer-models", "interposer-ops", "interposer-quantization")
    drafts, counts = [], []
    with register(Tapes, "tapes"):
        for graphs in ("auto", "off"):
            config = Config(graphs=graphs, platform="tape", plugins=plugins, canary="off")
            TapePlatform.replayed = 0
            options: dict[str, Any] = {
                "config": config,
                "cache_tokens": 512,
                "speculation": always(eagle[1]),
            }
            lm = load(eagle[0], "float32", **options)
            # Of two requests, the one with penalties has no guesses, and is the last one to end.
            params = [SamplingParams(max_new_tokens=n, frequency_penalty=p) for n, p in PLAIN]
            lm.generate(prompts_of((9, 30)), params)
            watched = Watched(lm)
            lm.generate(prompts_of((9, 30)), max_new_tokens=8)
            drafts.append([each[1] for each in watched.found if each[1]])
            counts.append(TapePlatform.replayed)
    assert drafts[0] == drafts[1]
    assert counts[0] > 0 == counts[1]


PLAIN = ((8, 0.0), (20, 0.5))


def test_a_checkpoint_without_a_head_is_refused(
    llama: Path, eagle: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"holds no head.*Try: speculation='ngram'"):
        load(llama, cache_tokens=64, speculation="heads")
    write_checkpoint(example(examples.glm4_moe, "groups"), tmp_path / "glm")
    with pytest.raises(ConfigError, match="holds no head"):
        load(tmp_path / "glm", cache_tokens=64, speculation="heads")
    with pytest.raises(CheckpointError, match="reads three layers, the model has 3"):
        load(llama, cache_tokens=64, speculation=eagle[1])
    config = Config(compile="eager")
    with pytest.raises(ConfigError, match=r"is compiled.*Try: Config\(compile='off'\)"):
        load(eagle[0], cache_tokens=64, speculation=eagle[1], config=config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 300}, "with vocab_size 300, the model has 256"),
        ({"target_hidden_size": 32}, "with target_hidden_size 32, the model has 64"),
        ({"draft_vocab_size": 90}, "a vocabulary of 90 tokens, but d2t does not say which"),
        ({"draft_vocab_size": 257}, "draft_vocab_size 257 exceeds vocab_size 256"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}},
            r"has eagle_aux_hidden_state_layer_ids \[1, 3, 5\], .* the inputs of \[2, 4, 5\]",
        ),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
    ],
)
def test_heads_of_other_models_are_refused(
    eagle: tuple[Path, Path], tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    write_eagle(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=message):
        load(eagle[0], cache_tokens=64, speculation=tmp_path)


def test_a_head_may_have_an_embedding_and_all_tokens(
    eagle: tuple[Path, Path], tmp_path: Path
) -> None:
    """With names as others store them; it guesses what a head with the same numbers does."""
    write_eagle(tmp_path, draft_vocab_size=256, eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    stored = load_file(eagle[1] / "model.safetensors")
    heads = torch.full((256, 64), 0.0)
    places = torch.arange(100) + stored.pop("d2t")
    heads[places] = stored["lm_head.weight"]
    stored["lm_head.weight"] = heads
    del stored["t2d"]
    own = load_file(eagle[0] / "model.safetensors")["model.embed_tokens.weight"]
    renamed = {name.replace("midlayer.", "layers.0."): each for name, each in stored.items()}
    save_file({**renamed, "embed_tokens.weight": own.clone()}, tmp_path / "model.safetensors")
    drafts = []
    for head in (eagle[1], tmp_path):
        lm = load(eagle[0], "float32", cache_tokens=512, speculation=always(head))
        watched = Watched(lm)
        lm.generate([[1, 2, 3]], max_new_tokens=20)
        drafts.append([each[1] for each in watched.found])
    assert drafts[0] == drafts[1]
