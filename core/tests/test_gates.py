"""A table that is looked up and multiplied by is held once, whichever kernels there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from interposer import (
    Capability,
    Case,
    Config,
    Device,
    Kernel,
    OpEntry,
    Registry,
    Resolver,
    Rule,
    Site,
    custom_op,
)
from interposer._contract.choice import Measured
from interposer.errors import RecordError

DEVICE = Device("host", "cpu", "a device", Capability("any"))
Bind = Callable[..., tuple[str, str]]


def no_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    yield from ()


@custom_op("look", cases=no_cases, constants=("weight",))
def look(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows."""
    return weight[x]


@custom_op("multiply", cases=no_cases, constants=("weight",))
def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product."""
    return x @ weight.T


def prepare(weight: torch.Tensor) -> Mapping[str, Any]:
    return {"weight": weight}


def kernel(op: str, technique: str, score: float, form: str | None = None) -> Kernel:
    """Return a record; ``form`` is None without preparation."""
    target = f"{__name__}:{'nothing' if technique == 'broken' else op}"
    prepares = "" if form is None else f"{__name__}:prepare"
    return Kernel(op, f"{op}_{technique}", target, prepare=prepares, score=score, form=form or "")


OPS = (OpEntry("look", f"{__name__}:look"), OpEntry("multiply", f"{__name__}:multiply"))
PACKED = kernel("multiply", "packed", 20, "packed")
OWN = kernel("multiply", "own", 30, "")
PLAIN = kernel("multiply", "plain", 10)
LOOK_PACKED = kernel("look", "packed", 10, "packed")
LOOK_PLAIN = kernel("look", "plain", 20)
EVERY = (*OPS, PACKED, OWN, PLAIN, LOOK_PACKED, LOOK_PLAIN)


@pytest.fixture
def resolver(registered: Callable[..., Registry]) -> Callable[..., Resolver]:
    """Return a maker of resolvers for records and a configuration."""

    def make(*records: object, **config: Any) -> Resolver:
        return Resolver(registered(*records), DEVICE, Config(canary="off", tables=False, **config))

    return make


def bound(resolver: Resolver) -> tuple[str, str]:
    """Return the names of the lookup and of the product."""
    site = Site(resolver, "embed", torch.float32)
    rows, product = site.bind_table(look, {"v": 9}, multiply, {"o": 9}, site.at("head"))
    assert product is not None
    for choice in (rows.choice, product.choice):
        assert choice.request.dims["tied"] is True
    return rows.choice.chosen.name, product.choice.chosen.name


def reasons(resolver: Resolver) -> dict[str, str]:
    return {
        refusal.candidate: refusal.reason
        for choice, _ in resolver.choices.values()
        for refusal in choice.refusals
    }


def test_the_lookup_reads_the_form_that_the_product_prepared(
    resolver: Callable[..., Resolver],
) -> None:
    selection = resolver(*EVERY)
    assert bound(selection) == ("look_packed", "multiply_packed")
    assert reasons(selection)["multiply_own"] == (
        "prepares a copy of the table that no kernel of 'look' reads here, so the table would be "
        "stored twice"
    )
    assert reasons(selection)["look_plain"] == (
        "reads another copy of the table than multiply_packed multiplies by, so the table would be "
        "stored twice"
    )


def test_a_product_with_the_stored_form_is_looked_up_in_the_stored_form(
    resolver: Callable[..., Resolver],
) -> None:
    selection = resolver(*EVERY, kernels={"multiply": Rule(prefer=("multiply_plain",))})
    assert bound(selection) == ("look_plain", "multiply_plain")


def test_measurements_decide_among_kernels_that_share_a_form(
    resolver: Callable[..., Resolver], monkeypatch: pytest.MonkeyPatch
) -> None:
    selection = resolver(*EVERY)

    def lookup(request: Any, _: object) -> Measured | None:
        if request.name != "multiply":
            return None
        names = {c.name: c.qualified_name for c in selection.accepted(request)}
        times = {"multiply_own": 1.0, "multiply_plain": 2.0, "multiply_packed": 3.0}
        return Measured({names[name]: seconds for name, seconds in times.items()}, "a test")

    monkeypatch.setattr(selection._measurements, "lookup", lookup)
    assert bound(selection) == ("look_plain", "multiply_plain")


@pytest.mark.parametrize(
    ("records", "config"),
    [
        ((*OPS, PACKED, OWN, LOOK_PLAIN), {}),
        ((*OPS, PACKED, LOOK_PACKED, LOOK_PLAIN), {"look": Rule(forbid={"look_packed"})}),
    ],
)
def test_a_form_that_no_lookup_reads_is_not_chosen(
    resolver: Callable[..., Resolver], records: tuple[object, ...], config: dict[str, Any]
) -> None:
    assert bound(resolver(*records, kernels=config)) == ("look_plain", "reference")


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({"multiply": "multiply_own"}, ("look_plain", "multiply_own")),
        ({"look": "look_plain"}, ("look_plain", "multiply_plain")),
        (
            {"look": "look_plain", "multiply": "multiply_packed"},
            ("look_plain", "multiply_packed"),
        ),
    ],
)
def test_a_pin_is_obeyed(
    resolver: Callable[..., Resolver], pins: dict[str, str], expected: tuple[str, str]
) -> None:
    assert bound(resolver(*EVERY, kernels=pins)) == expected


def test_a_lookup_that_cannot_be_loaded_only_costs_memory(
    resolver: Callable[..., Resolver],
) -> None:
    broken = kernel("look", "broken", 10, "packed")
    assert bound(resolver(*OPS, PACKED, broken)) == ("reference", "multiply_packed")


def test_without_a_head_requests_do_not_mention_one(resolver: Callable[..., Resolver]) -> None:
    site = Site(resolver(*EVERY), "embed", torch.float32)
    rows, product = site.bind_table(look, {"v": 9, "tied": False}, multiply, {"o": 9}, None)
    assert product is None
    assert rows.choice.chosen.name == "look_plain"
    assert rows.choice.request.dims == {"v": 9, "tied": False}


def test_a_form_without_preparation_is_refused() -> None:
    with pytest.raises(RecordError, match=r"has the form 'packed', but prepares nothing"):
        Kernel("look", "look_odd", "a:b", form="packed")
