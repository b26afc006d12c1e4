"""Models that are quantized while they are adapted: as the loader quantizes them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapted_models import WIDE, built
from tests.landing import landing_sample
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, Qwen3Config

from interposer.errors import ConfigError, UnknownNameError
from interposer_adapt import adapt
from interposer_engine import load

SIZES: dict[str, Any] = {**WIDE, "max_position_embeddings": 128, "initializer_range": 0.1}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3-tied": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}
METHODS: list[Any] = [
    "int8",
    {"quant_method": "int4", "group_size": 16, "head": "plain"},
    "w4a8",
    {"quant_method": "fp8", "strategy": "channel"},
    {"quant_method": "fp8", "strategy": "tensor"},
    {"quant_method": "fp8", "strategy": "block", "weight_block_size": [32, 32]},
]


def saved(name: str, path: Path) -> Any:
    model = built(CONFIGS[name]())
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer.save(str(path / "tokenizer.json"))
    return model


@pytest.mark.landing(1)
@torch.no_grad()
@pytest.mark.parametrize("method", landing_sample(METHODS, every=3), ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_quantized_model_equals_one_that_load_quantizes(
    name: str, method: Any, tmp_path: Path
) -> None:
    model = saved(name, tmp_path)
    ids = torch.randint(1, 128, (19,), generator=torch.Generator().manual_seed(1))
    plain = model(ids[None]).logits[0]
    expected = load(tmp_path, quantization=method).logits(ids.tolist())
    adapted = adapt(model, quantization=method)
    actual = model(ids[None]).logits[0]
    lost = (expected - plain).norm()
    # Both round weights to the same codes. What is left are sums in another order; where inputs are
    # rounded too, one that lies at a boundary may go either way, which costs a part of the loss.
    assert lost > 0
    assert (actual - expected).norm() <= 0.1 * lost
    with pytest.raises(ConfigError, match="plain ones are gone"):
        adapted.restore()
    with pytest.raises(ConfigError, match="was given up when it was quantized"):
        model.model.layers[0].mlp.up_proj.weight.double()
    assert model.model.layers[0].mlp.up_proj.weight.shape == (96, 64)


@pytest.mark.landing(2)
@torch.no_grad()
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_projections_of_one_input_are_merged(name: str, method: Any, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    ids = torch.randint(1, 128, (2, 19), generator=torch.Generator().manual_seed(1))
    plain = model(ids).logits
    apart = saved(name, tmp_path)
    handle = adapt(model, quantization=method)
    places = {place.name: place for place in handle.places}
    for block in ("model.layers.0", "model.layers.1"):
        assert places[f"{block}.self_attn.q_proj"].reason == "one product with k_proj, v_proj"
        assert places[f"{block}.mlp"].is_bound
    for module in apart.modules():
        if hasattr(module, "q_proj") or hasattr(module, "gate_proj"):
            # An instance with a forward of its own is bound projection by projection.
            module.forward = partial(type(module).forward, module)
    handle = adapt(apart, quantization=method)
    assert not any("one product" in place.reason for place in handle.places)
    actual, expected = model(ids).logits, apart(ids).logits
    # The same codes: another order of sums is small compared with the quantization error.
    assert (actual - expected).norm() <= 0.1 * (expected - plain).norm()
    with pytest.raises(ConfigError, match="was given up when it was quantized"):
        model.model.layers[0].self_attn.k_proj.weight.double()
    x = torch.randn(3, 64)
    for label in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        merged_part, separate_part = (
            each.model.layers[0].get_submodule(label) for each in (model, apart)
        )
        states = x if merged_part.in_features == 64 else torch.randn(3, merged_part.in_features)
        assert torch.allclose(merged_part(states), separate_part(states), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_a_plain_projection_prevents_merging(tmp_path: Path) -> None:
    separate = [f"model.layers.0.{part}" for part in ("self_attn.k_proj", "mlp.up_proj")]
    model = saved("llama", tmp_path)
    adapted = adapt(
        model, quantization={"quant_method": "int8", "modules_to_not_convert": separate}
    )
    places = {place.name: place for place in adapted.places}
    assert all(place.is_bound for place in places.values())
    assert {place.name for place in places.values() if "one product" in place.reason} == {
        f"model.layers.1.self_attn.{part}_proj" for part in "qkv"
    }
    assert model.model.layers[0].self_attn.k_proj.weight.double().norm() > 0
    assert torch.isfinite(model(torch.arange(9)[None]).logits).all()


@torch.no_grad()
def test_quantization_blocks_across_projections_prevent_merging() -> None:
    model = built(CONFIGS["llama"]())
    adapted = adapt(model, quantization={"quant_method": "fp8", "strategy": "block"})
    assert all(place.is_bound for place in adapted.places)
    assert not any("one product" in place.reason for place in adapted.places)
    assert torch.isfinite(model(torch.arange(9)[None]).logits).all()


def test_an_unknown_method_is_named() -> None:
    model = built(CONFIGS["llama"]())
    with pytest.raises(UnknownNameError, match="int8"):
        adapt(model, quantization="int9")
    assert not hasattr(model, "_interposer_adapted")
