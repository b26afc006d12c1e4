"""Kernels are timed in a process of their own, by a clock that they cannot reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from interposer import Case, Dims, Tolerance, custom_op, place
from interposer_testing.timing import (
    KernelProcesses,
    RefusedTimesError,
    Roofline,
    TimedKernel,
    batch_times,
)

_KERNELS = """
import os, time
import torch

seen = {}

def right(x, weight): return x * weight
def wide(x, weight): return x * weight[0]
def prepare(weight): return {"weight": weight[None]}
def renaming(weight): return {"scale": weight}
def remembers_shapes(x, weight): return seen.setdefault(x.shape, x * weight)
# Buffers start at random pages, so only the place within a page repeats in every run.
def remembers_addresses(x, weight): return seen.setdefault(x.data_ptr() % 4096, x * weight)
def patches_the_clock(x, weight):
    time.perf_counter = lambda: 0.0
    return x * weight
def patches_the_comparison(x, weight):
    torch.Tensor.any = lambda *a, **k: torch.tensor(False)
    torch.equal = torch.allclose = lambda *a, **k: True
    return torch.empty_like(x)
def raising(x, weight): raise OSError("no such device\\nframe 0")
def leaving(x, weight): os._exit(0)
"""


def scale_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    yield scale_sample(dtype, {"width": 4}, 2, seed)


def scale_sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    width, generator = int(dims["width"]), torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, width, generator=generator).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    return Case(f"{num_tokens} tokens", {"x": x, "weight": weight}, dims)


@custom_op(
    "scale",
    cases=scale_cases,
    sample=scale_sample,
    constants=("weight",),
    tolerance=Tolerance(roundings=1),
)
def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x * weight``."""
    return x * weight


def draw(seed: int) -> Case:
    return scale_sample(torch.float32, {"width": 8}, 3, seed)


def ticks() -> Callable[[], float]:
    """Return a clock that advances by a second with each reading."""
    readings = count()
    return lambda: float(next(readings))


ROOFLINE = Roofline(ticks(), rounds=1)


def timed(processes: KernelProcesses, name: str, prepare: str = "") -> TimedKernel:
    process = processes.of("acme" if name != "right" else "honest")
    prepare = prepare and f"acme_timed:{prepare}"
    return TimedKernel(name, scale, process, f"acme_timed:{name}", prepare, draw(0), ticks())


@pytest.mark.process
def test_cheats_get_no_time_or_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_timed.py").write_text(_KERNELS)
    monkeypatch.syspath_prepend(tmp_path)

    def times(*kernels: tuple[str, str]) -> dict[str, tuple[float, float, float]]:
        with processes.scope():
            subjects = [timed(processes, *kernel) for kernel in kernels]
            found = batch_times(subjects, draw, 5, ROOFLINE)
            # Kernels stand still while other kernels, or the rates of the machine, are measured.
            assert processes.of("honest").functions.process.is_stopped()
            return found

    refusals = {
        ("remembers_shapes", ""): "returned a wrong result: output 0: ",
        ("remembers_addresses", ""): "returned a wrong result: output 0: ",
        ("patches_the_comparison", ""): "returned a wrong result: output 0: ",
        ("raising", ""): "raised OSError('no such device ...",
        ("wide", "renaming"): "prepare returned ['scale'], not ['weight']",
        ("missing", ""): "raised AttributeError(",
        ("leaving", ""): "cannot be timed: the process of the kernel left with exit code 0",
    }
    with KernelProcesses(type(place().platform)) as processes:
        second = (1.0, 1.0, 1.0)
        kernels = (("right", ""), ("patches_the_clock", ""), ("wide", "prepare"))
        assert times(*kernels) == {name: second for name, _ in kernels}
        for kernel, reason in refusals.items():
            with pytest.raises(RefusedTimesError) as caught:
                times(("right", ""), kernel)
            assert caught.value.name == kernel[0]
            assert caught.value.reason.startswith(reason)
            # The process of another distribution goes on.
            assert times(("right", "")) == {"right": second}


def test_a_time_below_the_floor_is_impossible() -> None:
    case, generator = draw(0), torch.Generator()
    limits = ROOFLINE.of(scale, case, generator)
    assert ROOFLINE.impossible(scale, case, limits.floor, generator) is None
    assert ROOFLINE.impossible(scale, case, limits.floor / 2, generator) == limits


def test_only_arguments_that_are_read_count_for_the_floor() -> None:
    @custom_op("first", cases=scale_cases, constants=("weight",))
    def first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x[:1] * weight

    case, generator = draw(0), torch.Generator().manual_seed(0)
    big = Case("", {"x": torch.ones(1 << 20, 8), "weight": torch.ones(8)}, {"width": 8})
    assert ROOFLINE.impossible(first, big, 1e-4, generator) is None
    assert ROOFLINE.impossible(scale, big, 1e-4, generator) is not None
    assert ROOFLINE.impossible(first, case, 0.0, generator) is not None


@pytest.mark.parametrize(
    ("dtype", "speedup"),
    # torch cannot multiply matrices of the last two on a CPU, or only slowly.
    [(torch.float32, 1), (torch.float16, 1), (torch.int8, 4), (torch.float8_e8m0fnu, 4)],
    ids=str,
)
def test_the_floor_of_a_product_depends_on_the_bits_of_the_arguments(
    dtype: torch.dtype, speedup: float
) -> None:
    @custom_op("product", cases=scale_cases)
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.float()

    arguments = {"x": torch.ones(512, 512), "weight": torch.ones(512, 512).to(dtype)}
    limits = ROOFLINE.of(product, Case("", arguments, {"width": 8}), torch.Generator())
    assert limits.limit == "arithmetic"
    # The clock of this roofline says that a product of two matrices with 1024 rows takes a second.
    assert limits.roofline == 0.125
    assert limits.floor == limits.roofline / 2 / speedup
