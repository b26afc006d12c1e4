"""Quantized checkpoints compute in vLLM what they compute without it, held once.

Float32 gives equal tokens. vLLM takes GPTQ and AWQ in 16 bits alone: there each token has to be the
likeliest, but for roundings, where the same model in float32 reads what was said. Checkpoints of
both are written here, as AutoGPTQ 0.7 and AutoAWQ 0.2 pack their words.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from interposer_engine import load, quantize

Runs = list[dict[str, Any]]
Settings = dict[str, Any]

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 256, 512, 2, 4, 2
VOCABULARY = 512
# vLLM pads it.
ODD_VOCABULARY = 500
PROMPTS = [[5, 17, 99, 200, 31], [400, 401, 7, 8], [100, 22, 3, 4, 5, 6, 7, 8, 9, 10]]
TOKENS = 32
# A token that roundings made the likeliest lacks little, and few are; of wrong weights it lacks
# several on average, as logits of this model spread by 1.6.
NEAR, SHARE = 0.05, 0.8

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
}
PACKED: dict[str, Settings] = {
    "gptq": GPTQ,
    "gptq, groups of 128": {**GPTQ, "group_size": 128},
    "gptq, a scale per output": {**GPTQ, "group_size": -1, "desc_act": True},
    "gptq, zero points": {**GPTQ, "sym": False},
    "gptq, 8 bits": {**GPTQ, "bits": 8},
    "gptq, 8 bits and zero points": {**GPTQ, "bits": 8, "sym": False},
    "gptq, groups of 16": {**GPTQ, "group_size": 16},
    "gptq, head": {**GPTQ, "lm_head": True},
    "awq": AWQ,
    "awq, groups of 128": {**AWQ, "group_size": 128},
    "awq, no zero points": {**AWQ, "zero_point": False},
    "awq, head": {**AWQ, "lm_head": True},
}
# Arguments of ``quantize``, and what is changed of the configuration.
COMPRESSED: dict[str, dict[str, Any]] = {
    "int8": {"scheme": "int8"},
    "fp8": {"scheme": "fp8"},
    "w4a16": {"scheme": "int4", "group_size": 32},
    "w4a16, zero points": {"scheme": "int4", "group_size": 32, "asymmetric": True},
    "w8a16": {"scheme": "int8", "activations": "none"},
    "w4a8": {"scheme": "w4a8", "group_size": 32},
}
COMPILED = ("int8", "w4a16", "w4a8")
# Bits of a weight of linear layers in memory, and inputs that share a scale.
HELD = {"int8": (8, HIDDEN), "w4a16": (4, 32), "w4a8": (4, 32)}

# By checkpoints whose first scale is zero, sound ones of the same form.
BROKEN = {"w8a16, broken": "w8a16", "gptq, broken": "gptq, 8 bits"}
# That vLLM has kernels for.
OWN_FLOAT32 = ("int8", "fp8")
OWN_BFLOAT16 = ("w4a16", "gptq", "awq")

# One worker starts the engines.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600), pytest.mark.xdist_group("vllm")]


def words(codes: Tensor, dim: int, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return int32 words of consecutive codes along ``dim``, the first in the lowest bits."""
    groups = codes.movedim(dim, -1).unflatten(-1, (-1, 32 // bits))
    groups = groups if order is None else groups[..., list(order)]
    packed: Tensor = (groups << bits * torch.arange(32 // bits)).sum(-1)
    signed: Tensor = packed.where(packed < 1 << 31, packed - (1 << 32)).int()
    return signed.movedim(-1, dim).contiguous()


def stored(weight: Tensor, settings: Settings) -> dict[str, Tensor]:
    """Return the tensors of a weight ``[O, I]``, rounded to nearest."""
    bits, inputs = settings["bits"], weight.shape[1]
    size = inputs if settings["group_size"] == -1 else settings["group_size"]
    last, middle = 2**bits - 1, 2 ** (bits - 1)
    groups = torch.arange(inputs) // size
    by_group = weight.unflatten(1, (-1, size))
    low, high = by_group.amin(2).clamp(max=0), by_group.amax(2).clamp(min=0)
    if not settings.get("sym", settings.get("zero_point")):
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / last).half()
    zeros = (-low / scales.float()).round().clamp(0, last)
    if settings.get("sym", not settings.get("zero_point")):
        zeros.fill_(middle)
    codes = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, last).long()
    tensors = {"scales": scales.T.contiguous()}
    if settings["quant_method"] == "awq":
        order_of_words = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors["qweight"] = words(codes.T, 1, bits, order_of_words)
        tensors["qzeros"] = words(zeros.T.long(), 1, bits, order_of_words)
    else:
        tensors["qweight"] = words(codes.T, 0, bits)
        tensors["qzeros"] = words(zeros.T.long() - 1 & last, 1, bits)
        tensors["g_idx"] = groups.int()
    return tensors


def write_plain(folder: Path, vocabulary: int = VOCABULARY) -> Path:
    """Write a random model in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=vocabulary,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write_packed(plain: Path, folder: Path, settings: Settings) -> Path:
    """Write the model as GPTQ or AWQ store it."""
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj") or (layer == "lm_head" and settings.get("lm_head")):
            tensors |= {f"{layer}.{key}": value for key, value in stored(weight, settings).items()}
        else:
            tensors[name] = weight
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_settings(folder, plain, settings)
    return folder


def write_settings(folder: Path, source: Path, settings: Settings) -> None:
    facts = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, "quantization_config": settings}))


def settings_of(folder: Path) -> Settings:
    facts: Settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    return facts


def write_packed_w4a8(weights_only: Path, both: Path, folder: Path) -> Path:
    """Write the packed weights of one checkpoint with the rounded inputs of another."""
    shutil.copytree(weights_only, folder)
    settings = settings_of(folder)
    inputs = settings_of(both)["config_groups"]["group_0"]["input_activations"]
    settings["config_groups"]["group_0"]["input_activations"] = inputs
    write_settings(folder, folder, settings)
    return folder


def write_quantized_head(int8: Path, folder: Path) -> Path:
    """Quantize the head of a checkpoint as its other layers are."""
    shutil.copytree(int8, folder)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"].float()
    scale = head.abs().amax(1, keepdim=True) / 127
    tensors["lm_head.weight"] = (head / scale).round().to(torch.int8)
    tensors["lm_head.weight_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {**settings_of(folder), "ignore": []}
    # By this vLLM finds a head, which is of a class of its own there.
    settings["config_groups"]["group_0"]["targets"].append("re:.*lm_head")
    write_settings(folder, folder, settings)
    return folder


def write_broken(sound: Path, folder: Path) -> Path:
    shutil.copytree(sound, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(
        name for name in sorted(tensors) if name.endswith("scale") or name.endswith("scales")
    )
    tensors[name][0, 0] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return all checkpoints, by name."""
    root = tmp_path_factory.mktemp("quantized")
    plain, odd = (write_plain(root / str(size), size) for size in (VOCABULARY, ODD_VOCABULARY))
    found = {}
    for name, asked in COMPRESSED.items():
        found[name] = root / name
        quantize(plain, found[name], **asked)
    quantize(odd, root / "odd", "int8")
    for name in ("w4a16", "w4a16, zero points"):
        packed = name.replace("w4a16", "w4a8, packed")
        found[packed] = write_packed_w4a8(found[name], found["w4a8"], root / packed)
    found["int8, head"] = write_quantized_head(root / "odd", root / "head")
    for name, settings in PACKED.items():
        found[name] = write_packed(plain, root / name, settings)
    for name, sound in BROKEN.items():
        found[name] = write_broken(found[sound], root / name)
    return found


FLOAT32 = ("int8", "fp8", "w4a16", "w4a16, zero points", "w8a16")
# A sum in another order can round an input to another code, so that near ties fall otherwise.
ROUNDED = ("w4a8", "w4a8, packed", "w4a8, packed, zero points", "int8, head")


def asked(folder: Path, dtype: str, compiled: bool = False) -> dict[str, Any]:
    options = {"dtype": dtype, "enforce_eager": not compiled}
    return {
        "model": str(folder),
        "options": options,
        "prompts": PROMPTS,
        "tokens": TOKENS,
        "held": True,
    }


@pytest.fixture(scope="module")
def bridged(folders: dict[str, Path], run_in_vllm: Callable[..., Runs]) -> dict[str, Any]:
    """Return the results of vLLM with interposer's kernels for all checkpoints."""
    runs = {name: asked(folders[name], "float32") for name in (*FLOAT32, *ROUNDED)}
    runs |= {name: asked(folders[name], "bfloat16") for name in (*PACKED, *BROKEN)}
    runs |= {f"{n}, compiled": asked(folders[n], "bfloat16", compiled=True) for n in COMPILED}
    return dict(zip(runs, run_in_vllm(list(runs.values())), strict=True))


@pytest.fixture(scope="module")
def own(folders: dict[str, Path], run_in_vllm: Callable[..., Runs]) -> dict[str, Any]:
    """Return the results of vLLM alone for some checkpoints."""
    runs = {name: asked(folders[name], "float32") for name in OWN_FLOAT32}
    runs |= {name: asked(folders[name], "bfloat16") for name in (*OWN_BFLOAT16, *BROKEN.values())}
    return dict(zip(runs, run_in_vllm(list(runs.values()), VLLM_PLUGINS=""), strict=True))


@pytest.mark.parametrize("name", FLOAT32)
def test_a_quantized_model_generates_the_same_tokens_as_without_vllm(
    folders: dict[str, Path], bridged: dict[str, Any], name: str
) -> None:
    run = bridged[name]
    assert "error" not in run, run["error"]
    assert run["report"]["kept"] == {}
    lm = load(folders[name], dtype="float32", cache_tokens=512)
    expected = [
        list(completion.token_ids)
        for completion in lm.generate(PROMPTS, max_new_tokens=TOKENS, ignore_eos=True)
    ]
    assert run["alone"] == run["batch"] == expected


@pytest.mark.parametrize("name", [*ROUNDED, *PACKED, *(f"{n}, compiled" for n in COMPILED)])
def test_tokens_are_the_likeliest_up_to_rounding(
    folders: dict[str, Path], bridged: dict[str, Any], name: str
) -> None:
    run = bridged[name]
    assert "error" not in run, run["error"]
    assert run["report"]["kept"] == {}
    check_likely(folders[name.removesuffix(", compiled")], run)


def check_likely(folder: Path, found: dict[str, Any]) -> None:
    """Read what was said with the same model in float32."""
    lm = load(folder, dtype="float32", cache_tokens=512)
    texts = [
        prompt + said
        for way in ("alone", "batch")
        for prompt, said in zip(PROMPTS, found[way], strict=True)
    ]
    read = lm.generate(texts, max_new_tokens=1, ignore_eos=True, prompt_logprobs=1)
    prompt_tokens = [token for completion in read for token in completion.prompt_logprobs[-TOKENS:]]
    lacking = [token.top_logprobs[0][1] - token.logprob for token in prompt_tokens]
    assert sum(lacking) < NEAR * len(lacking)
    assert sum(token.rank == 1 for token in prompt_tokens) > SHARE * len(prompt_tokens)


@pytest.mark.parametrize("name", OWN_FLOAT32)
def test_vllm_alone_generates_the_same_tokens(
    own: dict[str, Any], bridged: dict[str, Any], name: str
) -> None:
    assert own[name]["alone"] == bridged[name]["alone"]
    assert "report" not in own[name]


@pytest.mark.parametrize("name", OWN_BFLOAT16)
def test_vllm_unpacks_the_same_weights(
    folders: dict[str, Path], own: dict[str, Any], name: str
) -> None:
    check_likely(folders[name], own[name])


@pytest.mark.parametrize("name", BROKEN)
def test_weights_that_neither_supports_raise_with_both_reasons(
    own: dict[str, Any], bridged: dict[str, Any], name: str
) -> None:
    assert "uint8b128" in own[BROKEN[name]]["error"]
    error = bridged[name]["error"]
    assert "uint8b128" in error
    assert "did not take the layer over" in error
    assert "scale" in error


@pytest.mark.parametrize("name", HELD)
def test_weights_are_stored_once_and_packed(bridged: dict[str, Any], name: str) -> None:
    bits, group_size = HELD[name]
    rows = HIDDEN + 2 * HIDDEN * KV_HEADS // HEADS + HIDDEN + 2 * INNER
    numbers = LAYERS * (rows * HIDDEN + HIDDEN * INNER)
    # The table and the head are plain. A scale takes four bytes at most, and norms next to nothing.
    plain, codes = 2 * VOCABULARY * HIDDEN * 2, numbers * bits // 8
    num_bytes = bridged[f"{name}, compiled"]["held_bytes"]
    assert plain + codes <= num_bytes < 1.05 * (plain + codes + numbers // group_size * 4)
