"""Ten families of transformers, tiny and random: adapted, compared, and restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.landing import landing_sample
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSpeechSeq2Seq,
    BertConfig,
    CLIPConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    PhiConfig,
    Qwen3Config,
    ViTConfig,
    WhisperConfig,
)

from interposer_adapt import Adapted, adapt

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "initializer_range": 0.2,
}
DECODER: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {**SIZES, "image_size": 16, "patch_size": 8}
del VISION["vocab_size"]

FAMILIES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "llama": (AutoModelForCausalLM, lambda: LlamaConfig(**DECODER)),
    "qwen3": (
        AutoModelForCausalLM,
        lambda: Qwen3Config(**DECODER, head_dim=16, tie_word_embeddings=True),
    ),
    "gemma3": (
        AutoModelForCausalLM,
        lambda: Gemma3TextConfig(
            **{**DECODER, "num_hidden_layers": 3},
            head_dim=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "phi": (AutoModelForCausalLM, lambda: PhiConfig(**{**DECODER, "partial_rotary_factor": 0.5})),
    "deepseek-v3": (
        AutoModelForCausalLM,
        lambda: DeepseekV3Config(
            **{**DECODER, "num_key_value_heads": 4},
            moe_intermediate_size=32,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        ),
    ),
    "bert": (AutoModelForMaskedLM, lambda: BertConfig(**SIZES)),
    "vit": (AutoModel, lambda: ViTConfig(**VISION)),
    "clip": (
        AutoModel,
        lambda: CLIPConfig(
            text_config={**SIZES, "max_position_embeddings": 32, "eos_token_id": 127},
            vision_config=VISION,
            projection_dim=24,
        ),
    ),
    "whisper": (
        AutoModelForSpeechSeq2Seq,
        lambda: WhisperConfig(
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            vocab_size=128,
            max_source_positions=20,
            max_target_positions=64,
            num_mel_bins=8,
            init_std=0.2,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            decoder_start_token_id=1,
        ),
    ),
    "lfm2": (
        AutoModelForCausalLM,
        lambda: Lfm2Config(
            **{**DECODER, "num_hidden_layers": 3},
            layer_types=["conv", "full_attention", "conv"],
            block_multiple_of=16,
        ),
    ),
}
GENERATES = ("llama", "qwen3", "gemma3", "phi", "deepseek-v3", "lfm2")


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    kind, config = FAMILIES[name]
    model = kind.from_config(config(), dtype=dtype).eval()
    for module in model.modules():
        # Those that are all ones or all zeros would hide a mistake.
        if not module._modules and "norm" in type(module).__name__.lower():
            for parameter in module.parameters():
                nn.init.normal_(parameter, 0.5, 0.3)
    return model


def inputs(name: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 128, (2, 13), generator=generator)
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    picture = torch.randn(2, 3, 16, 16, generator=generator).to(dtype)
    if name == "whisper":
        sound = torch.randn(2, 8, 40, generator=generator).to(dtype)
        return {"input_features": sound, "decoder_input_ids": ids[:, :6]}
    if name == "vit":
        return {"pixel_values": picture}
    if name == "clip":
        return {"input_ids": ids, "pixel_values": picture}
    return {"input_ids": ids, "attention_mask": padding}


def results(model: Any, name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the model's results without those of padding."""
    given = inputs(name, dtype)
    out = model(**given)
    if name == "clip":
        return [out.logits_per_image, out.text_embeds, out.image_embeds]
    if name == "vit":
        return [out.last_hidden_state]
    if "attention_mask" in given:
        return [out.logits[given["attention_mask"].bool()]]
    return [out.logits]


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance in the root mean square."""
    wide = expected.double()
    return float((actual.double() - wide).norm() / wide.norm())


def share_bound(model: Any, adapted: Adapted[Any]) -> float:
    """Return the share of projections and norms that are bound."""
    bound = {place.name for place in adapted.places if place.is_bound}
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.LayerNorm)
        or (not module._modules and type(module).__name__.endswith("RMSNorm"))
    ]
    assert names
    return sum(name in bound for name in names) / len(names)


# Errors of a layer add up along the residual stream as independent ones do: the root of their
# number, some forty operations of a few roundings each, and the last ones in the head.
ROUNDINGS = 32


@pytest.mark.landing(2)
@torch.no_grad()
@pytest.mark.parametrize("name", landing_sample(FAMILIES, every=2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_family_computes_the_same_and_is_restored(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    expected = results(model, name, dtype)
    wide = build(name).double()
    wide.set_experts_implementation("eager")  # the others have no float64
    exact = results(wide, name, torch.float64)
    adapted = adapt(model)
    assert share_bound(model, adapted) >= 0.95, adapted.places
    actual = results(model, name, dtype)
    for ours, theirs, right in zip(actual, expected, exact, strict=True):
        assert ours.isfinite().all()
        bound = ROUNDINGS * torch.finfo(dtype).eps
        assert relative(ours, right) <= max(bound, 2 * relative(theirs, right))
    adapted.restore()
    again = results(model, name, dtype)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    state = model.state_dict()
    assert state.keys() == before.keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in before.items())


def attention_places(adapted: Adapted[Any]) -> dict[str, str]:
    return {
        place.name: place.reason for place in adapted.places if place.kind.endswith("Attention")
    }


@pytest.mark.landing(2)
@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_attention_of_a_family_runs_on_kernels(name: str) -> None:
    model = build(name)
    adapted = adapt(model)
    results(model, name, torch.float32)
    places = attention_places(adapted)
    assert places
    assert not any("delegated" in reason for reason in places.values()), places


@pytest.mark.landing(1)
@torch.no_grad()
@pytest.mark.parametrize("name", GENERATES)
def test_a_decoder_generates_the_same_tokens(name: str) -> None:
    model = build(name)
    given = inputs(name)
    options = {"max_new_tokens": 20, "do_sample": False}
    beams = {**options, "num_beams": 3, "max_new_tokens": 8}
    expected = model.generate(**given, **options), model.generate(**given, **beams)
    adapted = adapt(model)
    assert torch.equal(model.generate(**given, **options), expected[0])
    assert torch.equal(model.generate(**given, **beams), expected[1])
    adapted.restore()
    assert "generate" not in vars(model)


@torch.no_grad()
def test_whisper_generates_the_same_tokens() -> None:
    model = build("whisper")
    sound = inputs("whisper")["input_features"]
    expected = model.generate(sound, max_new_tokens=12, do_sample=False)
    adapt(model)
    assert torch.equal(model.generate(sound, max_new_tokens=12, do_sample=False), expected)
