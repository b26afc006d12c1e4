"""Single modules of an adapted model: bound or skipped with a reason, and restored."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from interposer import Config, explain
from interposer.errors import ConfigError
from interposer_adapt import adapt

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def tiny(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, **changes)
    return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


def states_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[name], tensor) for name, tensor in expected.items()
    )


@pytest.mark.landing(1)
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_restored_model_equals_the_original_bit_for_bit(dtype: torch.dtype, tied: bool) -> None:
    model = tiny(dtype, tie_word_embeddings=tied)
    parameters = dict(model.named_parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shapes = [parameter.shape for parameter in model.parameters()]
    dictionaries = {name: set(vars(module)) for name, module in model.named_modules()}
    ids = torch.arange(20).view(2, 10)
    expected = model(ids).logits

    adapted = adapt(model)
    assert re.fullmatch(
        r"<Adapted LlamaForCausalLM: \d+ of \d+ modules bound, cpu \(cpu: .+\)>", repr(adapted)
    )
    assert type(model) is LlamaForCausalLM
    assert type(model.lm_head) is nn.Linear
    assert states_equal(model.state_dict(), before)
    assert [p.shape for p in model.parameters()] == shapes
    assert model.dtype is dtype

    assert adapted.restore() is model
    assert repr(adapted) == "<Adapted LlamaForCausalLM: restored>"
    with pytest.raises(ConfigError, match=r"was restored .* Try: adapt\(model\)"):
        explain(adapted)
    assert torch.equal(model(ids).logits, expected)
    assert states_equal(model.state_dict(), before)
    assert all(parameters[name] is held for name, held in model.named_parameters())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == dictionaries


def test_plain_weights_are_freed() -> None:
    model = tiny(torch.bfloat16)
    plain = model.model.layers[0].mlp.up_proj.weight
    adapt(model)
    assert plain.numel() == 0
    # Reading values restores the weight; reading the shape does not.
    weight = model.model.layers[0].mlp.up_proj.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == ((80, 48), torch.bfloat16, "cpu")
    assert torch.equal(weight.float(), weight.data.float())


def test_slices_of_a_packed_weight_are_read_in_inference_mode() -> None:
    model = tiny(torch.bfloat16)
    expected = model.lm_head.weight.detach().clone()
    adapt(model)
    with torch.inference_mode():
        assert torch.equal(model.lm_head.weight[3, :], expected[3, :])
        assert torch.equal(model.lm_head.weight.T, expected.T)


@pytest.mark.parametrize("kernel", ["chosen", "reference"])
def test_no_weight_of_a_block_is_in_memory_twice(kernel: str) -> None:
    model = tiny(torch.bfloat16)
    layer = model.model.layers[0]
    parts = [layer.get_submodule(f"mlp.{label}_proj") for label in ("gate", "up")]
    plain = [part.weight for part in parts]
    before = [weight.detach().clone() for weight in plain]
    adapted = adapt(model, Config(kernels={"linear": "reference"} if kernel == "reference" else {}))
    assert [weight.numel() for weight in plain] == [0, 0]
    assert all(torch.equal(p.weight.data, held) for p, held in zip(parts, before, strict=True))
    adapted.restore()
    assert all(torch.equal(weight, held) for weight, held in zip(plain, before, strict=True))


def test_a_saved_model_has_the_same_files(tmp_path: Path) -> None:
    model = tiny(torch.bfloat16, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "before")
    adapt(model)
    model.save_pretrained(tmp_path / "after")
    names = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert sorted(path.name for path in (tmp_path / "after").iterdir()) == names
    for name in names:
        saved = (tmp_path / "after" / name).read_bytes()
        assert saved == (tmp_path / "before" / name).read_bytes(), name


def test_explain_has_a_choice_or_a_reason_for_every_module() -> None:
    model = tiny()
    adapted = adapt(model)
    results = {place.name: place for place in adapted.places}
    owners = [name for name, module in model.named_modules() if module._parameters]
    assert set(owners) <= results.keys()
    assert all(results[name].is_bound for name in owners)
    explanation = explain(adapted)
    assert "kernel 'rms_norm' [float32" in str(explanation)
    (down,) = (row for row in explanation.rows if row.choice.request.dims.get("in_features") == 80)
    assert down.prefixes == ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")


def test_a_pinned_kernel_is_selected() -> None:
    adapted = adapt(tiny(), Config(kernels={"linear": "reference"}))
    kinds = {p.kernel for p in adapted.places if p.kind == "Linear"}
    assert kinds == {"interposer-ops/reference"}


class Doubled(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Wrapped(torch.Tensor):
    """A tensor of another kind."""


def replaced(module: nn.Module) -> None:
    weight: Any = module.weight
    module.forward = lambda x: nn.functional.linear(x, 2 * weight)


def subclassed(module: nn.Module) -> None:
    weight = torch.Tensor._make_subclass(Wrapped, torch.randn(8, 8))
    module._parameters["weight"] = weight  # type: ignore[assignment]


LEFT: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "training": (lambda module: module.train(), "training mode"),
    "meta": (lambda module: module.to_empty(device="meta"), "no memory"),
    "dtype": (lambda module: module.double(), "float64"),
    "forward of its own": (replaced, "replaced already"),
    "subclass of tensors": (subclassed, "Wrapped, not a plain tensor"),
    "weight_norm": (lambda module: nn.utils.parametrizations.weight_norm(module), "no known op"),
}


@pytest.mark.parametrize("change", LEFT)
def test_a_module_is_skipped_with_a_reason_and_others_are_bound(change: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Doubled(8, 8)).eval()
    make, reason = LEFT[change]
    make(model[1])
    places = {place.name: place for place in adapt(model).places}
    assert places["0"].is_bound
    assert not places["2"].is_bound
    skipped = places.get("1", places.get("1.parametrizations.weight"))
    if change == "weight_norm":
        assert "1" not in places or not places["1"].is_bound
        return
    assert skipped is not None
    assert not skipped.is_bound
    assert reason in skipped.reason


@torch.no_grad()
@settings(max_examples=10, deadline=None)
@given(
    rows=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    transposed=st.booleans(),
)
def test_a_projection_of_any_size_computes_the_same(
    rows: list[int], inputs: int, outputs: int, biased: bool, dtype: torch.dtype, transposed: bool
) -> None:
    if transposed:
        rows = [max(row, 1) for row in rows] or [1]
    module = Conv1D(outputs, inputs) if transposed else nn.Linear(inputs, outputs, bias=biased)
    model = nn.Sequential(module).to(dtype).eval()
    x = torch.randn(*rows, inputs).to(dtype)
    exact = copy.deepcopy(model).double()(x.double())
    size = float(x.abs().max()) if x.numel() else 0.0
    weight = dict(module.named_parameters())["weight"].detach().clone()
    magnitude = inputs * size * float(weight.abs().max()) + 1
    adapted = adapt(model)
    assert adapted.places[0].is_bound, adapted.places
    actual = model(x)
    assert (actual.dtype, actual.shape) == (dtype, exact.shape)
    roundoff = torch.finfo(dtype).eps / 2
    sums = (inputs + 1) * torch.finfo(torch.float32).eps * magnitude
    assert ((actual - exact).abs() <= 2 * roundoff * (exact.abs() + 1) + sums).all()
    assert torch.equal(dict(module.named_parameters())["weight"].data, weight)


@torch.no_grad()
def test_unsupported_calls_run_the_original() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    plain = copy.deepcopy(model)
    adapt(model)
    x = torch.randn(3, 8)
    with pytest.raises(RuntimeError, match="dtype"):
        model(x.double())
    assert torch.equal(model[0](input=x), plain[0](input=x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model[0](x.bfloat16()).dtype is torch.bfloat16
    with torch.enable_grad():
        differentiable = torch.randn(3, 8, requires_grad=True)
        actual, expected = (
            torch.autograd.grad(module(differentiable).square().sum(), differentiable)[0]
            for module in (model, plain)
        )
    assert torch.allclose(actual, expected, atol=1e-5)


def test_ids_out_of_range_raise_as_in_torch() -> None:
    model = tiny(tie_word_embeddings=True)
    adapt(model)
    for wrong in (-1, 96):
        with pytest.raises(IndexError):
            model(torch.tensor([[1, wrong]]))


def test_hooks_of_bound_modules_are_called() -> None:
    model = tiny()
    events: list[str] = []
    layer = model.model.layers[0].self_attn.q_proj
    layer.register_forward_pre_hook(lambda module, args: events.append("before"))
    adapt(model)
    layer.register_forward_hook(
        lambda module, args, output: events.append(f"after {tuple(module.weight.float().shape)}")
    )
    model(torch.tensor([[1, 2]]))
    assert events == ["before", "after (48, 48)"]


def test_training_conversion_and_writes_to_packed_weights_raise() -> None:
    model = tiny()
    adapt(model)
    with pytest.raises(ConfigError, match="cannot be trained"):
        model.train()
    with pytest.raises(ConfigError, match=r"cannot become torch\.bfloat16"):
        model.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="is packed for the kernel"):
        model.lm_head.weight.zero_()
    model.to("cpu")
    model.eval()
    with pytest.raises(ConfigError, match="adapted already"):
        adapt(model)


def test_only_a_module_in_evaluation_mode_is_adapted() -> None:
    with pytest.raises(ConfigError, match="training mode"):
        adapt(tiny().train())
    with pytest.raises(ConfigError, match=r"must be a torch\.nn\.Module"):
        adapt("model")  # type: ignore[type-var]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_with_a_bias_shares_the_table(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = BertForMaskedLM._from_config(BertConfig(**SIZES), dtype=dtype).eval()
    nn.init.normal_(model.cls.predictions.bias)
    ids = torch.arange(20).view(2, 10)
    expected = model(ids).logits
    adapted = adapt(model)
    places = {place.name: place for place in adapted.places}
    assert places["cls.predictions.decoder"].is_bound
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    actual = model(ids).logits
    assert (actual - expected).abs().max() <= 64 * torch.finfo(dtype).eps * expected.abs().max()


class ScaledTwice(nn.Module):
    """A norm of an unknown class that multiplies by the squared weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(size))
        self.epsilon = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.gain**2


class OwnNorm(ScaledTwice):
    """A regular norm of an unknown class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.gain * wide.to(x.dtype)


class OnePlus(ScaledTwice):
    """One as Gemma has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return ((1 + self.gain.float()) * wide).to(x.dtype)


class Centred(ScaledTwice):
    """Layer norm without a bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.gain, None, self.epsilon)


@pytest.mark.landing(6)
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "op"),
    [
        (OwnNorm, "rms_norm"),
        (OnePlus, "gemma_rms_norm"),
        (Centred, "layer_norm"),
        (ScaledTwice, ""),
    ],
)
def test_norms_are_recognized_by_results(
    kind: type[ScaledTwice], op: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(40)).to(dtype).eval()
    x = torch.randn(2, 5, 40).to(dtype)
    expected = model(x)
    adapted = adapt(model)
    (place,) = adapted.places
    assert place.is_bound == bool(op)
    requested_ops = {choice.request.name for choice, _ in adapted.resolver.choices.values()}
    assert op in requested_ops or not op
    assert (model(x) - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()


class Plain(nn.Module):
    """The usual MLP of an encoder."""

    def __init__(self, hidden: int, inner: int, activation: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, inner)
        self.activation = activation
        self.fc2 = nn.Linear(inner, hidden)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc2(self.activation(self.fc1(states)))
        return result


class BrokenGELU(nn.GELU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).clamp(max=20.0)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("activation", "op"),
    [
        ("gelu", "gelu"),
        ("gelu_new", "gelu"),
        ("gelu_pytorch_tanh", "gelu"),
        ("quick_gelu", "quick_gelu"),
        ("gelu_10", ""),
        ("silu", ""),
        (BrokenGELU(), ""),
    ],
    ids=str,
)
def test_activations_are_recognized_by_results(
    activation: str | nn.Module, op: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = ACT2FN[activation] if isinstance(activation, str) else activation
    model = nn.Sequential(Plain(40, 56, module)).to(dtype).eval()
    x = 3 * torch.randn(2, 5, 40).to(dtype)
    exact = copy.deepcopy(model).double()(x.double())
    before = model(x)
    adapted = adapt(model)
    bound = {place.name for place in adapted.places if place.is_bound}
    assert ("0.activation" in bound) == bool(op)
    requested_ops = {choice.request.name for choice, _ in adapted.resolver.choices.values()}
    assert op in requested_ops or not op
    # The hidden vectors and the results are rounded, and sums of 56 terms add to it.
    assert (model(x) - exact).norm() / exact.norm() <= 3 * torch.finfo(dtype).eps
    adapted.restore()
    assert torch.equal(model(x), before)


class Gated(nn.Module):
    """The usual MLP of a decoder, under names of its own."""

    def __init__(self, hidden: int, inner: int, act: nn.Module, biased: bool) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=biased)
        self.w3 = nn.Linear(hidden, inner, bias=biased)
        self.w2 = nn.Linear(inner, hidden, bias=biased)
        self.act = act

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.w2(self.w3(states) * self.act(self.w1(states)))
        return result


class Added(Gated):
    """One that adds where the others multiply."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.w2(self.w3(states) + self.act(self.w1(states)))
        return result


@pytest.mark.landing(7)
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.Tanh()], ids=str)
@pytest.mark.parametrize("kind", [Gated, Added])
@pytest.mark.parametrize("biased", [False, True])
def test_gated_mlps_are_recognized_by_a_trace(
    kind: type[Gated], act: nn.Module, dtype: torch.dtype, biased: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(32, 48, copy.deepcopy(act), biased)).to(dtype).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(2, 3, 32).to(dtype)
    exact = copy.deepcopy(model).double()(x.double())
    adapted = adapt(model)
    places = {place.name: place.is_bound for place in adapted.places}
    names = ["0.w1", "0.w2", "0.w3"]
    if kind is Gated and not isinstance(act, nn.Tanh):
        names.append("0")
    elif isinstance(act, nn.GELU):
        names.append("0.act")
    assert places == dict.fromkeys(names, True)
    # Five results on the way are rounded, each by half an epsilon; sums of 48 terms add to it.
    error = (model(x) - exact).norm() / exact.norm()
    assert error <= 5 * torch.finfo(dtype).eps
    assert states_equal(model.state_dict(), before)
    adapted.restore()
    assert states_equal(model.state_dict(), before)


@torch.no_grad()
def test_children_of_a_bound_mlp_can_be_replaced_and_watched() -> None:
    torch.manual_seed(0)
    model = Gated(32, 48, nn.SiLU(), False).eval()
    x = torch.randn(3, 32)
    gate = model.w1(x)
    adapt(model)
    assert (model.w1(x) - gate).abs().max() <= 1e-5
    shapes: list[tuple[int, ...]] = []
    handle = model.w1.register_forward_hook(
        lambda module, args, out: shapes.append(tuple(out.shape))
    )
    expected = model(x)
    assert shapes == [(3, 48)]
    handle.remove()
    model.w1 = nn.Linear(32, 48, bias=False)
    assert (model(x) - expected).abs().max() > 1e-3
