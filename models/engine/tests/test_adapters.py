"""Adapters of PEFT on loaded models: as PEFT computes them, mixed in a batch, swapped, refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.conftest import CONFIGS, OF_EXAMPLES, write_checkpoint
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests.tape import TapePlatform
from transformers import AutoModelForCausalLM

from interposer import Config, explain
from interposer.errors import CheckpointError, ConfigError, RequestError, UnknownNameError
from interposer_adapt import adapt, language_model
from interposer_engine import LanguageModel, SamplingParams, Stream, load
from interposer_ops.layers.linear import Linear

# peft reads an attribute that transformers is about to rename, and advises on tied embeddings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
METHOD = {"quant_method": "int8", "activations": "none", "head": "plain"}
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
PROMPTS = [IDS, [2, 7, 1], [8] * 17, [4, 4]]
KINDS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 6, "target_modules": ["embed_tokens", "lm_head", "all"]},
    "patterns": {
        "r": 8,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 3, "down_proj": 1},
        "alpha_pattern": {"v_proj": 5},
    },
    "root": {"r": 5, "lora_alpha": 2, "use_rslora": True, "target_modules": ["k_proj", "up_proj"]},
}
# Not the projections of heads: peft takes experts by the names of an MLP, and no Mamba's outputs.
PLACES = frozenset(
    (
        "q_proj",
        "qkv_proj",
        "c_attn",
        "c_proj",
        "query_key_value",
        "q_a_proj",
        "in_proj",
        "o_proj",
        "Wqkv",
    )
)


def tuned(model: Any, folder: Path, seed: int = 0, **how: Any) -> Any:
    """Save an adapter of random numbers, and return the model of peft that has it."""
    names = [
        name
        for name, module in model.named_modules()
        if hasattr(module, "weight") and module.weight.ndim == 2 and "positions" not in name
    ]
    if "all" in how["target_modules"]:
        how["target_modules"] = names
    wrapped = get_peft_model(model, LoraConfig(init_lora_weights=False, **how)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.15, generator=generator)
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)
    return wrapped


@torch.no_grad()
def logits_of(model: Any, ids: list[int] = IDS) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each of ``KINDS`` for the tiny Llama."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, how) in enumerate(KINDS.items()):
        model = AutoModelForCausalLM.from_pretrained(llama)
        torch.save(logits_of(tuned(model, root / name, seed, **how)), root / f"{name}.pt")
    return {name: root / name for name in KINDS}


def expected_logits(folder: Path) -> torch.Tensor:
    found: torch.Tensor = torch.load(folder.with_suffix(".pt"))
    return found


@pytest.fixture(scope="module")
def lm(llama: Path, adapters: dict[str, Path]) -> LanguageModel:
    """The tiny Llama with all adapters; prompts are computed in pieces."""
    lm = load(llama, cache_tokens=1024, max_sequences=8, max_step_tokens=11)
    for name, folder in adapters.items():
        lm.load_adapter(name, folder)
    return lm


@pytest.fixture(scope="module")
def alone(llama: Path, adapters: dict[str, Path]) -> Callable[[list[int], str | None], Any]:
    """Return the tokens of a request that runs alone, on a model with no other adapter."""
    loaded: dict[str | None, LanguageModel] = {}
    known: dict[Any, tuple[int, ...]] = {}

    def run(prompt: list[int], adapter: str | None) -> tuple[int, ...]:
        if adapter not in loaded:
            lm = loaded[adapter] = load(llama, cache_tokens=512, max_sequences=1)
            if adapter is not None:
                lm.load_adapter(adapter, adapters[adapter])
        key = (*prompt, adapter)
        if key not in known:
            known[key] = loaded[adapter].generate([prompt], adapter=adapter)[0].token_ids
        return known[key]

    return run


@pytest.mark.landing(2)
@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_peft(
    lm: LanguageModel, llama: Path, adapters: dict[str, Path], name: str
) -> None:
    assert lm.adapters == tuple(KINDS)
    plain = logits_of(AutoModelForCausalLM.from_pretrained(llama))
    expected = expected_logits(adapters[name])
    assert (plain - expected).abs().max() > 0.1
    close(lm.logits(IDS, adapter=name), expected)
    close(lm.logits(IDS), plain)
    score = lm.score(IDS[:6], [IDS[6:]], adapter=name)[0]
    assert score == pytest.approx(
        [expected[5 + i].log_softmax(-1)[token].item() for i, token in enumerate(IDS[6:])],
        abs=1e-4,
    )


@pytest.mark.parametrize(
    "family",
    [
        "phi3",
        "GPT2",
        pytest.param("qwen3-moe", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(OF_EXAMPLES)),
    ],
)
def test_families_agree_with_peft(family: str, tmp_path: Path) -> None:
    name = next(n for n in CONFIGS if n.lower().startswith(family.lower()))
    model = write_checkpoint(CONFIGS[name](), tmp_path)
    lm = load(tmp_path, cache_tokens=512)
    plain = logits_of(model)
    has = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    how: dict[str, Any] = {"target_modules": [*(has & PLACES)], "fan_in_fan_out": "c_attn" in has}
    wrapped = tuned(model, tmp_path / "adapter", r=3, **how)
    lm.load_adapter("x", tmp_path / "adapter")
    expected = logits_of(wrapped)
    assert (plain - expected).abs().max() > 1e-3
    close(lm.logits(IDS, adapter="x"), expected)


@settings(max_examples=12, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from(PROMPTS), st.sampled_from([None, *KINDS])), min_size=1, max_size=9
    )
)
def test_each_request_of_a_batch_has_its_own_adapter(
    lm: LanguageModel,
    alone: Callable[[list[int], str | None], Any],
    requests: list[tuple[list[int], str | None]],
) -> None:
    prompts = [prompt for prompt, _ in requests]
    params = [SamplingParams(adapter=adapter) for _, adapter in requests]
    for request, found in zip(requests, lm.generate(prompts, params), strict=True):
        assert found.token_ids == alone(*request), request


def test_adapters_come_and_go_while_requests_run(
    llama: Path, adapters: dict[str, Path], alone: Callable[[list[int], str | None], Any]
) -> None:
    lm = load(llama, cache_tokens=512, max_sequences=4)
    streams: dict[str | None, Stream] = {None: lm.start(IDS, SamplingParams())}
    for name in ("root", "patterns"):
        lm.load_adapter(name, adapters[name])
        streams[name] = lm.start(IDS, SamplingParams(adapter=name))
        for _ in range(3):
            lm.engine.step()
    with pytest.raises(RequestError, match=r"'root' is in use by 1 unfinished request\. Try"):
        lm.remove_adapter("root")
    while not streams["root"].sequence.finish_reason:
        lm.engine.step()
    assert not streams["patterns"].sequence.finish_reason
    lm.remove_adapter("root")
    # The name is free for another one.
    lm.load_adapter("root", adapters["all"])
    swapped = lm.start(IDS, SamplingParams(adapter="root"))
    while lm.engine.busy:
        lm.engine.step()
    for asked, stream in streams.items():
        assert tuple(stream.sequence.output) == alone(IDS, asked)
    assert tuple(swapped.sequence.output) == alone(IDS, "all")
    assert tuple(swapped.sequence.output) != alone(IDS, "root")


def test_removing_the_last_adapter_restores_the_model(
    llama: Path, adapters: dict[str, Path]
) -> None:
    lm = load(llama, cache_tokens=512)
    before, explained = lm.logits(IDS), str(explain(lm))
    kinds = [type(module) for module in lm.engine.model.modules()]
    for _ in range(2):
        lm.load_adapter("all", adapters["all"])
        assert not any(module._forward_hooks for module in lm.engine.model.modules())
        lm.logits(IDS, adapter="all")
        assert any(module._forward_hooks for module in lm.engine.model.modules())
        lm.logits(IDS)
        assert not any(module._forward_hooks for module in lm.engine.model.modules())
        kernels = {choice.request.name for choice, _ in lm.resolver.choices.values()}
        assert {"lora_shrink", "lora_expand"} <= kernels
        assert "lora_shrink" in str(explain(lm))
        lm.logits(IDS, adapter="all")
        lm.remove_adapter("all")
        assert str(explain(lm)) == explained
    assert not any(module._forward_hooks for module in lm.engine.model.modules())
    assert [type(module) for module in lm.engine.model.modules()] == kinds
    assert lm.adapters == ()
    assert lm.engine.runner.adapters is None
    assert torch.equal(lm.logits(IDS), before)


def test_adapters_survive_an_update_of_the_base(llama: Path, adapters: dict[str, Path]) -> None:
    lm = load(llama, cache_tokens=512)
    lm.load_adapter("all", adapters["all"])
    expected = lm.logits(IDS, adapter="all")
    tensors = load_file(llama / "model.safetensors")
    lm.update_weights({name: tensor * 1.5 for name, tensor in tensors.items()})
    assert not torch.allclose(lm.logits(IDS, adapter="all"), expected)
    lm.update_weights(tensors)
    close(lm.logits(IDS, adapter="all"), expected)


@torch.no_grad()
def test_a_quantized_base_takes_adapters(llama: Path, tmp_path: Path) -> None:
    """PEFT adapts a model whose weights are those that the quantized layers multiply by."""
    lm = load(llama, cache_tokens=512, quantization=METHOD)
    model = AutoModelForCausalLM.from_pretrained(llama)
    for layer in lm.engine.model.modules():
        if isinstance(layer, Linear):
            weights = layer(torch.eye(layer.in_features)).T.split([*layer.parts.values()])
            for part, weight in zip(layer.parts, weights, strict=True):
                held = model.get_parameter(f"{layer.prefix.rpartition('.')[0]}.{part}.weight")
                assert not torch.equal(held, weight)
                held.copy_(weight)
    wrapped = tuned(model, tmp_path / "adapter", r=4, target_modules=["all"])
    lm.load_adapter("x", tmp_path / "adapter")
    close(lm.logits(IDS, adapter="x"), logits_of(wrapped))


@pytest.mark.usefixtures("tape")
def test_captured_graphs_compute_adapters(
    llama: Path, adapters: dict[str, Path], alone: Callable[[list[int], str | None], Any]
) -> None:
    plugins = ("interposer-models", "interposer-ops", "interposer-quantization")
    config = Config(graphs="on", platform="tape", plugins=plugins, canary="off")
    lm = load(llama, config=config, cache_tokens=512, max_sequences=8)
    names = [None, "root", "patterns", "root", None]
    plain = lm.generate([IDS, IDS])
    captured = TapePlatform.captured
    for each in ("root", "patterns"):
        lm.load_adapter(each, adapters[each])
    assert len(lm.engine.runner.graphs or ()) == 0  # those without adapters are of no use
    params = [SamplingParams(adapter=n, max_new_tokens=16 - 2 * i) for i, n in enumerate(names)]
    for name, one, found in zip(names, params, lm.generate([IDS] * 5, params), strict=True):
        assert found.token_ids == alone(IDS, name)[: one.max_new_tokens]
    assert TapePlatform.captured > captured
    # Padding of a graph has no adapter, whatever the rows had before.
    assert lm.generate([IDS, IDS]) == plain
    for each in ("root", "patterns"):
        lm.remove_adapter(each)
    assert lm.generate([IDS, IDS]) == plain


CONFIG_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA' is computed\nTry: merge it"),
    ({"use_dora": True}, "use_dora is True, which is not supported\nTry: merge it"),
    ({"bias": "all"}, "bias is 'all', which is not supported\nTry: train with bias='none'"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], which is not supported"),
    ({"target_parameters": "up"}, "target_parameters is 'up', must be a list of names"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
    ({"init_lora_weights": "pissa"}, "'pissa', which changes weights of the base model\nTry: save"),
    ({"of_the_future": 3}, "of_the_future is 3, which is not supported"),
    ({"r": 0}, "r is 0, must be an integer from 1 to"),
    ({"r": 4.0}, "r is 4.0, must be an integer from 1 to"),
    ({"lora_alpha": "8"}, "lora_alpha is '8', must be a number above 0"),
    ({"rank_pattern": ["x"]}, r"rank_pattern is \['x'\], must be an object"),
    ({"rank_pattern": {"x": -1}}, r"rank_pattern\['x'\] is -1"),
    ({"alpha_pattern": {"(": 1}}, r"alpha_pattern has the key '\(', which is no pattern"),
    ({"use_rslora": "true"}, "use_rslora is 'true', must be true or false"),
    ({"target_modules": None}, "holds matrices of .*, which target_modules of adapter_config"),
    ({"target_modules": ["k_proj"]}, r"holds .*up_proj', which target_modules of adapter_config"),
    ({"target_modules": "("}, r"target_modules is '\(', which is no pattern"),
    ({"exclude_modules": ["up_proj"]}, r"up_proj', which exclude_modules .* leaves out"),
    ({"layers_to_transform": [0]}, r"layers\.1\..*, which layers_to_transform .* leaves out"),
    ({"layers_to_transform": "0"}, "layers_to_transform is '0', must be an integer or a list"),
    ({"r": 8}, r"has shape \[5, 64\]; rank 8 of adapter_config.json and 64 inputs and"),
]


@pytest.fixture
def copied_adapter(adapters: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapters["root"], tmp_path / "copied"))


@pytest.fixture(scope="module")
def bare(llama: Path) -> LanguageModel:
    """The tiny Llama, which refuses all that it is given."""
    return load(llama, cache_tokens=512)


@pytest.mark.parametrize(("changed", "told"), CONFIG_FAULTS, ids=str)
def test_unsupported_settings_are_refused(
    bare: LanguageModel, copied_adapter: Path, changed: dict[str, Any], told: str
) -> None:
    file = copied_adapter / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(CheckpointError, match=told):
        bare.load_adapter("x", copied_adapter)
    assert bare.adapters == ()


FRONT = "base_model.model."
K_PROJ = "model.layers.0.self_attn.k_proj"
Tensors = dict[str, torch.Tensor]


def moved(tensors: Tensors, module: str) -> Tensors:
    return {name.replace(K_PROJ, module): tensor for name, tensor in tensors.items()}


FILE_FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "nothing": (lambda _: {}, "holds no matrix"),
    "one side": (
        lambda t: {n: x for n, x in t.items() if n != f"{FRONT}{K_PROJ}.lora_B.weight"},
        f"lacks the matrix B of '{K_PROJ}'",
    ),
    "magnitudes": (
        lambda t: {**t, f"{FRONT}{K_PROJ}.lora_magnitude_vector": torch.ones(3)},
        "lora_magnitude_vector', which is no matrix of LoRA\nTry: train without",
    ),
    "other layers": (
        lambda t: moved(t, "model.layers.7.self_attn.k_proj"),
        "adapts 'model.layers.7.self_attn.k_proj', which is no linear, embedding or head of this "
        "model that takes adapters. Such are, nearest first: model.layers.",
    ),
    "another kind": (
        lambda t: moved(t, "model.embed_tokens"),
        "but the module is an embedding in this model",
    ),
    "another base": (
        lambda t: moved(t, "model.layers.0.mlp.down_proj"),
        r"has shape \[5, 64\]; rank 5 of adapter_config.json and 96 inputs and 64 outputs of the "
        r"model ask for \[5, 96\]\nTry: load the base model, which it was trained for",
    ),
    "integers": (lambda t: {n: x.int() for n, x in t.items()}, "as torch.int32, expected floats"),
    "not a number": (
        lambda t: {n: x.fill_(math.nan) for n, x in t.items()},
        rf"{WEIGHTS}: holds the tensor '{FRONT}.*lora_A.weight', \d+ of whose \d+ numbers are NaN",
    ),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_matrices_that_do_not_fit_are_refused(
    bare: LanguageModel, copied_adapter: Path, fault: str
) -> None:
    change, told = FILE_FAULTS[fault]
    file = copied_adapter / WEIGHTS
    save_file(change(load_file(file)), file)
    with pytest.raises(CheckpointError, match=told):
        bare.load_adapter("x", copied_adapter)
    assert bare.adapters == ()


def test_folders_that_are_no_adapters_are_refused(
    bare: LanguageModel, copied_adapter: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="does not exist\nTry: give the folder of an adapter"):
        bare.load_adapter("x", tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: is missing"):
        bare.load_adapter("x", tmp_path)
    (copied_adapter / WEIGHTS).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="is truncated or not a safetensors file"):
        bare.load_adapter("x", copied_adapter)
    (copied_adapter / WEIGHTS).rename(copied_adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin is pickled"):
        bare.load_adapter("x", copied_adapter)


def test_names_are_checked(lm: LanguageModel, bare: LanguageModel, adapters: Any) -> None:
    with pytest.raises(ConfigError, match=r"'all' already\. Try: replace=True"):
        lm.load_adapter("all", adapters["root"])
    with pytest.raises(ConfigError, match="is '', must be a text"):
        lm.load_adapter("", adapters["root"])
    with pytest.raises(UnknownNameError, match=r"adapter 'rot'\. Known, nearest first: 'root'"):
        lm.remove_adapter("rot")
    with pytest.raises(UnknownNameError, match=r"adapter 'rot'\. Known, nearest first: 'root'"):
        lm.generate([IDS], adapter="rot")
    with pytest.raises(UnknownNameError, match=r"adapter 'all'\. There is no adapter"):
        bare.logits(IDS, adapter="all")
    with pytest.raises(RequestError, match="adapter is 3; allowed is None or the name"):
        SamplingParams(adapter=3)  # type: ignore[arg-type]


def test_models_that_take_no_adapters_say_so(llama: Path, adapters: dict[str, Path]) -> None:
    compiled = load(llama, cache_tokens=512, config=Config(compile="eager"))
    with pytest.raises(ConfigError, match="A compiled model takes no adapters"):
        compiled.load_adapter("all", adapters["all"])
    adapted = adapt(AutoModelForCausalLM.from_pretrained(llama))
    with pytest.raises(ConfigError, match="An adapted model takes adapters where it was made"):
        language_model(adapted, cache_tokens=512).load_adapter("all", adapters["all"])


@pytest.fixture
def saved_with_tables(llama: Path, tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """Save an adapter of head and table with copies of their weights, as PEFT does by default."""
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    names = ["lm_head", "embed_tokens", "q_proj"]
    wrapped = tuned(model, tmp_path, r=4, target_modules=names)
    wrapped.save_pretrained(str(tmp_path), save_embedding_layers=True)
    return tmp_path, logits_of(wrapped)


def test_stored_copies_of_base_weights_are_compared_with_the_base(
    llama: Path, saved_with_tables: tuple[Path, torch.Tensor]
) -> None:
    folder, expected = saved_with_tables
    stored = load_file(folder / WEIGHTS)
    copies = [name for name in stored if "lora_" not in name]
    assert copies
    lm = load(llama, dtype="float32", cache_tokens=256, adapters={"first": folder})
    close(lm.logits(IDS, adapter="first"), expected)
    lm.load_adapter("second", folder)
    close(lm.logits(IDS, adapter="second"), expected)
    copy = stored[copies[0]]
    for edited, reason in (
        (copy + 1, "differs from the weight of the base model\nTry: load the base"),
        (copy[:-1].clone(), r"shape .* the vocabulary was resized\nTry: merge"),
    ):
        save_file({**stored, copies[0]: edited}, folder / WEIGHTS)
        with pytest.raises(CheckpointError, match=reason):
            lm.load_adapter("third", folder)
