"""Adapters of PEFT on mixtures: experts stored together and one by one, and routers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.engine.tests.test_adapters import IDS, PROMPTS, close, logits_of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from interposer import explain
from interposer.errors import CheckpointError, ConfigError
from interposer_engine import LanguageModel, SamplingParams, load
from interposer_ops.layers.moe.experts import Experts

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:target_parameters:UserWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
    # It looks for the keys of patterns among modules alone.
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning"),
]

WEIGHTS = "adapter_model.safetensors"
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 96,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}
FAMILIES: dict[str, Any] = {
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, num_experts=5, moe_intermediate_size=20, intermediate_size=64, norm_topk_prob=True
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, intermediate_size=36),
}
# What checkpoints of one expert each are called, gates first.
SINGLE = {
    "qwen3-moe": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2"),
}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "both": {"r": 3, "lora_alpha": 5, "target_parameters": BOTH},
    "first": {
        "r": 4,
        "target_parameters": [BOTH[0], "gate.weight"],
        "target_modules": ["q_proj"],
        "rank_pattern": {"layers.1.mlp.experts.gate_up_proj": 2},
    },
    "last": {"r": 2, "use_rslora": True, "target_parameters": BOTH[1:]},
}


def tuned(model: Any, folder: Path, seed: int, **how: Any) -> Any:
    """Save an adapter of random numbers, and return the model of peft that has it."""
    how.setdefault("target_modules", [])
    wrapped = get_peft_model(model, LoraConfig(init_lora_weights=False, **how)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.2, generator=generator)
    wrapped.save_pretrained(str(folder))
    return wrapped


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(family)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    for name, parameter in model.named_parameters():
        if "experts" in name or "gate" in name:
            parameter.data.normal_(0, 0.25)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    """A folder of each of ``KINDS``, and the logits of peft beside it."""
    for seed, (name, how) in enumerate(KINDS.items()):
        model = AutoModelForCausalLM.from_pretrained(base)
        torch.save(logits_of(tuned(model, base / name, seed, **how)), base / f"{name}.pt")
    return {name: base / name for name in KINDS}


@pytest.fixture(scope="module")
def lm(base: Path, adapters: dict[str, Path]) -> LanguageModel:
    lm = load(base, cache_tokens=512, max_sequences=8, max_step_tokens=13)
    for name, folder in adapters.items():
        lm.load_adapter(name, folder)
    return lm


@pytest.mark.landing(1)
@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_peft(lm: LanguageModel, base: Path, name: str) -> None:
    plain = logits_of(AutoModelForCausalLM.from_pretrained(base))
    expected = torch.load(base / f"{name}.pt")
    assert (plain - expected).abs().max() > 0.01
    close(lm.logits(IDS, adapter=name), expected)
    close(lm.logits(IDS), plain)


@pytest.mark.slow
def test_requests_of_a_batch_have_different_adapters(
    lm: LanguageModel, base: Path, adapters: dict[str, Path]
) -> None:
    names = [None, *KINDS, None, "last", "both"]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(names))]
    params = [SamplingParams(adapter=name, max_new_tokens=6) for name in names]
    found = lm.generate(prompts, params)
    for name in (None, *KINDS):
        alone = load(base, cache_tokens=256, max_sequences=1)
        if name is not None:
            alone.load_adapter(name, adapters[name])
        for prompt, own, completion in zip(prompts, params, found, strict=True):
            if own.adapter == name:
                assert completion.token_ids == alone.generate([prompt], own)[0].token_ids


def test_matrices_by_expert_equal_stacked_ones(family: str, base: Path, tmp_path: Path) -> None:
    """Gates and what they act on have ranks of their own, which PEFT has behind each other."""
    rank, generator = 2, torch.Generator().manual_seed(4)
    config = FAMILIES[family]
    experts = config.num_local_experts
    inner = config.moe_intermediate_size if family == "qwen3-moe" else config.intermediate_size
    hidden = config.hidden_size
    stem, *names = SINGLE[family]
    model = AutoModelForCausalLM.from_pretrained(base)
    how = {"r": 2 * rank, "lora_alpha": 2 * rank, "target_parameters": BOTH}
    wrapped = tuned(model, tmp_path / "stacked", 0, **how)
    stored: dict[str, torch.Tensor] = {}
    for layer, block in enumerate(wrapped.base_model.model.model.layers):
        down = block.mlp.experts
        first = down.base_layer
        sides = [wrapper.lora_A["default"].weight.data.zero_() for wrapper in (first, down)]
        others = [wrapper.lora_B["default"].weight.data.zero_() for wrapper in (first, down)]
        # [E, ranks, inputs] and [outputs, ranks, E], as PEFT reads them.
        a = [side.view(experts, 2 * rank, -1) for side in sides]
        b = [other.view(len(other), 2 * rank, experts) for other in others]
        for expert in range(experts - 1):  # the last one has no adapter
            for number, name in enumerate(names):
                inputs, outputs = (inner, hidden) if number == 2 else (hidden, inner)
                one = 0.2 * torch.randn(rank, inputs, generator=generator)
                two = 0.2 * torch.randn(outputs, rank, generator=generator)
                front = f"base_model.model.model.layers.{layer}.{stem}.{expert}.{name}"
                stored |= {f"{front}.lora_A.weight": one, f"{front}.lora_B.weight": two}
                ranks = slice(rank, 2 * rank) if number == 1 else slice(rank)
                rows = slice(inner, 2 * inner) if number == 1 else slice(outputs)
                half = number // 2
                a[half][expert, ranks] = one
                b[half][rows, ranks, expert] = two
    folder = tmp_path / "single"
    folder.mkdir()
    save_file(stored, folder / WEIGHTS)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    lm = load(base, cache_tokens=256)
    lm.load_adapter("x", folder)
    close(lm.logits(IDS, adapter="x"), logits_of(wrapped))


@pytest.mark.landing(1)
@torch.no_grad()
def test_a_quantized_moe_base_takes_adapters(base: Path, tmp_path: Path) -> None:
    """PEFT adapts a model whose weights are those that the quantized experts multiply by."""
    method = {"quant_method": "int8", "activations": "none", "head": "plain"}
    lm = load(base, cache_tokens=256, quantization=method)
    plain = load(base, cache_tokens=256)
    model = AutoModelForCausalLM.from_pretrained(base)
    for module in lm.engine.model.modules():
        if not isinstance(module, Experts):
            continue
        number = int(module.prefix.split(".")[2])
        held = model.model.layers[number].mlp.experts
        for expert, (first, second) in enumerate(module.operands[0]):
            for target, layer in ((held.gate_up_proj, first), (held.down_proj, second)):
                weight = layer(torch.eye(target.shape[2])).T
                assert not torch.equal(target[expert], weight)
                target[expert] = weight
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            layers = {m.prefix: m for m in lm.engine.model.modules() if hasattr(m, "operands")}
            prefix = name.removesuffix(".weight")
            owner, part = layers.get(prefix), prefix.rpartition(".")[2]
            if owner is None:
                owner = layers[prefix.rpartition(".")[0] + ".qkv_proj"]
            weight = owner(torch.eye(parameter.shape[1])).T
            parts = dict(zip(owner.parts, weight.split([*owner.parts.values()]), strict=True))
            parameter.copy_(parts[part])
    wrapped = tuned(model, tmp_path / "adapter", 3, **KINDS["both"])
    lm.load_adapter("x", tmp_path / "adapter")
    close(lm.logits(IDS, adapter="x"), logits_of(wrapped))
    plain.load_adapter("x", tmp_path / "adapter")
    assert not torch.allclose(plain.logits(IDS, adapter="x"), lm.logits(IDS, adapter="x"))


def test_removing_adapters_restores_a_moe_layer(base: Path, adapters: dict[str, Path]) -> None:
    lm = load(base, cache_tokens=256)
    mixtures = [m for m in lm.engine.model.modules() if isinstance(m, Experts)]
    before, explained = lm.logits(IDS), str(explain(lm))
    lm.load_adapter("both", adapters["both"])
    assert torch.equal(lm.logits(IDS), before)
    assert not any("forward" in vars(mixture) for mixture in mixtures)
    lm.logits(IDS, adapter="both")
    assert all("forward" in vars(mixture) for mixture in mixtures)
    lm.remove_adapter("both")
    assert not any("forward" in vars(mixture) for mixture in mixtures)
    assert str(explain(lm)) == explained


def test_adapters_use_updated_weights_of_experts(base: Path, adapters: dict[str, Path]) -> None:
    lm = load(base, cache_tokens=256)
    lm.load_adapter("both", adapters["both"])
    expected = lm.logits(IDS, adapter="both")
    tensors = load_file(base / "model.safetensors")
    lm.update_weights({name: tensor * 1.5 for name, tensor in tensors.items()})
    assert not torch.allclose(lm.logits(IDS, adapter="both"), expected)
    lm.update_weights(tensors)
    close(lm.logits(IDS, adapter="both"), expected)


def test_matrices_of_other_experts_are_refused(
    lm: LanguageModel, adapters: dict[str, Path], tmp_path: Path
) -> None:
    settings = json.loads((adapters["last"] / "adapter_config.json").read_text())
    tensors = load_file(adapters["last"] / WEIGHTS)
    name = next(name for name in tensors if "lora_A" in name)
    save_file(tensors | {name: tensors[name][1:].clone()}, tmp_path / WEIGHTS)
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"the model of each of \d experts ask for"):
        lm.load_adapter("x", tmp_path)
    # Not said to be adapted, the matrices have no place.
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"target_parameters": []}))
    with pytest.raises(CheckpointError, match=r"experts', which is no .* that takes\n?.*adapters"):
        lm.load_adapter("x", tmp_path)
    assert "x" not in lm.adapters


def test_experts_in_the_format_of_one_kernel_are_refused(
    base: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in for a format: a method of which nothing is known but its kernel."""
    lm = load(base, cache_tokens=256)
    mixture = next(m for m in lm.engine.model.modules() if isinstance(m, Experts))
    monkeypatch.setattr(mixture, "method", object())
    with pytest.raises(ConfigError, match=rf"{mixture.prefix} takes no adapters: .* at once in"):
        lm.load_adapter("x", adapters["both"])
    assert "lora_shrink" not in str(explain(lm))
    assert lm.adapters == ()
