"""Adapted models together with other libraries that change transformers models."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from peft import LoraConfig, get_peft_model
from tests.adapted_models import close, llama
from torch import nn

from interposer.errors import ConfigError
from interposer_adapt import adapt

# peft reads an attribute that transformers is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.arange(1, 13).view(2, 6)


def with_lora(model: Any) -> Any:
    torch.manual_seed(1)
    targets = ["q_proj", "gate_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return get_peft_model(model, config).eval()


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
def test_accelerate_hooks_wrap_bound_modules() -> None:
    model = llama()
    expected = model(IDS).logits
    adapt(model)
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert close(model(IDS).logits, expected)


@torch.no_grad()
def test_offloaded_modules_are_skipped() -> None:
    model = llama()
    expected = model(IDS).logits
    cpu_offload(model, execution_device=torch.device("cpu"))
    adapted = adapt(model)
    assert not any(place.is_bound for place in adapted.places)
    assert {place.reason for place in adapted.places} == {
        "its weight has no memory: it is on the meta device"
    }
    assert close(model(IDS).logits, expected)


@torch.no_grad()
def test_modules_with_accelerate_hooks_are_bound_inside_the_wrapper() -> None:
    model = llama()
    expected = model(IDS).logits
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    adapted = adapt(model)
    assert all(place.is_bound for place in adapted.places if place.kind == "Linear")
    assert close(model(IDS).logits, expected)
    remove_hook_from_submodules(model)
    assert close(model(IDS).logits, expected)


@torch.no_grad()
def test_accelerate_hooks_are_restored() -> None:
    model = llama()
    expected = model(IDS).logits
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    adapt(model).restore()
    assert torch.equal(model(IDS).logits, expected)
    remove_hook_from_submodules(model)
    assert torch.equal(model(IDS).logits, expected)
    # accelerate leaves the forward of the class on the instance.
    assert next(p for p in adapt(model).places if p.name == "lm_head").is_bound


class Around:
    """Forwards for an instance: each calls the one of the class in another way."""

    def __init__(self, inner: nn.Module) -> None:
        forward: Any = inner.forward

        def doubled(x: torch.Tensor) -> torch.Tensor:
            return 2 * cast("torch.Tensor", forward(x))

        def exchanged(x: torch.Tensor) -> torch.Tensor:
            before = inner._parameters["weight"]
            inner._parameters["weight"] = nn.Parameter(3 * before.detach())  # type: ignore[union-attr]
            try:
                return cast("torch.Tensor", forward(x))
            finally:
                inner._parameters["weight"] = before

        self.doubled, self.exchanged = doubled, exchanged


@torch.no_grad()
@pytest.mark.parametrize("kind", ["doubled", "exchanged"])
def test_a_kernel_is_bound_inside_a_wrapped_forward(kind: str) -> None:
    torch.manual_seed(0)
    inner = nn.Linear(16, 24).eval()
    outer = getattr(Around(inner), kind)
    inner.forward = outer  # type: ignore[method-assign]
    x = torch.randn(5, 16)
    expected = inner(x)
    model = nn.Sequential(inner).eval()
    adapted = adapt(model)
    assert adapted.places[0].is_bound
    assert close(model(x), expected)
    assert adapted.restore()[0].forward is outer
    assert torch.equal(inner(x), expected)


@torch.no_grad()
def test_a_copy_computes_the_same() -> None:
    model = llama()
    adapt(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(IDS).logits, model(IDS).logits)
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in twin.state_dict().items())


@torch.no_grad()
def test_writes_to_a_restored_weight_reach_no_other_reader() -> None:
    model = llama()
    adapt(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    first = weight.data
    copy = first.clone()
    first.zero_()
    assert torch.equal(weight.data, copy)
