"""The verdict on one architecture: the model, the adapted model, and the model given back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tiny_models.building import SHRUNK, NotBuiltError, build, make, where
from tiny_models.modules import KINDS, counted
from tiny_models.numerics import allowed, deviation, equal, run, watching
from tiny_models.processes import called_apart

Adapt = Callable[[nn.Module], Any]


@dataclass(slots=True)
class Row:
    """The outcome of one architecture.

    Attributes:
        status: ``not run`` (the model itself cannot be built or run), ``adapted``, or what is
            wrong: ``fails``, ``differs``, ``not restored``, ``crashed``, ``timed out``.
        reason: of every status but ``adapted``.
        deviation, bound: of the output that comes nearest to its bound, or goes furthest over it.
        bound_modules, modules: counts by kind.
        unbound: reasons of the counted modules that are not bound, with counts.
    """

    model_type: str
    class_name: str
    dtype: str = "float32"
    status: str = "not run"
    reason: str = ""
    call: str = ""
    shrunk: str = ""
    weights: int = 0
    seconds: float = 0.0
    deviation: float = 0.0
    bound: float = 0.0
    bound_modules: dict[str, int] = field(default_factory=dict)
    modules: dict[str, int] = field(default_factory=dict)
    unbound: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON can hold it."""
        return asdict(self)


def judge(
    model_type: str, class_name: str, adapt: Adapt, dtype: torch.dtype = torch.float32
) -> Row:
    """Return the row of one architecture."""
    row = Row(model_type, class_name, str(dtype).removeprefix("torch."))
    started = time.process_time()
    try:
        built = build(model_type, class_name, dtype)
    except NotBuiltError as error:
        row.reason = str(error)
        return row
    model, plain = built.model, built.outputs
    row.call, row.shrunk = built.call, built.shrunk
    row.weights = sum(weight.numel() for weight in model.parameters())
    kinds = list(counted(model))
    row.modules = {kind: sum(each == kind for each, *_ in kinds) for kind in KINDS}
    rms_norms = {module for kind, _, module in kinds if kind == "RMSNorm"}
    if not equal(run(model, built.inputs), plain):
        row.reason = "its outputs differ from one run to the next"
        return row
    limits = allowed(model, built.inputs, rms_norms, plain)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    # Made as the model was, so of the same weights: whatever happens to those of the model.
    twin = make(model_type, class_name, *SHRUNK[built.shrunk]).to(dtype)
    originals = dict(twin.named_modules())
    try:
        adapted = adapt(model)
        bound = _count(row, adapted, kinds)
        pairs = [(name, module, originals[name]) for name, module in bound]
        with watching(pairs) as strays:
            found = deviation(run(model, built.inputs), plain)
        _compare(row, found, limits, strays)
        adapted.restore()
        if row.status == "adapted":
            _restored(row, model, weights, plain, run(model, built.inputs))
    except Exception as error:  # noqa: BLE001  the row says so
        row.status, row.reason = "fails", where(error)
    row.seconds = round(time.process_time() - started, 2)
    return row


def judge_apart(
    model_type: str, class_name: str, adapt: Adapt, dtype: torch.dtype = torch.float32
) -> Row:
    """Return the row of an architecture, which a fork of this process judges."""
    found = called_apart(lambda: judge(model_type, class_name, adapt, dtype).as_dict())
    named = {"model_type": model_type, "class_name": class_name}
    return Row(**{**named, "dtype": str(dtype).removeprefix("torch."), **found})


def _count(
    row: Row, adapted: Any, kinds: list[tuple[str, str, nn.Module]]
) -> list[tuple[str, nn.Module]]:
    """Count and return the modules that run on a kernel.

    The adapter says so, and their forward is not the one of their class.
    """
    bound = []
    places = {place.name: place for place in adapted.places}
    reasons: Counter[str] = Counter()
    row.bound_modules = dict.fromkeys(KINDS, 0)
    for kind, name, module in kinds:
        place = places.get(name)
        if place is not None and place.is_bound and "forward" in vars(module):
            row.bound_modules[kind] += 1
            bound.append((name, module))
        else:
            reason = (place and place.reason) or "nothing is said of it"
            reasons[f"{kind} ({type(module).__name__}): {reason}"] += 1
    row.unbound = dict(reasons.most_common())
    return bound


def _compare(
    row: Row, found: dict[str, float], limits: dict[str, float], strays: dict[str, float]
) -> None:
    """Judge the modules, and the output that comes nearest to its bound, which the row shows."""

    def share(name: str) -> float:
        return 0.0 if not found[name] else found[name] / (limits.get(name, 0.0) or 1e-300)

    worst = max(found, key=share)
    row.deviation, row.bound = found[worst], limits.get(worst, 0.0)
    row.status = "adapted"
    if strays:
        name = max(strays, key=strays.__getitem__)
        row.status = "differs"
        row.reason = f"{name} is {strays[name]:.1f} times as far off as its op may be"
    elif row.deviation > row.bound:
        row.status, row.reason = (
            "differs",
            f"{worst or 'output'} differs by {row.deviation:.2e}, {row.bound:.2e} is allowed",
        )


def _restored(
    row: Row,
    model: nn.Module,
    weights: dict[str, Tensor],
    plain: dict[str, Tensor],
    again: dict[str, Tensor],
) -> None:
    """Compare the model that was given back with the one that was adapted."""
    now = model.state_dict()
    changed = [name for name in weights if name not in now or _differ(now[name], weights[name])]
    left = [name for name, module in model.named_modules() if "forward" in vars(module)]
    if now.keys() != weights.keys() or changed:
        row.status, row.reason = "not restored", f"weights differ: {changed[:3]}"
    elif left:
        row.status, row.reason = "not restored", f"forwards are left: {left[:3]}"
    elif any(deviation(again, plain).values()):
        row.status, row.reason = "not restored", "the outputs are not those of before"


def _differ(this: Tensor, that: Tensor) -> bool:
    if this.dtype != that.dtype or this.shape != that.shape:
        return True
    bits = (each.reshape(-1).contiguous().view(torch.uint8) for each in (this, that))
    return not torch.equal(*bits)
