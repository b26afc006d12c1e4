"""Recurrences of the compiled library, at every level of this processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from interposer import Case, Config, CustomOp, current_registry
from interposer_cpu import native
from interposer_cpu._kernels import recurrence
from interposer_cpu._platform import CPUPlatform
from interposer_ops.recurrence import causal_convolution, gated_delta_rule, state_space_scan
from interposer_testing import check_kernel, conformance

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(
    bool(native.why_absent()), reason=f"needs native kernels: {native.why_absent()}"
)

Op = CustomOp[..., Any]
DIMS: dict[str, dict[str, Any]] = {
    "causal_convolution": {"num_channels": 1100, "window": 4, "silu": True},
    "state_space_scan": {"num_heads": 6, "num_groups": 3, "head_size": 40, "state_size": 72},
    "gated_delta_rule": {"num_heads": 2, "num_value_heads": 4, "key_size": 48, "value_size": 100},
}
KERNELS: list[tuple[Op, Callable[..., torch.Tensor]]] = [
    (causal_convolution, recurrence.causal_convolution),
    (state_space_scan, recurrence.state_space_scan),
    (gated_delta_rule, recurrence.gated_delta_rule),
]
each_kernel = pytest.mark.parametrize(
    ("op", "function"), KERNELS, ids=lambda value: getattr(value, "name", "")
)


@pytest.fixture(autouse=True)
def best_level() -> Iterator[None]:
    yield
    native.force_level(None)


def sampled(op: Op, dtype: torch.dtype, num_tokens: int) -> Case:
    assert op.sample is not None
    return op.sample(dtype, DIMS[op.name], num_tokens, 0)


@pytest.mark.parametrize(
    "level",
    # The lowest differs most from the best; those between are tried when there is time.
    [
        pytest.param(name, marks=[pytest.mark.slow] if index else [])
        for index, name in enumerate(native.levels()[:-1])
    ],
)
def test_kernels_conform_on_every_level_below_the_best(level: str) -> None:
    native.force_level(level)
    registry, device = current_registry(Config(isolation="off")), CPUPlatform().devices()[0]
    ran = set()
    for op, _ in KERNELS:
        trials = conformance(
            registry, device, distribution="interposer-cpu", op=op.name, quick=True
        )
        for trial in trials:
            if trial.candidate.name == f"{op.name}_native" and trial.aspect == "numerics":
                assert trial.run() == [], str(trial)
                ran.add(op.name)
    assert ran == set(DIMS)


@pytest.mark.landing(4)
@each_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [5, 200])
def test_multithreaded_results_are_correct(
    op: Op, function: Callable[..., torch.Tensor], dtype: torch.dtype, num_tokens: int
) -> None:
    """Several sequences that decode, and one prompt, of more numbers than one thread takes."""
    assert check_kernel(op, function, sampled(op, dtype, num_tokens), fenced=True) == []


@each_kernel
def test_a_sequence_gives_the_same_bits_in_any_batch(
    op: Op, function: Callable[..., torch.Tensor]
) -> None:
    pool = op.mutates[0]
    arguments = sampled(op, torch.bfloat16, 7).arguments
    states = arguments[pool].clone()
    whole = function(**{**arguments, pool: states})
    for row in range(7):
        own_states = arguments[pool].clone()
        own = {name: arguments[name][row : row + 1] for name in (*op.ragged, *op.batched)}
        starts = torch.tensor([0, 1])
        given = {**arguments, **own, "query_starts": starts, pool: own_states}
        assert torch.equal(function(**given), whole[row : row + 1])
        slot = int(arguments["slots"][row])
        assert torch.equal(own_states[slot], states[slot])


@each_kernel
def test_chunked_prefill_gives_the_same_bits(op: Op, function: Callable[..., torch.Tensor]) -> None:
    """Tokens pass one after the other, and a state is kept as it is, whatever the cut."""
    pool, length = op.mutates[0], 40
    arguments = sampled(op, torch.float32, length).arguments
    slots = arguments["slots"]
    assert len(slots) == 1
    states = arguments[pool].clone()
    whole = function(**{**arguments, pool: states})
    own_states, parts = arguments[pool].clone(), []
    for first, last in ((0, 1), (1, 3), (3, 27), (27, length)):
        own = {name: arguments[name][first:last] for name in op.ragged}
        places = {
            "query_starts": torch.tensor([0, last - first]),
            "num_cached": torch.tensor([first]),
        }
        parts.append(function(**{**arguments, **own, **places, pool: own_states}))
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(own_states[slots], states[slots])
