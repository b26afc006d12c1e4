"""The method of a layer is replaced by one of its own kind; freed weights leave an empty tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from interposer_vllm._adoption import free_parameters
from interposer_vllm._methods import with_method


class Method:
    def __init__(self, backend: str) -> None:
        self.backend = backend

    def apply(self, x: int) -> int:
        return x

    def tie(self) -> str:
        return self.backend


class Doubling:
    vllm_method: Any

    def apply(self, x: int) -> int:
        return 2 * int(self.vllm_method.apply(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method: Any = Method("onednn")
        self.weight = nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(4, 1), requires_grad=False)
        self.bias = nn.Parameter(torch.ones(4), requires_grad=False)


def test_a_replaced_method_is_a_subclass_with_the_same_state() -> None:
    layer = Layer()
    own: Any = layer.quant_method
    with_method(layer, Doubling)
    replaced: Any = layer.quant_method
    assert isinstance(replaced, Method)
    assert type(replaced).__name__ == "Method"
    assert (replaced.apply(3), replaced.tie()) == (6, "onednn")
    assert vars(replaced)["vllm_method"] is own
    assert own.apply(3) == 3


def test_freed_weights_keep_their_device_and_dtype() -> None:
    layer = Layer()
    view = layer.scale.data.squeeze(1)
    free_parameters(layer, (torch.zeros(3), view, None, 7), keep=("bias",))
    assert layer.weight.shape == (0,)
    assert (layer.weight.dtype, layer.weight.device.type) == (torch.bfloat16, "cpu")
    assert layer.scale.shape == (4, 1)
    assert layer.bias.shape == (4,)
