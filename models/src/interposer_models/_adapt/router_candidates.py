"""The routing functions that ops support, and the search for the one that a router computes.

Dimensions: T tokens, H hidden size, E experts, K chosen experts, G groups.
"""

from __future__ import annotations

import copy
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from interposer import CustomOp
from interposer_ops.experts import grouped_topk, topk_sigmoid, topk_softmax

_log = logging.getLogger("interposer")
# Routers compute in float32 for any input dtype.
_RELATIVE_TOLERANCE = 2e-5
_TOKENS = 48
_SEED = 5
# A correction changes no choice if scores are much larger, and decides every choice if scores are
# much smaller. All tokens of a probe share one correction, so that each size is drawn several times
# to cover rare cases, such as the best expert in a weak group.
_CORRECTIONS = (1.0, 0.1, 0.01) * 4
_OUTPUTS = 3
_MOST_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which a router chooses experts from logits.

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
        """Return the op that computes this choice."""
        if self.num_groups > 1 or (self.correction and self.scoring == "softmax"):
            return grouped_topk
        return topk_sigmoid if self.scoring == "sigmoid" else topk_softmax

    def dims(self) -> dict[str, int | bool | str]:
        """Return the dimensions of the kernel request."""
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


def looks_like_router(module: nn.Module) -> bool:
    """Return True for a leaf with a matrix ``[E, H]`` and otherwise only vectors ``[E]``.

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
    """Return the routing that the class of a leaf computes, None for unsupported classes.

    Results are cached by class, and by the numbers and tensor sizes of the instance.
    """
    facts = {n: v for n, v in vars(module).items() if isinstance(v, bool | int | float | str)}
    sizes = [(name, tuple(tensor.shape)) for name, tensor in _tensors(module)]
    routings, key = _ROUTINGS.setdefault(type(module), {}), repr((sorted(facts.items()), sizes))
    if key not in routings:
        routings[key] = _search(module)
    return routings[key]


def _search(module: nn.Module) -> Routing | None:
    """Return the first candidate that agrees with the class for every probe."""
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
    """A router with random weights, random tokens, and the class's result."""

    def __init__(self, router: nn.Module, x: Tensor, out: tuple[Tensor, ...]) -> None:
        self.router, self.x, self.out = router, x, out
        weight, bias = router._parameters["weight"], router._parameters.get("bias")
        assert weight is not None
        self.logits = torch.nn.functional.linear(x, weight, bias)

    @classmethod
    def of(cls, module: nn.Module, seed: int, correction: float) -> _Probe | None:
        """Return a probe, None unless the class returns three tensors with a row for each token.

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
            x = torch.randn(_TOKENS, weight.shape[1], generator=generator).double()
            with torch.no_grad():
                out = type(module).forward(router, x)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            _log.debug("%s is no router: its probe raised %r", type(module).__name__, error)
            return None
        has_outputs = isinstance(out, tuple) and len(out) == _OUTPUTS
        if not has_outputs or not all(
            isinstance(t, Tensor) and t.shape[:-1] == (_TOKENS,) for t in out
        ):
            return None
        return cls(router, x, out)

    def agrees(self, routing: Routing) -> bool:
        """Return True if a routing and the class choose the same experts and weights."""
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
        """Return the tensor that is added to the scores, if any."""
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
    """Yield all routings with the numbers and tensors that the module holds."""
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
