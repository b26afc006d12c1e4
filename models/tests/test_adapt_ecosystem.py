"""Adapted models beside libraries that change models of transformers as well."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from interposer.errors import ConfigError
from interposer_models import adapt

# peft reads an attribute that transformers is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.arange(1, 13).view(2, 6)


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def with_lora(model: Any) -> Any:
    torch.manual_seed(1)
    targets = ["q_proj", "gate_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return get_peft_model(model, config).eval()


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Say whether float32 results of some twenty operations in a row agree."""
    return bool((found - expected).abs().max() <= 2e-5 * expected.abs().max())


@torch.no_grad()
def test_adapters_of_peft_work_on_an_adapted_model() -> None:
    expected = with_lora(llama())(IDS).logits
    model = llama()
    assert not close(model(IDS).logits, expected)
    adapt(model)
    tuned = with_lora(model)
    assert close(tuned(IDS).logits, expected)
    with pytest.raises(ConfigError, match="which is packed for the kernel"):
        tuned.merge_and_unload()


@torch.no_grad()
def test_a_model_with_adapters_of_peft_is_adapted() -> None:
    model = with_lora(llama())
    expected = model(IDS).logits
    tokens = model.generate(input_ids=IDS, max_new_tokens=6, do_sample=False)
    adapted = adapt(model)
    assert sum(place.is_bound for place in adapted.places) >= 28
    assert close(model(IDS).logits, expected)
    assert torch.equal(model.generate(input_ids=IDS, max_new_tokens=6, do_sample=False), tokens)
    adapted.restore()
    assert torch.equal(model(IDS).logits, expected)


@torch.no_grad()
def test_hooks_of_accelerate_go_around_bound_modules() -> None:
    model = llama()
    expected = model(IDS).logits
    adapt(model)
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert close(model(IDS).logits, expected)


@torch.no_grad()
def test_offloaded_modules_are_left() -> None:
    model = llama()
    expected = model(IDS).logits
    cpu_offload(model, execution_device=torch.device("cpu"))
    adapted = adapt(model)
    assert not any(place.is_bound for place in adapted.places)
    assert {place.reason for place in adapted.places} == {
        "the forward of this instance is replaced already"
    }
    assert close(model(IDS).logits, expected)


@torch.no_grad()
def test_torch_compile_sees_one_graph() -> None:
    model = llama()
    expected = model(IDS, use_cache=False).logits
    adapt(model)
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    assert close(compiled(IDS, use_cache=False).logits, expected)
    torch.compiler.reset()


@torch.no_grad()
def test_a_copy_computes_the_same() -> None:
    model = llama()
    adapt(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(IDS).logits, model(IDS).logits)
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in twin.state_dict().items())


@torch.no_grad()
def test_what_is_written_to_a_copy_of_the_numbers_is_nobody_elses() -> None:
    model = llama()
    adapt(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    first = weight.data
    kept = first.clone()
    first.zero_()
    assert torch.equal(weight.data, kept)
