"""MoE experts of transformers models: a module that holds the matrices of all experts.

Dimensions: T tokens, H hidden size, E experts, I intermediate size, K chosen experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interposer import ExpertsSpec, Tolerance, Verdict
from interposer_adapt._adaptation import Adaptation, kernel_name
from interposer_adapt._agreement import check_agreement, random_normals
from interposer_adapt._forwards import Forward, class_forward, is_wrapped
from interposer_adapt._packed_weight import PackedWeight, Restore, unpacked_forward
from interposer_adapt._projections import release_weight, set_weights
from interposer_adapt._shards import is_sharded, local_parameters, local_part
from interposer_ops.experts import fused_experts
from interposer_ops.layers.moe.experts import Experts, PlainExperts, gates_first

_LAYOUT_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
_MATRICES = ("gate_up_proj", "down_proj")
_ACTIVATIONS = ("silu", "gelu", "swiglu_oai")
_TOKENS = 3
_NUM_PROBE_EXPERTS = 2
# A module rounds two projections, the activation, its multiplication, the weighting and the sum.
_TOLERANCE = Tolerance(roundings=6)
_RELATIVE_TOLERANCE = 2e-5


class Form(NamedTuple):
    """The layout of the expert matrices in a module, as attributes of transformers' classes state.

    Attributes:
        alternating: gate and up columns alternate, instead of gate first.
    """

    biased: bool
    transposed: bool
    alternating: bool

    def ordered(self, name: str, stored: Tensor) -> Tensor:
        """Return the module's stored matrices in the layout of ``fused_experts``."""
        dense = stored.transpose(1, 2) if self.transposed else stored
        return gates_first(dense) if self.alternating and name == _MATRICES[0] else dense

    def write(self, name: str, ordered: Tensor, into: Tensor) -> None:
        """Write matrices in the layout of ``fused_experts`` to ``into``, in the stored layout."""
        dense = into.transpose(1, 2) if self.transposed else into
        if self.alternating and name == _MATRICES[0]:
            inner = ordered.shape[1] // 2
            dense[:, ::2], dense[:, 1::2] = ordered[:, :inner], ordered[:, inner:]
        else:
            dense.copy_(ordered)


def looks_like_experts(module: nn.Module) -> bool:
    """Return True if a module has the attributes and 3D matrices that MoE experts have."""
    has_attributes = all(hasattr(module, name) for name in _LAYOUT_ATTRIBUTES)
    return has_attributes and getattr(module._parameters.get("down_proj"), "ndim", 0) == 3


def bind_experts(adaptation: Adaptation, module: Any, name: str) -> str | Verdict:
    """Bind MoE experts to a kernel, if ``fused_experts`` supports their layout and activation."""
    verdict = adaptation.check_module(module, sharded=True)
    if not verdict:
        return verdict
    is_sharded_module = any(is_sharded(tensor) for tensor in module._parameters.values())
    if is_sharded_module and not is_wrapped(module):
        return Verdict.refuse(
            "its weights are shards, and no wrapper joins the results of all processes"
        )
    if not module.has_gate:
        return Verdict.refuse("its experts have no gate, those of 'fused_experts' do")
    if getattr(module, "has_post_expert_norm", False):
        return Verdict.refuse("its experts have norms of their own")
    form = Form(module.has_bias, module.is_transposed, not module.is_concatenated)
    stored = [module._parameters[matrix] for matrix in _MATRICES]
    parts = {
        key: local_part(tensor).detach()
        for key, tensor in module._parameters.items()
        if tensor is not None
    }
    count, hidden, inner = form.ordered("down_proj", parts["down_proj"]).shape
    with local_parameters(module):
        activation = _find_activation(module, form, hidden)
    if activation is None:
        return Verdict.refuse(f"its activation is none of {', '.join(_ACTIVATIONS)}")
    config = getattr(module, "config", None)
    spec = ExpertsSpec(
        hidden_size=hidden,
        intermediate_size=inner,
        num_experts=count,
        top_k=int(getattr(config, "num_experts_per_tok", None) or _NUM_PROBE_EXPERTS),
        activation=activation,
        biased=form.biased,
        alternating=form.alternating,
        inputs_first=form.transposed,
    )
    dtype = stored[0].dtype
    with torch.device("meta"):
        layer = Experts(adaptation.site(name, dtype), spec)
    set_weights(layer, **parts)
    forward = _forward(module, layer, dtype, adaptation.device)
    plain = isinstance(layer.method, PlainExperts)
    if plain:
        with local_parameters(module):
            verdict = _check_forward(module, forward, form, spec)
        if not verdict:
            return verdict
    shapes = [form.ordered(matrix, parts[matrix]).shape for matrix in _MATRICES]
    for matrix, weight in zip(_MATRICES, stored, strict=True):
        restore = _find_restore(layer, form, matrix, shapes) if plain else None
        if plain and restore is None:
            continue
        packed = PackedWeight(weight, restore, f"{name}.{matrix}")
        verdict = release_weight(adaptation, [(module, matrix)], weight, packed)
        if not verdict:
            return verdict
    adaptation.bind_forward(module, name, forward, guarded=not is_sharded_module)
    if isinstance(layer.method, PlainExperts):
        return kernel_name(layer.method.bound.choice)
    return f"{type(layer.method).__module__.partition('.')[0]}/{type(layer.method).__name__}"


def _forward(module: Any, layer: Experts, dtype: torch.dtype, device: torch.device) -> Forward:
    has_shards = any(is_sharded(tensor) for tensor in module._parameters.values())
    original = unpacked_forward(module) if has_shards else class_forward(module)
    count = layer.spec.num_experts
    kernel, operands, activation = layer.kernel, layer.operands, layer.spec.activation
    assert kernel is not None

    def forward(
        hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        x = hidden_states
        if args or kwargs or x.dtype is not dtype or x.device != device or x.requires_grad:
            return original(hidden_states, top_k_index, top_k_weights, *args, **kwargs)
        if module._is_expert_parallel:
            # transformers numbers experts of other ranks after the last one; the op expects -1.
            top_k_index = torch.where(top_k_index < count, top_k_index, -1)
        return kernel(x, *operands, top_k_weights.float(), top_k_index, activation)

    return forward


def _find_restore(
    layer: Experts, form: Form, name: str, shapes: list[torch.Size]
) -> Restore | None:
    """Return a function that restores one expert matrix; None if the kernel packs no weights."""
    assert isinstance(layer.method, PlainExperts)
    restore_all = layer.method.bound.restore
    if restore_all is None:
        return None
    prepared = dict(zip(fused_experts.constants, layer.operands, strict=True))

    def restore(into: Tensor) -> None:
        matrices = [into.new_empty(shape) for shape in shapes]
        restore_all(**prepared, into=dict(zip(("gate_up", "down"), matrices, strict=True)))
        form.write(name, matrices[_MATRICES.index(name)], into)

    return restore


def _find_activation(module: Any, form: Form, hidden: int) -> str | None:
    """Return the activation for which ``fused_experts`` agrees with the module's class, or None."""
    generator = torch.Generator().manual_seed(3)
    # A shallow copy with small random float64 weights: the class's forward runs on it as on the
    # original.
    probe = copy.copy(module)
    if hasattr(module, "config"):
        probe.config = copy.copy(module.config)
        # Other implementations may not support float64.
        probe.config._experts_implementation = "eager"
    probe.num_experts = _NUM_PROBE_EXPERTS
    probe._parameters = {
        name: nn.Parameter(
            torch.randn(_NUM_PROBE_EXPERTS, *tensor.shape[1:], generator=generator).double()
            / hidden**0.5,
            requires_grad=False,
        )
        for name, tensor in module._parameters.items()
        if tensor is not None
    }
    x, ids, weights = _random_routing(
        _NUM_PROBE_EXPERTS, _NUM_PROBE_EXPERTS, hidden, torch.float64, torch.device("cpu")
    )
    with torch.no_grad():
        expected = type(module).forward(probe, x, ids, weights.double())
        constants = [*_constants(probe, form)]
        reference: Any = fused_experts
        for activation in _ACTIVATIONS:
            actual = reference(x, *constants, weights, ids, activation)
            if (actual - expected).abs().max() <= _RELATIVE_TOLERANCE * expected.abs().max():
                return activation
    return None


def _constants(module: nn.Module, form: Form) -> Iterator[Tensor | None]:
    for name in _MATRICES:
        yield form.ordered(name, module._parameters[name].detach())  # type: ignore[union-attr]
        bias = module._parameters.get(f"{name}_bias")
        if bias is None:
            yield None
        else:
            alternates = form.alternating and name == _MATRICES[0]
            yield gates_first(bias.detach()) if alternates else bias.detach()


def _random_routing(
    count: int, top_k: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random tokens, with distinct experts and routing weights for each token."""
    generator = torch.Generator().manual_seed(4)
    x = random_normals((_TOKENS, hidden), dtype, device)
    scores = torch.rand(_TOKENS, count, generator=generator)
    weights, ids = scores.softmax(-1).topk(min(top_k, count))
    return x, ids.to(device), weights.to(device)


def _check_forward(
    module: Any, forward: Callable[..., Tensor], form: Form, spec: ExpertsSpec
) -> Verdict:
    """Refuse unless ``forward`` agrees with the forward of the module's class within rounding."""
    weight = module._parameters["down_proj"]
    dtype, device = weight.dtype, weight.device
    x, ids, weights = _random_routing(spec.num_experts, spec.top_k, spec.hidden_size, dtype, device)
    with torch.no_grad():
        expected = class_forward(module)(x, ids, weights.to(dtype))
        actual = forward(x, ids, weights.to(dtype))
    # Sum of magnitudes of each token's result: the bound for the error of its roundings.
    largest = 0.0
    gate_up, gate_up_bias, down, _ = _constants(module, form)
    assert gate_up is not None
    assert down is not None
    for token, expert_ids in enumerate(ids.tolist()):
        total = torch.zeros(spec.hidden_size, dtype=torch.float64, device=device)
        for position, expert in enumerate(expert_ids):
            projected = gate_up[expert].abs().double() @ x[token].abs().double()
            if gate_up_bias is not None:
                projected = projected + gate_up_bias[expert].abs().double()
            gate, up = projected.chunk(2)
            # swiglu_oai multiplies by up + 1; for other activations the bound is larger than
            # needed.
            activated = gate * (up + 1)
            total += float(weights[token, position]) * (down[expert].abs().double() @ activated)
        largest = max(largest, float(total.max()))
    reduction = spec.hidden_size + spec.intermediate_size
    return check_agreement(_TOLERANCE, expected, actual, reduction, largest, largest)
