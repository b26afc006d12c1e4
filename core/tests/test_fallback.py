"""A kernel that fails at run time is replaced for good, but only by policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from interposer import (
    Capability,
    Case,
    Choice,
    Config,
    Device,
    Kernel,
    OpEntry,
    Registry,
    Resolver,
    Site,
    custom_op,
)
from interposer._selection.fallback import Fallback

DEVICE = Device("host", "cpu", "a device", Capability("any"))
Resolve = Callable[..., Resolver]


def no_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    yield from ()


@custom_op("double", cases=no_cases, constants=("scale",))
def double(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``2 x scale``."""
    if x.dim() != 1:
        raise ValueError("x must have one dimension")
    return 2 * x * scale


@custom_op("clear", cases=no_cases, mutates=("x",))
def clear(x: torch.Tensor) -> None:
    """Write zeros."""
    x.zero_()


def failing(*_: torch.Tensor) -> Any:
    raise RuntimeError("out of shared memory")


def leaving(*_: torch.Tensor) -> Any:
    raise SystemExit("not licensed")


def working(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if x.dim() != 1:
        raise ValueError("x must have one dimension")
    return x * scale + x * scale


def prepared(**constants: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return constants


def kernel(function: Callable[..., Any], score: float, **facts: Any) -> Kernel:
    target = f"{__name__}:{function.__name__}"
    op = facts.pop("op", "double")
    return Kernel(op, facts.pop("name", function.__name__), target, score=score, **facts)


OPS = (OpEntry("double", f"{__name__}:double"), OpEntry("clear", f"{__name__}:clear"))
X, SCALE = torch.arange(4.0), torch.tensor(3.0)


@pytest.fixture
def resolve(registered: Callable[..., Registry]) -> Resolve:
    """Return a maker of resolvers that fall back, for the given kernels."""

    def make(*records: object, **hooks: object) -> Resolver:
        return Resolver(registered(*OPS, *records, **hooks), DEVICE, Config(fallback=True))

    return make


def bind(resolver: Resolver) -> Callable[..., torch.Tensor]:
    return Site(resolver, "a", torch.float32).bind_kernel(double).function


def choice(resolver: Resolver) -> Choice:
    ((shared_choice, places),) = resolver.choices.values()
    assert places == ["a"]
    return shared_choice


@pytest.mark.parametrize("broken", [failing, leaving])
def test_the_next_kernel_takes_over_and_the_failure_is_shown_once(
    broken: Callable[..., Any], resolve: Resolve, caplog: pytest.LogCaptureFixture
) -> None:
    resolver = resolve(kernel(broken, 30), kernel(working, 20))
    function = bind(resolver)
    assert choice(resolver).chosen.name == broken.__name__
    with caplog.at_level(logging.WARNING, "interposer"):
        for _ in range(3):
            torch.testing.assert_close(function(X, SCALE), 6 * X)
    (line,) = caplog.messages
    assert f"acme/{broken.__name__} failed at run time: " in line
    assert line.endswith("working takes over")
    assert choice(resolver).chosen.name == "working"
    (refusal,) = [r for r in choice(resolver).refusals if r.candidate == broken.__name__]
    assert "failed at run time" in refusal.reason
    (failure,) = resolver.failures
    assert "Traceback" in failure.traceback


def test_layers_that_share_a_choice_quarantine_only_the_failed_kernel(
    resolve: Resolve, caplog: pytest.LogCaptureFixture
) -> None:
    resolver = resolve(kernel(failing, 30), kernel(working, 20))
    layers = [
        Site(resolver, f"layers.{n}", torch.float32).bind_kernel(double).function for n in range(5)
    ]
    with caplog.at_level(logging.WARNING, "interposer"):
        for layer in layers:
            torch.testing.assert_close(layer(X, SCALE), 6 * X)
    assert len(caplog.messages) == 1
    ((shared_choice, places),) = resolver.choices.values()
    assert (shared_choice.chosen.name, len(places)) == ("working", 5)
    assert [failure.candidate for failure in resolver.failures] == ["failing"]


def test_a_quarantined_kernel_is_not_bound_again(resolve: Resolve) -> None:
    resolver = resolve(kernel(failing, 30), kernel(working, 20))
    bind(resolver)(X, SCALE)
    later = Resolver(resolver.registry, DEVICE, Config())
    assert bind(later) is working


def test_the_reference_is_the_last_resort(resolve: Resolve) -> None:
    function = bind(resolve(kernel(failing, 30), kernel(leaving, 20)))
    torch.testing.assert_close(function(X, SCALE), 6 * X)


def test_a_mistake_of_the_caller_quarantines_nothing(resolve: Resolve) -> None:
    resolver = resolve(kernel(working, 20))
    function = bind(resolver)
    with pytest.raises(ValueError, match="must have one dimension"):
        function(X.view(2, 2), SCALE)
    assert choice(resolver).chosen.name == "working"
    assert resolver.failures == []
    torch.testing.assert_close(function(X, SCALE), 6 * X)


def test_kernels_with_prepared_constants_cannot_take_over(resolve: Resolve) -> None:
    late = kernel(working, 20, name="late", prepare=f"{__name__}:prepared")
    resolver = resolve(kernel(failing, 30), late)
    torch.testing.assert_close(bind(resolver)(X, SCALE), 6 * X)
    assert choice(resolver).chosen.name == "reference"


def test_a_kernel_whose_call_cannot_be_repeated_is_bound_directly(resolve: Resolve) -> None:
    resolver = resolve(
        kernel(failing, 30, prepare=f"{__name__}:prepared"), kernel(failing, 30, op="clear")
    )
    place = Site(resolver, "a", torch.float32)
    assert place.bind_kernel(double).function is failing
    assert place.bind_kernel(clear).choice.chosen.name == "failing"
    assert not isinstance(place.bind(clear), Fallback)


def test_without_the_policy_or_with_a_pin_the_kernel_is_bound_directly(
    registered: Callable[..., Registry],
) -> None:
    registry = registered(*OPS, kernel(failing, 30))
    pinned = Config(fallback=True, kernels={"double": "failing"})
    for config in (Config(), pinned):
        assert bind(Resolver(registry, DEVICE, config)) is failing


def test_threads_that_fail_at_once_replace_once(
    resolve: Resolve, caplog: pytest.LogCaptureFixture
) -> None:
    function = bind(resolve(kernel(failing, 30), kernel(working, 20)))
    with ThreadPoolExecutor(8) as pool, caplog.at_level(logging.WARNING, "interposer"):
        results = list(pool.map(lambda _: function(X, SCALE), range(64)))
    assert len(caplog.messages) == 1
    for result in results:
        torch.testing.assert_close(result, 6 * X)
