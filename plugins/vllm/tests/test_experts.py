"""Experts that vLLM loaded are computed as they are defined, in every form that it loads.

A layer stands for vLLM's here, with its names and shapes of parameters.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interposer import Config
from interposer.errors import ConfigError
from interposer_ops.experts import fused_experts
from interposer_vllm._experts import ExpertsAdoption
from interposer_vllm._session import Session

pytestmark = pytest.mark.process

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 64, 32, 4, 2, 5
PREFIX = "model.layers.0.mlp.experts"
GROUP = 32


class Routed(nn.Module):
    """Has what is read of a ``RoutedExperts`` of vLLM."""

    def __init__(self, held: dict[str, Tensor], biased: bool = False) -> None:
        super().__init__()
        self.layer_name, self.params_dtype, self.quant_config = PREFIX, torch.float32, None
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name = "gate_proj", "up_proj"
        self.ckpt_down_proj_name = "down_proj"
        self.swiglu_limit, self.apply_router_weight_on_input = None, False
        self._loaded_expert_biases: set[str] = set()
        parallel = SimpleNamespace(
            dp_size=1, pcp_size=1, is_sequence_parallel=False, enable_eplb=False
        )
        self.moe_config = SimpleNamespace(
            hidden_dim=HIDDEN,
            hidden_dim_unpadded=HIDDEN,
            intermediate_size_per_partition=INNER,
            intermediate_size_per_partition_unpadded=INNER,
            num_local_experts=EXPERTS,
            experts_per_token=TOP_K,
            activation=SimpleNamespace(value="silu"),
            has_bias=biased,
            is_lora_enabled=False,
            moe_parallel_config=parallel,
        )
        self.load(held)

    def load(self, held: dict[str, Tensor]) -> None:
        for name, tensor in held.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrices(seed: int = 0) -> dict[str, Tensor]:
    return {
        "w13_weight": numbers(EXPERTS, 2 * INNER, HIDDEN, seed=seed) / 8,
        "w2_weight": numbers(EXPERTS, HIDDEN, INNER, seed=seed + 1) / 6,
    }


def routing() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    return numbers(TOKENS, HIDDEN, seed=7), numbers(TOKENS, TOP_K, seed=8).softmax(-1), ids.int()


def expected(first: Tensor, second: Tensor, ids: Tensor | None = None) -> Tensor:
    x, weights, chosen = routing()
    definition = fused_experts.reference
    return definition(x, first, None, second, None, weights, chosen if ids is None else ids, "silu")


@pytest.fixture
def session(no_policy: None) -> Session:
    return Session("cpu", Config())


def test_unquantized_experts_are_stored_once_and_agree_with_the_reference(session: Session) -> None:
    layer, held = Routed(matrices()), matrices()
    adoption = ExpertsAdoption(session, layer)
    adoption.finalize(layer)
    actual = adoption(*routing(), None)
    torch.testing.assert_close(actual, expected(held["w13_weight"], held["w2_weight"]))
    assert all(not held.numel() for held in layer.parameters())
    assert {held.dtype for held in layer.parameters()} == {torch.float32}


def test_a_kernel_that_reads_stored_weights_keeps_their_memory(no_policy: None) -> None:
    session = Session("cpu", Config(kernels={"fused_experts": "reference"}))
    layer = Routed(matrices())
    adoption = ExpertsAdoption(session, layer)
    adoption.finalize(layer)
    assert layer.get_parameter("w13_weight").shape == (EXPERTS, 2 * INNER, HIDDEN)


def test_reloaded_weights_are_prepared_again(session: Session) -> None:
    layer = Routed(matrices())
    adoption = ExpertsAdoption(session, layer)
    adoption.finalize(layer)
    compiled = torch.compile(
        lambda x, weights, ids: adoption(x, weights, ids, None), fullgraph=True, backend="eager"
    )
    x, *chosen = routing()
    torch.library.opcheck(torch.ops.interposer_vllm.mix.default, (x, adoption.slot, *chosen))
    before = compiled(*routing())
    layer.load(matrices(seed=3))
    adoption.finalize(layer)
    weights_by_name = matrices(seed=3)
    for found in (adoption(*routing(), None), compiled(*routing())):
        torch.testing.assert_close(
            found, expected(weights_by_name["w13_weight"], weights_by_name["w2_weight"])
        )
    assert not torch.equal(before, compiled(*routing()))


def test_experts_of_other_workers_contribute_nothing(session: Session) -> None:
    layer, held = Routed(matrices()), matrices()
    adoption = ExpertsAdoption(session, layer)
    adoption.finalize(layer)
    # Of eight experts this worker holds those with even numbers.
    own_ids = torch.tensor([0, -1, 1, -1, 2, -1, 3, -1], dtype=torch.int32)
    x, weights, ids = routing()
    everywhere = ids * 2 + (ids > 1).int()
    actual = adoption(x, weights, everywhere, own_ids)
    here = torch.where(ids > 1, -1, ids)
    torch.testing.assert_close(actual, expected(held["w13_weight"], held["w2_weight"], here))


def test_biases_missing_in_the_checkpoint_are_ignored(session: Session) -> None:
    zeros = {"w13_bias": torch.zeros(EXPERTS, 2 * INNER), "w2_bias": torch.zeros(EXPERTS, HIDDEN)}
    layer = Routed(matrices() | zeros)
    ExpertsAdoption(session, layer).finalize(layer)
    loaded = Routed(matrices() | zeros)
    loaded._loaded_expert_biases.add("w13_bias")
    with pytest.raises(ConfigError, match="also stores bias"):
        ExpertsAdoption(session, loaded).finalize(loaded)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"w13_weight": torch.zeros(EXPERTS, INNER, HIDDEN)}, r"weight as \[4, 32, 64\]"),
        ({"w2_weight": torch.zeros(EXPERTS, HIDDEN, INNER, dtype=torch.int8)}, "torch.int8"),
        ({"w13_weight_scale": torch.ones(EXPERTS, 2 * INNER, 1)}, "also stores .*weight_scale"),
        ({"order": torch.ones(EXPERTS)}, "also stores order"),
    ],
    ids=["shape", "dtype", "name", "side"],
)
def test_another_layout_is_refused_and_left_unchanged(
    session: Session, changed: dict[str, Tensor], reason: str
) -> None:
    layer = Routed(matrices() | changed)
    with pytest.raises(ConfigError, match=reason):
        ExpertsAdoption(session, layer).finalize(layer)
    assert all(parameter.numel() for parameter in layer.parameters())


# Checkpoints whose experts are quantized, as vLLM's own methods create their parameters.


def compressed(form: str, weights: dict[str, Any], inputs: object = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def codes_of(seed: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Return codes ``[E, outputs, inputs]`` of 4 bits, and scales of groups."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (EXPERTS, outputs, inputs), generator=generator)
    scales = torch.rand(EXPERTS, outputs, inputs // GROUP, generator=generator) / 32 + 0.01
    return codes, scales


def words(codes: Tensor, dim: int) -> Tensor:
    """Pack eight codes along ``dim`` into a word, the first in its lowest bits."""
    apart = codes.unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    packed = (apart << 4 * torch.arange(8)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def dense(codes: Tensor, scales: Tensor) -> Tensor:
    return (codes - 8) * scales.repeat_interleave(GROUP, 2)


def packed_form() -> tuple[dict[str, Any], dict[str, Tensor], Tensor, Tensor]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    settings = compressed("pack-quantized", {**weights, "symmetric": True})
    first, second = codes_of(0, 2 * INNER, HIDDEN), codes_of(1, HIDDEN, INNER)
    weights_by_name = {
        "w13_weight_packed": words(first[0], 2),
        "w13_weight_scale": first[1],
        "w13_weight_shape": torch.empty(EXPERTS, 2),
        "w2_weight_packed": words(second[0], 2),
        "w2_weight_scale": second[1],
        "w2_weight_shape": torch.empty(EXPERTS, 2),
    }
    return settings, weights_by_name, dense(*first), dense(*second)


def gptq_form() -> tuple[dict[str, Any], dict[str, Tensor], Tensor, Tensor]:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
    first, second = codes_of(2, 2 * INNER, HIDDEN), codes_of(3, HIDDEN, INNER)
    held: dict[str, Tensor] = {}
    for side, (codes, scales) in (("w13", first), ("w2", second)):
        held |= {
            f"{side}_qweight": words(codes.transpose(1, 2), 1),
            f"{side}_scales": scales.transpose(1, 2).contiguous(),
            f"{side}_qzeros": torch.full(
                (EXPERTS, scales.shape[2], codes.shape[1] // 8), 0x77777777, dtype=torch.int32
            ),
            # Zeros, in case a checkpoint has some.
            f"{side}_bias": torch.zeros(EXPERTS, codes.shape[1]),
        }
    return {**settings, "sym": True}, held, dense(*first), dense(*second)


def awq_form() -> tuple[dict[str, Any], dict[str, Tensor], Tensor, Tensor]:
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    held: dict[str, Tensor] = {}
    both = []
    for side, shape in (("w13", (2 * INNER, HIDDEN)), ("w2", (HIDDEN, INNER))):
        codes, scales = codes_of(len(held), *shape)
        zeros = torch.randint(0, 16, scales.shape, generator=torch.Generator().manual_seed(5))
        in_order = [
            packed.transpose(1, 2).unflatten(2, (-1, 8))[..., order].flatten(2)
            for packed in (codes, zeros)
        ]
        held |= {
            f"{side}_qweight": words(in_order[0], 2),
            f"{side}_qzeros": words(in_order[1], 2),
            f"{side}_scales": scales.transpose(1, 2).contiguous(),
        }
        middle = codes - zeros.repeat_interleave(GROUP, 2)
        both.append(middle * scales.repeat_interleave(GROUP, 2))
    return settings, held, both[0], both[1]


def int8_form() -> tuple[dict[str, Any], dict[str, Tensor], Tensor, Tensor]:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    inputs = {**weights, "strategy": "token", "dynamic": True}
    held: dict[str, Tensor] = {}
    for side, shape in (("w13", (EXPERTS, 2 * INNER, HIDDEN)), ("w2", (EXPERTS, HIDDEN, INNER))):
        generator = torch.Generator().manual_seed(len(held))
        codes = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
        scales = torch.rand(*shape[:2], 1, generator=generator) / 512 + 1e-4
        held |= {f"{side}_weight": codes, f"{side}_weight_scale": scales}
    both = (held[f"{side}_weight"] * held[f"{side}_weight_scale"] for side in ("w13", "w2"))
    return compressed("int-quantized", weights, inputs), held, *both  # type: ignore[return-value]


def fp8_form() -> tuple[dict[str, Any], dict[str, Tensor], Tensor, Tensor]:
    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [GROUP, GROUP],
    }
    held: dict[str, Tensor] = {}
    both = []
    for side, shape in (("w13", (EXPERTS, 2 * INNER, HIDDEN)), ("w2", (EXPERTS, HIDDEN, INNER))):
        weight = (numbers(*shape, seed=len(held)) * 32).to(torch.float8_e4m3fn)
        blocks = EXPERTS, shape[1] // GROUP, shape[2] // GROUP
        scales = numbers(*blocks, seed=len(held) + 1).abs() / 256 + 1e-3
        held |= {f"{side}_weight": weight, f"{side}_weight_scale_inv": scales}
        spread = scales.repeat_interleave(GROUP, 1).repeat_interleave(GROUP, 2)
        both.append(weight.float() * spread)
    return settings, held, both[0], both[1]


FORMS = {
    "W4A16": (packed_form, 1e-3),
    "GPTQ": (gptq_form, 1e-3),
    "AWQ": (awq_form, 1e-3),
    # Inputs of both projections are rounded to 255 steps.
    "int8": (int8_form, 3e-2),
    "fp8 in blocks": (fp8_form, 1e-3),
}


@pytest.mark.landing(1)
@pytest.mark.parametrize("form", FORMS)
def test_quantized_experts_agree_with_the_dequantized_checkpoint(
    session: Session, form: str
) -> None:
    stored, error = FORMS[form]
    settings, weights_by_name, first, second = stored()
    session.scheme(settings)
    layer = Routed(weights_by_name)
    adoption = ExpertsAdoption(session, layer)
    adoption.finalize(layer)
    found, wanted = adoption(*routing(), None), expected(first, second)
    assert float((found - wanted).norm() / wanted.norm()) < error
    assert all(not parameter.numel() for parameter in layer.parameters())


def test_quantized_experts_that_vllm_holds_unquantized_are_refused(session: Session) -> None:
    session.scheme(int8_form()[0])
    layer = Routed(matrices())
    with pytest.raises(ConfigError, match=r"vLLM holds weight as torch\.float32, not torch\.int8"):
        ExpertsAdoption(session, layer).finalize(layer)
