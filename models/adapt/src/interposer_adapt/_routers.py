"""MoE routers of transformers models: leaf modules that choose the experts of each token.

The routing function of a router is found by comparing its results with those of every routing that
an op supports.

Dimensions: T tokens, H hidden size, E experts, K chosen experts, G groups.
"""

from __future__ import annotations

import copy
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from interposer import CustomOp, Verdict
from interposer_adapt._adaptation import Adaptation, kernel_name
from interposer_adapt._agreement import check_agreement, random_normals
from interposer_adapt._forwards import Forward, class_forward
from interposer_adapt._packed_weight import PackedWeight, Restore
from interposer_adapt._projections import Call, find_restore, release_weight
from interposer_ops.experts import grouped_topk, topk_sigmoid, topk_softmax
from interposer_ops.linear import linear

_log = logging.getLogger("interposer")
# Routers compute in float32 for any input dtype.
_RELATIVE_TOLERANCE = 2e-5
_NUM_TRIAL_TOKENS = 48
_SEED = 5
# A correction changes no choice if scores are much larger, and decides every choice if scores are
# much smaller. All tokens of a probe share one correction, so that each size is drawn several times
# to cover rare cases, such as the best expert in a weak group.
_CORRECTIONS = (1.0, 0.1, 0.01) * 4
_OUTPUTS = 3
_MOST_EXPERTS = 4096

_NUM_CHECK_TOKENS = 16
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which an MoE router chooses experts from logits.

    Attributes:
        scoring: ``"softmax"`` or ``"sigmoid"``.
        correction: name of the tensor added to the scores for the choice; "" for none.
        num_groups, top_groups: 1 without groups.
        order: the positions of logits, weights and ids in the router's result.
        flattens: the router accepts tokens of any number of dimensions, and returns one row each.
    """

    num_experts: int
    top_k: int
    scoring: str
    renormalize: bool
    scale: float
    correction: str
    num_groups: int
    top_groups: int
    order: tuple[int, int, int]
    flattens: bool = False

    @property
    def op(self) -> CustomOp[..., tuple[Tensor, Tensor]]:
        """Return the op that chooses experts by this rule."""
        if self.num_groups > 1 or (self.correction and self.scoring == "softmax"):
            return grouped_topk
        return topk_sigmoid if self.scoring == "sigmoid" else topk_softmax

    def dims(self) -> dict[str, int | bool | str]:
        """Return the dimensions by which a kernel for the routing op is selected."""
        dims: dict[str, int | bool | str] = {
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "renormalize": self.renormalize,
        }
        if self.op is not topk_softmax:
            dims["biased"] = bool(self.correction)
        if self.op is grouped_topk:
            dims |= {
                "num_groups": self.num_groups,
                "top_groups": self.top_groups,
                "scoring": self.scoring,
            }
        return dims

    def choose(
        self, kernel: Callable[..., tuple[Tensor, Tensor]], logits: Tensor, bias: Any
    ) -> tuple[Tensor, Tensor]:
        """Choose experts by a kernel of ``op``: weights and ids, ``[T, K]``."""
        if self.op is grouped_topk:
            groups = self.num_groups, self.top_groups
            options = self.top_k, self.scoring, self.renormalize, self.scale
            return kernel(logits, bias, *groups, *options)
        if self.op is topk_sigmoid:
            return kernel(logits, bias, self.top_k, self.renormalize, self.scale)
        weights, ids = kernel(logits, self.top_k, self.renormalize)
        return (weights if self.scale == 1.0 else weights * self.scale), ids


def bind_router(adaptation: Adaptation, module: nn.Module, name: str) -> str | Verdict:
    """Bind an MoE router's projection and top-k choice to kernels.

    Logits are rounded as in the class, so that the same experts are chosen except for ties.

    Returns: the names of both kernels.
    """
    verdict = adaptation.check_module(module)
    if not verdict:
        return verdict
    routing = find_routing(module)
    if routing is None:
        return Verdict.refuse("no known op matches its class")
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    x = random_normals((_NUM_CHECK_TOKENS, weight.shape[1]), weight.dtype, weight.device)
    with torch.no_grad():
        expected = class_forward(module)(x)
    logits = expected[routing.order[0]]
    # Some classes compute logits in float32 from bfloat16 weights; others round them to bfloat16
    # first.
    dtype = _logits_dtype(logits, weight.dtype)
    site = adaptation.site(name, dtype)
    bound_kernel = site.bind_kernel(
        linear, in_features=weight.shape[1], out_features=weight.shape[0], biased=bias is not None
    )
    topk = site.bind_kernel(routing.op, **routing.dims())
    # The kernel computes in the logits' dtype, so that weights are converted once here.
    prepared = bound_kernel.prepared(
        weight=weight.detach().to(dtype), bias=None if bias is None else bias.detach().to(dtype)
    )
    operands = prepared["weight"], prepared["bias"]
    correction = _tensor(module, routing.correction)
    prepared_correction = topk.prepared(bias=correction)["bias"] if routing.correction else None

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        return routing.choose(topk.function, logits, prepared_correction)

    call: Call = bound_kernel.function, operands
    forward = _forward(module, routing, call, choose, (dtype, expected, adaptation.device))
    with torch.no_grad():
        choice = choose(logits.to(dtype))
        bounds = _logit_bounds(weight, bias, x)
        verdict = _check_choice(routing, expected, forward(x), choice, bounds, weight.dtype)
    if not verdict:
        return verdict
    restore = _find_restore(find_restore(bound_kernel, operands), operands[0], weight, dtype)
    if restore is not None:
        packed = PackedWeight(weight, restore, f"{name}.weight")
        verdict = release_weight(adaptation, [(module, "weight")], weight, packed)
        if not verdict:
            return verdict
    adaptation.bind_forward(module, name, forward)
    return f"{kernel_name(bound_kernel.choice)}, {kernel_name(topk.choice)}"


def looks_like_router(module: nn.Module) -> bool:
    """Return True for a leaf module with one matrix ``[E, H]`` and otherwise only vectors ``[E]``.

    The leaf must hold an integer smaller than E, as the number of chosen experts is.
    """
    weight = module._parameters.get("weight")
    if module._modules or weight is None or weight.ndim != 2:
        return False
    # A probe takes several float64 copies of the matrix, too many for an embedding table.
    if isinstance(module, nn.Embedding | nn.Linear) or len(weight) > _MOST_EXPERTS:
        return False
    vectors = [value for name, value in _tensors(module) if name != "weight"]
    has_top_k = any(type(value) is int and value < len(weight) for value in vars(module).values())
    return has_top_k and all(value.shape == weight.shape[:1] for value in vectors)


_ROUTINGS: weakref.WeakKeyDictionary[type[nn.Module], dict[str, Routing | None]]
_ROUTINGS = weakref.WeakKeyDictionary()


def find_routing(module: nn.Module) -> Routing | None:
    """Return the routing rule that the class of a leaf computes; None for unknown classes.

    Results are cached by class, and by the numbers and tensor sizes of the instance.
    """
    facts = {n: v for n, v in vars(module).items() if isinstance(v, bool | int | float | str)}
    sizes = [(name, tuple(tensor.shape)) for name, tensor in _tensors(module)]
    routings, key = _ROUTINGS.setdefault(type(module), {}), repr((sorted(facts.items()), sizes))
    if key not in routings:
        routings[key] = _search(module)
    return routings[key]


def _search(module: nn.Module) -> Routing | None:
    """Return the first candidate routing that agrees with the class for every probe."""
    probes = []
    for index, size in enumerate(_CORRECTIONS):
        probe = _Probe.of(module, _SEED + index, size)
        if probe is None:
            return None
        probes.append(probe)
    for candidate in _candidates(module, probes[0]):
        if all(probe.agrees(candidate) for probe in probes):
            return replace(candidate, flattens=probes[0].flattens())
    return None


class _Probe:
    """Trial case: a router with random weights, random tokens, and the class's result."""

    def __init__(self, router: nn.Module, x: Tensor, out: tuple[Tensor, ...]) -> None:
        self.router, self.x, self.out = router, x, out
        weight, bias = router._parameters["weight"], router._parameters.get("bias")
        assert weight is not None
        self.logits = torch.nn.functional.linear(x, weight, bias)

    @classmethod
    def of(cls, module: nn.Module, seed: int, correction: float) -> _Probe | None:
        """Return a trial case; None unless the class returns three tensors with one row per token.

        Args:
            correction: the standard deviation of tensors that may be added to scores.
        """
        generator = torch.Generator().manual_seed(seed)
        weight: Any = module._parameters["weight"]

        def random_like(name: str, tensor: Tensor | None) -> Tensor | None:
            if tensor is None or not tensor.is_floating_point():
                return tensor
            sizes = {"weight": 2 / float(weight.shape[1]) ** 0.5, "bias": 1.0}
            random: Tensor = torch.randn(tensor.shape, generator=generator).double()
            random *= sizes.get(name, correction)
            return random

        try:
            router = copy.copy(module)
            router._parameters = {
                name: None if tensor is None else nn.Parameter(random_like(name, tensor), False)  # type: ignore[arg-type]
                for name, tensor in module._parameters.items()
            }
            router._buffers = {
                name: random_like(name, tensor) for name, tensor in module._buffers.items()
            }
            x = torch.randn(_NUM_TRIAL_TOKENS, weight.shape[1], generator=generator).double()
            with torch.no_grad():
                out = type(module).forward(router, x)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            _log.debug("%s is no router: its probe raised %r", type(module).__name__, error)
            return None
        has_outputs = isinstance(out, tuple) and len(out) == _OUTPUTS
        if not has_outputs or not all(
            isinstance(t, Tensor) and t.shape[:-1] == (_NUM_TRIAL_TOKENS,) for t in out
        ):
            return None
        return cls(router, x, out)

    def agrees(self, routing: Routing) -> bool:
        """Return True if a routing rule and the class choose the same experts and weights."""
        logits, weights, ids = (self.out[at] for at in routing.order)
        if (logits - self.logits).abs().max() > _RELATIVE_TOLERANCE * self.logits.abs().max():
            return False
        actual, chosen = routing.choose(routing.op, self.logits, self.correction(routing))
        ids, positions = ids.long().sort(-1)
        chosen, actual_positions = chosen.long().sort(-1)
        if not torch.equal(ids, chosen):
            return False
        expected = weights.double().gather(-1, positions)
        return bool(
            (actual.gather(-1, actual_positions) - expected).abs().max()
            <= _RELATIVE_TOLERANCE * expected.abs().max()
        )

    def correction(self, routing: Routing) -> Tensor | None:
        """Return the correction bias that the router adds to the scores, if any."""
        return dict(_tensors(self.router)).get(routing.correction)

    def flattens(self) -> bool:
        """Return True if the class accepts tokens with a batch dimension and returns rows."""
        try:
            with torch.no_grad():
                out = type(self.router).forward(self.router, self.x.unflatten(0, (2, -1)))
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            _log.debug("%s takes rows: %r", type(self.router).__name__, error)
            return False
        pairs = zip(out, self.out, strict=True)
        return all(a.shape == b.shape and torch.allclose(a, b) for a, b in pairs)


def _candidates(module: nn.Module, probe: _Probe) -> Iterator[Routing]:
    """Yield all routings that the numbers and tensors of the module could mean."""
    num_experts = probe.logits.shape[-1]
    corrections = ["", *(name for name, _ in _tensors(module) if name not in ("weight", "bias"))]
    # A routed_scaling_factor is a float attribute of the module.
    scales = {1.0, *(float(value) for value in vars(module).values() if type(value) is float)}
    numbers = {value for value in vars(module).values() if type(value) is int and value > 0}
    groups = [(1, 1)] + [
        (num_groups, top_groups)
        for num_groups, top_groups in itertools.product(sorted(numbers), repeat=2)
        if top_groups <= num_groups <= num_experts // 2
        and num_groups > 1
        and num_experts % num_groups == 0
    ]
    for first, second, third in itertools.permutations(range(_OUTPUTS)):
        order = first, second, third
        logits, weights, ids = (probe.out[at] for at in order)
        top_k = ids.shape[-1]
        if ids.is_floating_point() or weights.shape != ids.shape or logits.shape[-1] != num_experts:
            continue
        if not logits.is_floating_point() or not weights.is_floating_point():
            continue
        for parts in itertools.product(groups, ("softmax", "sigmoid"), corrections, (True, False)):
            (num_groups, top_groups), scoring, correction, renormalize = parts
            if top_k > top_groups * (num_experts // num_groups):
                continue
            for scale in scales:
                yield Routing(
                    num_experts,
                    top_k,
                    scoring,
                    renormalize,
                    scale,
                    correction,
                    num_groups,
                    top_groups,
                    order,
                )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor


def _forward(
    module: nn.Module,
    routing: Routing,
    call: Call,
    choose: Choose,
    context: tuple[torch.dtype, tuple[Tensor, ...], torch.device],
) -> Forward:
    computed, expected, device = context
    original, (kernel, operands) = class_forward(module), call
    weight = module._parameters["weight"]
    assert weight is not None
    dtype, hidden = weight.dtype, weight.shape[1]
    dtypes = [expected[at].dtype for at in routing.order]
    correction = _tensor(module, routing.correction)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            (x,) = args
            has_shape = x.shape[-1] == hidden and (x.ndim == 2 or (routing.flattens and x.ndim > 2))
            is_plain = x.dtype is dtype and x.device == device and not x.requires_grad
            # The correction bias is a buffer, which code of the user may replace.
            if has_shape and is_plain and _tensor(module, routing.correction) is correction:
                logits = kernel(x.reshape(-1, hidden).to(computed), *operands)
                results = zip(routing.order, (logits, *choose(logits)), dtypes, strict=True)
                results_by_position = {
                    at: result.to(dtype_out) for at, result, dtype_out in results
                }
                return tuple(results_by_position[at] for at in range(len(results_by_position)))
        return original(*args, **kwargs)

    return forward


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    buffer = module._buffers.get(name)
    return module._parameters.get(name) if buffer is None else buffer


def _logits_dtype(logits: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to which the class rounded the logits."""
    exact = torch.equal(logits, logits.to(dtype).to(logits.dtype))
    return dtype if exact else torch.promote_types(dtype, torch.float32)


def _find_restore(
    restore: Restore | None, operand: Any, weight: Tensor, dtype: torch.dtype
) -> Restore | None:
    """Return a function that restores the weight; None if the kernel reads the original weight."""
    if restore is not None:
        return partial(_restore_narrowed, restore, dtype)
    if isinstance(operand, Tensor) and operand.data_ptr() != weight.data_ptr():
        return partial(_copy_into, operand)
    return None


def _restore_narrowed(restore: Restore, packed_dtype: torch.dtype, into: Tensor) -> None:
    dense = into.new_empty(into.shape, dtype=packed_dtype)
    restore(dense)
    into.copy_(dense)


def _copy_into(weight: Tensor, into: Tensor) -> None:
    into.copy_(weight)


def _logit_bounds(weight: Tensor, bias: Tensor | None, x: Tensor) -> tuple[int, float, float]:
    """Return rounding bounds of the logits: the number of terms, and the sums of magnitudes.

    Returns: the number of terms of a logit; the largest sum of their magnitudes; and the largest
        sum that is rounded before the bias is added, 0 without a bias.
    """
    largest_matmul = float((x.abs().double() @ weight.detach().abs().double().T).max())
    largest = largest_matmul + (0.0 if bias is None else float(bias.detach().abs().max()))
    return weight.shape[1] + 1, largest, 0.0 if bias is None else largest_matmul


def _check_choice(
    routing: Routing,
    expected: tuple[Tensor, ...],
    actual: tuple[Tensor, ...],
    choice: tuple[Tensor, Tensor],
    bounds: tuple[int, float, float],
    dtype: torch.dtype,
) -> Verdict:
    """Refuse a kernel's routing whose logits or chosen experts differ from the class's.

    Args:
        choice: weights and ids that the kernel makes of the class's own logits.
        bounds: reduction, magnitude and rounded magnitude of a logit, as of a ``Case``.
        dtype: the model's.
    """
    for class_result, kernel_result in zip(expected, actual, strict=True):
        if (class_result.shape, class_result.dtype) != (kernel_result.shape, kernel_result.dtype):
            return Verdict.refuse("it returns tensors of other shapes or dtypes than its class")
    logits, weights, ids = (expected[at] for at in routing.order)
    verdict = check_agreement(linear.tolerance, logits, actual[routing.order[0]], *bounds)
    if not verdict:
        return verdict
    # Among experts with equal logits either may be chosen, so logits are compared instead of ids.
    ordered = []
    for expert_ids, expert_weights in ((ids, weights), (choice[1], choice[0])):
        ranked = logits.gather(-1, expert_ids.long()).sort(-1)
        ordered.append((ranked.values, expert_weights.gather(-1, ranked.indices)))
    (class_logits, class_result), (kernel_logits, kernel_result) = ordered
    if not torch.equal(class_logits, kernel_logits):
        return Verdict.refuse("it chooses other experts from the same logits")
    rounded = _logits_dtype(weights, dtype)
    return check_agreement(
        routing.op.tolerance,
        class_result.to(rounded),
        kernel_result.to(rounded),
        logits.shape[-1],
        routing.scale,
    )
