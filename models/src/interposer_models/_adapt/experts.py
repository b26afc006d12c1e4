"""Experts of a foreign model: one module that holds the matrices of all of them.

Dimensions: T tokens, H hidden size, E experts, I intermediate size, K chosen experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interposer import ExpertsSpec, Tolerance, Verdict
from interposer_models._adapt.adaptation import Adaptation, kernel_name
from interposer_models._adapt.agreement import judge_agreement, normals
from interposer_models._adapt.forwards import Forward, own_forward
from interposer_models._adapt.inner_forward import is_wrapped
from interposer_models._adapt.packed_weight import PackedWeight, Restore
from interposer_models._adapt.projections import fill, give_up
from interposer_models._adapt.shards import is_sharded, local, local_parameters
from interposer_models._adapt.wrapped_forward import unpacked_forward
from interposer_ops.experts import fused_experts
from interposer_ops.layers.experts import Experts, PlainExperts, gates_first

_FACTS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
_MATRICES = ("gate_up_proj", "down_proj")
_ACTIVATIONS = ("silu", "gelu", "swiglu_oai")
_TOKENS = 3
_PROBED = 2
# A module rounds both projections, the activation, the product with it, the weighting and the sum.
_ROUNDED = Tolerance(roundings=6)
_CLOSE = 2e-5


class Form(NamedTuple):
    """The layout of matrices in a module, as the classes of transformers state it."""

    biased: bool
    transposed: bool
    alternating: bool

    def ordered(self, name: str, stored: Tensor) -> Tensor:
        """Return matrices as ``fused_experts`` takes them."""
        dense = stored.transpose(1, 2) if self.transposed else stored
        return gates_first(dense) if self.alternating and name == _MATRICES[0] else dense

    def write(self, name: str, ordered: Tensor, into: Tensor) -> None:
        """Write what ``ordered`` returned as it was stored."""
        dense = into.transpose(1, 2) if self.transposed else into
        if self.alternating and name == _MATRICES[0]:
            inner = ordered.shape[1] // 2
            dense[:, ::2], dense[:, 1::2] = ordered[:, :inner], ordered[:, inner:]
        else:
            dense.copy_(ordered)


def looks_like_experts(module: nn.Module) -> bool:
    """Say whether a module states the facts of experts, and has the matrices of some."""
    facts = all(hasattr(module, name) for name in _FACTS)
    return facts and getattr(module._parameters.get("down_proj"), "ndim", 0) == 3


def bind_experts(adaptation: Adaptation, module: Any, name: str) -> str | Verdict:
    """Bind experts whose activation is one that the op knows."""
    fit = adaptation.judge(module, sharded=True)
    if not fit:
        return fit
    sharded = any(is_sharded(held) for held in module._parameters.values())
    if sharded and not is_wrapped(module):
        return Verdict.refuse("its weights are parts, and nothing says how to join what it returns")
    if not module.has_gate:
        return Verdict.refuse("its experts have no gate, those of 'fused_experts' do")
    if getattr(module, "has_post_expert_norm", False):
        return Verdict.refuse("its experts have norms of their own")
    form = Form(module.has_bias, module.is_transposed, not module.is_concatenated)
    stored = [module._parameters[each] for each in _MATRICES]
    parts = {
        key: local(held).detach() for key, held in module._parameters.items() if held is not None
    }
    count, hidden, inner = form.ordered("down_proj", parts["down_proj"]).shape
    with local_parameters(module):
        found = _activation(module, form, hidden, inner)
    if found is None:
        return Verdict.refuse(f"its activation is none of {', '.join(_ACTIVATIONS)}")
    config = getattr(module, "config", None)
    spec = ExpertsSpec(
        hidden_size=hidden,
        intermediate_size=inner,
        num_experts=count,
        top_k=int(getattr(config, "num_experts_per_tok", None) or _PROBED),
        activation=found,
        biased=form.biased,
        alternating=form.alternating,
        inputs_first=form.transposed,
    )
    dtype = stored[0].dtype
    with torch.device("meta"):
        layer = Experts(adaptation.site(name, dtype), spec)
    fill(layer, **parts)
    forward = _forward(module, layer, dtype, adaptation.device)
    plain = isinstance(layer.method, PlainExperts)
    if plain:
        with local_parameters(module):
            verdict = _judge(module, forward, form, spec)
        if not verdict:
            return verdict
    shapes = [form.ordered(each, parts[each]).shape for each in _MATRICES]
    for each, weight in zip(_MATRICES, stored, strict=True):
        restore = _restore(layer, form, each, shapes) if plain else None
        if plain and restore is None:
            continue
        packed = PackedWeight(weight, restore, f"{name}.{each}")
        verdict = give_up(adaptation, [(module, each)], weight, packed)
        if not verdict:
            return verdict
    adaptation.bind_forward(module, name, forward, guarded=not sharded)
    if isinstance(layer.method, PlainExperts):
        return kernel_name(layer.method.bound.choice)
    return f"{type(layer.method).__module__.partition('.')[0]}/{type(layer.method).__name__}"


def _forward(module: Any, layer: Experts, dtype: torch.dtype, device: torch.device) -> Forward:
    sharded = any(is_sharded(held) for held in module._parameters.values())
    original = unpacked_forward(module) if sharded else own_forward(module)
    count = layer.spec.num_experts
    kernel, operands, activation = layer.kernel, layer.operands, layer.spec.activation
    assert kernel is not None

    def forward(
        hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *rest: Any, **named: Any
    ) -> Any:
        x = hidden_states
        if rest or named or x.dtype is not dtype or x.device != device or x.requires_grad:
            return original(hidden_states, top_k_index, top_k_weights, *rest, **named)
        if module._is_expert_parallel:
            # Those of other ranks are numbered behind the last; here -1 stands for them.
            top_k_index = torch.where(top_k_index < count, top_k_index, -1)
        return kernel(x, *operands, top_k_weights.float(), top_k_index, activation)

    return forward


def _restore(layer: Experts, form: Form, name: str, shapes: list[torch.Size]) -> Restore | None:
    """Return what gives a matrix back, None where the kernel holds it as it is."""
    assert isinstance(layer.method, PlainExperts)
    give_back = layer.method.bound.restore
    if give_back is None:
        return None
    prepared = dict(zip(fused_experts.constants, layer.operands, strict=True))

    def restore(into: Tensor) -> None:
        dense = [into.new_empty(shape) for shape in shapes]
        give_back(**prepared, into=dict(zip(("gate_up", "down"), dense, strict=True)))
        form.write(name, dense[_MATRICES.index(name)], into)

    return restore


def _activation(module: Any, form: Form, hidden: int, inner: int) -> str | None:
    """Return the activation with which the op computes what the module's class does."""
    generator = torch.Generator().manual_seed(3)
    probe = copy.copy(module)
    if hasattr(module, "config"):
        probe.config = copy.copy(module.config)
        probe.config._experts_implementation = "eager"
    probe.num_experts = _PROBED
    probe._parameters = {
        name: nn.Parameter(
            torch.randn(_PROBED, *held.shape[1:], generator=generator).double() / hidden**0.5,
            requires_grad=False,
        )
        for name, held in module._parameters.items()
        if held is not None
    }
    x, ids, weights = _routed(_PROBED, _PROBED, hidden, torch.float64, torch.device("cpu"))
    with torch.no_grad():
        expected = type(module).forward(probe, x, ids, weights.double())
        constants = [*_constants(probe, form)]
        reference: Any = fused_experts
        for activation in _ACTIVATIONS:
            found = reference(x, *constants, weights, ids, activation)
            if (found - expected).abs().max() <= _CLOSE * expected.abs().max():
                return activation
    return None


def _constants(module: nn.Module, form: Form) -> Iterator[Tensor | None]:
    for name in _MATRICES:
        yield form.ordered(name, module._parameters[name].detach())  # type: ignore[union-attr]
        bias = module._parameters.get(f"{name}_bias")
        if bias is None:
            yield None
        else:
            ordered = form.alternating and name == _MATRICES[0]
            yield gates_first(bias.detach()) if ordered else bias.detach()


def _routed(
    count: int, top_k: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, different experts for each, and weights."""
    generator = torch.Generator().manual_seed(4)
    x = normals((_TOKENS, hidden), dtype, device)
    scores = torch.rand(_TOKENS, count, generator=generator)
    weights, ids = scores.softmax(-1).topk(min(top_k, count))
    return x, ids.to(device), weights.to(device)


def _judge(module: Any, forward: Callable[..., Tensor], form: Form, spec: ExpertsSpec) -> Verdict:
    """Refuse unless ``forward`` computes what the module does, as far as rounding goes."""
    weight = module._parameters["down_proj"]
    dtype, device = weight.dtype, weight.device
    x, ids, weights = _routed(spec.num_experts, spec.top_k, spec.hidden_size, dtype, device)
    with torch.no_grad():
        expected = own_forward(module)(x, ids, weights.to(dtype))
        found = forward(x, ids, weights.to(dtype))
    # What is added up, without the signs: each of its parts is rounded by itself.
    largest = 0.0
    gate_up, gate_up_bias, down, _ = _constants(module, form)
    assert gate_up is not None
    assert down is not None
    for token, chosen in enumerate(ids.tolist()):
        total = torch.zeros(spec.hidden_size, dtype=torch.float64, device=device)
        for place, expert in enumerate(chosen):
            first = gate_up[expert].abs().double() @ x[token].abs().double()
            if gate_up_bias is not None:
                first = first + gate_up_bias[expert].abs().double()
            gate, up = first.chunk(2)
            inner = gate * (up + 1)
            total += float(weights[token, place]) * (down[expert].abs().double() @ inner)
        largest = max(largest, float(total.max()))
    reduction = spec.hidden_size + spec.intermediate_size
    return judge_agreement(_ROUNDED, expected, found, reduction, largest, largest)
