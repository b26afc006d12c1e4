"""Choices of experts that a router may make, and the search for the one that it does.

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
# Routers compute in float32 inside, whatever they get.
_CLOSE = 2e-5
_TOKENS = 48
_SEED = 5
# A correction decides nothing where scores are much larger, and all where they are much smaller.
# All tokens share it, so that one of each size would hide what differs for few corrections, such
# as the best expert in a weak group.
_CORRECTIONS = (1.0, 0.1, 0.01) * 4
_OUTPUTS = 3
_MOST_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class Routing:
    """The choice that a router makes of its logits.

    Attributes:
        scoring: ``"softmax"`` or ``"sigmoid"``.
        correction: name of the tensor that is added to the scores for the choice; empty for none.
        num_groups, top_groups: 1 where there are no groups.
        order: where the router returns logits, weights and ids.
        flattens: it takes tokens of any number of dimensions, and returns one row each.
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
        """Return the op that makes this choice."""
        if self.num_groups > 1 or (self.correction and self.scoring == "softmax"):
            return grouped_topk
        return topk_sigmoid if self.scoring == "sigmoid" else topk_softmax

    def dims(self) -> dict[str, int | bool | str]:
        """Return what the request states."""
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
        """Return weights and ids ``[T, K]`` by a kernel of ``op``."""
        if self.op is grouped_topk:
            groups = self.num_groups, self.top_groups
            last = self.top_k, self.scoring, self.renormalize, self.scale
            return kernel(logits, bias, *groups, *last)
        if self.op is topk_sigmoid:
            return kernel(logits, bias, self.top_k, self.renormalize, self.scale)
        weights, ids = kernel(logits, self.top_k, self.renormalize)
        return (weights if self.scale == 1.0 else weights * self.scale), ids


def looks_like_router(module: nn.Module) -> bool:
    """Say whether a leaf has a matrix, and beside it one number for each of its rows at most."""
    weight = module._parameters.get("weight")
    if module._modules or weight is None or weight.ndim != 2:
        return False
    # Trying it takes a few matrices in float64: tables of tokens are far too large for that.
    if isinstance(module, nn.Embedding | nn.Linear) or len(weight) > _MOST_EXPERTS:
        return False
    others = [held for name, held in _tensors(module) if name != "weight"]
    named = any(type(held) is int and held < len(weight) for held in vars(module).values())
    return named and all(held.shape == weight.shape[:1] for held in others)


_FOUND: weakref.WeakKeyDictionary[type[nn.Module], dict[str, Routing | None]]
_FOUND = weakref.WeakKeyDictionary()


def find_routing(module: nn.Module) -> Routing | None:
    """Return the choice that the class of a leaf makes, None if it is none of those known here.

    What was found is remembered by the class, with the numbers and sizes that an instance holds.
    """
    facts = {n: v for n, v in vars(module).items() if isinstance(v, bool | int | float | str)}
    sizes = [(name, tuple(tensor.shape)) for name, tensor in _tensors(module)]
    known, key = _FOUND.setdefault(type(module), {}), repr((sorted(facts.items()), sizes))
    if key not in known:
        known[key] = _search(module)
    return known[key]


def _search(module: nn.Module) -> Routing | None:
    """Return the first candidate that chooses what the class does at every draw."""
    draws = []
    for index, size in enumerate(_CORRECTIONS):
        draw = _Draw.of(module, _SEED + index, size)
        if draw is None:
            return None
        draws.append(draw)
    for each in _candidates(module, draws[0]):
        if all(draw.agrees(each) for draw in draws):
            return replace(each, flattens=draws[0].flattens())
    return None


class _Draw:
    """A router with random weights, tokens, and what its class makes of them."""

    def __init__(self, probe: nn.Module, x: Tensor, out: tuple[Tensor, ...]) -> None:
        self.probe, self.x, self.out = probe, x, out
        weight, bias = probe._parameters["weight"], probe._parameters.get("bias")
        assert weight is not None
        self.logits = torch.nn.functional.linear(x, weight, bias)

    @classmethod
    def of(cls, module: nn.Module, seed: int, correction: float) -> _Draw | None:
        """Return a draw, None where the class returns no three tensors of rows.

        Args:
            correction: the size of what may be added to scores.
        """
        generator = torch.Generator().manual_seed(seed)
        weight: Any = module._parameters["weight"]

        def drawn(name: str, held: Tensor | None) -> Tensor | None:
            if held is None or not held.is_floating_point():
                return held
            sizes = {"weight": 2 / float(weight.shape[1]) ** 0.5, "bias": 1.0}
            made: Tensor = torch.randn(held.shape, generator=generator).double()
            made *= sizes.get(name, correction)
            return made

        try:
            probe = copy.copy(module)
            probe._parameters = {
                name: None if held is None else nn.Parameter(drawn(name, held), False)  # type: ignore[arg-type]
                for name, held in module._parameters.items()
            }
            probe._buffers = {name: drawn(name, held) for name, held in module._buffers.items()}
            x = torch.randn(_TOKENS, weight.shape[1], generator=generator).double()
            with torch.no_grad():
                out = type(module).forward(probe, x)
        except Exception as error:  # noqa: BLE001 - the class is no router, and foreign
            _log.debug("%s is no router: its probe raised %r", type(module).__name__, error)
            return None
        known = isinstance(out, tuple) and len(out) == _OUTPUTS
        if not known or not all(isinstance(t, Tensor) and t.shape[:-1] == (_TOKENS,) for t in out):
            return None
        return cls(probe, x, out)

    def agrees(self, routing: Routing) -> bool:
        """Say whether a choice is the class's for every token."""
        logits, weights, ids = (self.out[at] for at in routing.order)
        if (logits - self.logits).abs().max() > _CLOSE * self.logits.abs().max():
            return False
        found, chosen = routing.choose(routing.op, self.logits, self.correction(routing))
        ids, places = ids.long().sort(-1)
        chosen, own = chosen.long().sort(-1)
        if not torch.equal(ids, chosen):
            return False
        expected = weights.double().gather(-1, places)
        return bool((found.gather(-1, own) - expected).abs().max() <= _CLOSE * expected.abs().max())

    def correction(self, routing: Routing) -> Tensor | None:
        """Return the tensor that is added to scores."""
        return dict(_tensors(self.probe)).get(routing.correction)

    def flattens(self) -> bool:
        """Say whether the class returns the same for tokens in several rows."""
        try:
            with torch.no_grad():
                out = type(self.probe).forward(self.probe, self.x.unflatten(0, (2, -1)))
        except Exception as error:  # noqa: BLE001 - it takes rows only
            _log.debug("%s takes rows: %r", type(self.probe).__name__, error)
            return False
        pairs = zip(out, self.out, strict=True)
        return all(a.shape == b.shape and torch.allclose(a, b) for a, b in pairs)


def _candidates(module: nn.Module, draw: _Draw) -> Iterator[Routing]:
    """Yield choices that use the numbers which the module holds."""
    experts = draw.logits.shape[-1]
    corrections = ["", *(name for name, _ in _tensors(module) if name not in ("weight", "bias"))]
    scales = {1.0, *(float(held) for held in vars(module).values() if type(held) is float)}
    numbers = {held for held in vars(module).values() if type(held) is int and held > 0}
    groups = [(1, 1)] + [
        (count, top)
        for count, top in itertools.product(sorted(numbers), repeat=2)
        if top <= count <= experts // 2 and count > 1 and experts % count == 0
    ]
    for first, second, third in itertools.permutations(range(_OUTPUTS)):
        order = first, second, third
        logits, weights, ids = (draw.out[at] for at in order)
        top_k = ids.shape[-1]
        if ids.is_floating_point() or weights.shape != ids.shape or logits.shape[-1] != experts:
            continue
        if not logits.is_floating_point() or not weights.is_floating_point():
            continue
        for parts in itertools.product(groups, ("softmax", "sigmoid"), corrections, (True, False)):
            (count, top), scoring, correction, renormalize = parts
            if top_k > top * (experts // count):
                continue
            for scale in scales:
                yield Routing(
                    experts, top_k, scoring, renormalize, scale, correction, count, top, order
                )  # fmt: skip


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is not None:
                yield name, tensor
