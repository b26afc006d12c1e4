"""Every declared property of a kernel is tried, and its own aspect finds the violation."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.waiting import WAIT_SECONDS
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from interposer import (
    Capability,
    Case,
    Device,
    Kernel,
    OpEntry,
    Platform,
    Registry,
    Requires,
    Tolerance,
    Verdict,
    custom_op,
)
from interposer.records import PlatformEntry, Record
from interposer_testing import Trial, conformance
from interposer_testing._trials.trial import Aspect
from interposer_testing.cases import Axis, CaseSpace, Point, normal

EVERYTHING = frozenset(
    {"batch_invariant", "deterministic", "graph_safe", "in_place", "opaque", "traceable"}
)
ALL_BUT_OPAQUE = EVERYTHING - {"opaque"}


# A platform that captures graphs: it writes down what torch is asked for, and asks for it again.


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = _pytree.tree_leaves(func(*args, **kwargs))
            for one, other in zip(_pytree.tree_leaves(result), again, strict=True):
                if isinstance(one, torch.Tensor) and one is not other:
                    one.copy_(other)


class TapePlatform(Platform):
    name = "tape"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Verdict:
        return Verdict.accept()

    def devices(self) -> Sequence[Device]:
        return [DEVICE]

    def capability(self, device: str) -> Capability:
        return DEVICE.capability

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        return [torch.float32]

    def synchronize(self, device: str) -> None:
        pass

    def capture_graph(self, step: Callable[[], object]) -> Callable[[], object]:
        recorder = Recorder()
        with recorder:
            step()
        return recorder.replay


DEVICE = Device("tape", "cpu", "test", Capability("any"))
PLAIN_DEVICE = Device("plain", "cpu", "test", Capability("any"))
TAPE = PlatformEntry("tape", f"{__name__}:TapePlatform")


# Ops: a sum of squares with a scale, and a write into rows of a cache.


def scaled_case(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    x = normal(point["shape"], dtype, generator)
    weight = normal(point["shape"][1:], dtype, generator)
    width = x.shape[-1]
    return Case("", {"x": x, "weight": weight}, {"width": width}, width, magnitude=16.0 * width)


SHAPES = {"rows": (5, 8), "one row": (1, 8), "no rows": (0, 8), "wide": (3, 70)}
scaled_space = CaseSpace(
    scaled_case,
    Axis("shape", SHAPES),
    strided={"x": "rows"},
    special={"x": ("NaN",)},
    crossed={"shape": ("rows",)},
)


@custom_op("scaled", cases=scaled_space, constants=("weight",), batched=("x",))
def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide.square() * weight).to(x.dtype)


@custom_op("scaled", cases=scaled_space, constants=("weight",), batched=("x",))
def scaled_by_size(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Break where a size is no plain integer."""
    return scaled.reference(x, weight) if x.shape[0].to_bytes(8) else torch.empty_like(x)


@custom_op("scaled", cases=scaled_space, constants=("weight",), batched=("x",))
def scaled_waiting(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Wait for a value."""
    return x * math.nan if x.isinf().any() else scaled.reference(x, weight)


def write_case(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    cache = torch.full((6, 4), torch.nan, dtype=dtype)
    rows = normal((3, 4), dtype, generator)
    return Case("", {"cache": cache, "rows": rows, "places": torch.tensor([4, 0, 3])}, reduction=0)


@custom_op(
    "write",
    cases=CaseSpace(write_case, Axis("", {"": 0}), special={"rows": ("negative zeros",)}),
    mutates=("cache",),
    batched=("rows", "places"),
    tolerance=Tolerance(roundings=0),
)
def write(cache: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
    cache[places] = rows


# An op on sequences that lie one after the other, and kernels of it.


def raised_case(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    lengths = torch.tensor(point["lengths"])
    x = normal((int(lengths.sum()), 4), dtype, generator)
    starts = torch.cat([torch.tensor([0]), lengths.cumsum(0)])
    by = normal((len(lengths),), dtype, generator)
    return Case("", {"x": x, "starts": starts, "by": by}, magnitude=16.0)


LENGTHS = {"three": (2, 4, 3), "one": (5,), "none": ()}


@custom_op(
    "raised",
    cases=CaseSpace(raised_case, Axis("lengths", LENGTHS), strided={"x": "rows"}),
    batched=("by",),
    ragged={"x": "starts"},
)
def raised(x: torch.Tensor, starts: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    tokens = torch.arange(x.shape[0], device=x.device)
    sequence = torch.bucketize(tokens, starts[1:], right=True)
    return x + by[sequence][:, None]


def raised_in_order(x: torch.Tensor, starts: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return raised.reference(x, starts, by)


def raised_one_by_one(x: torch.Tensor, starts: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    tokens, out = torch.arange(x.shape[0], device=x.device), x.clone()
    for number in range(by.shape[0]):
        inside = (tokens >= starts[number]) & (tokens < starts[number + 1])
        out = torch.where(inside[:, None], x + by[number], out)
    return out


def raised_less_at_the_end(x: torch.Tensor, starts: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Treat the last of several sequences in another way."""
    y = raised.reference(x, starts, by)
    last = torch.arange(x.shape[0]) >= starts[-2] if len(starts) > 2 else torch.tensor(False)
    return torch.where(last.view(-1, 1), lower(y), y)


# Kernels of ``scaled`` that are right.


def by_weight_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.float() * weight.float() * x.float()).to(x.dtype)


def counted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    COUNTED.append(len(x))
    return by_weight_first(x, weight)


COUNTED: list[int] = []


def halve(*, weight: torch.Tensor) -> dict[str, Any]:
    return {"weight": (weight / 2,)}


def of_half_the_weight(x: torch.Tensor, weight: tuple[torch.Tensor]) -> torch.Tensor:
    return (x.float().square() * weight[0].float() * 2).to(x.dtype)


def row_by_row_in_python(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = [[float(value) for value in row] for row in x.tolist()]
    wide = torch.tensor(rows, dtype=torch.float32).view(x.shape)
    return (wide.square() * weight.float()).to(x.dtype)


# Kernels of ``scaled`` that break one promise.

CALLS = itertools.count()
SCRATCH: dict[object, torch.Tensor] = {}
# The check of threads calls a kernel from eight at once, each as often as the others.
EIGHT_THREADS = threading.Barrier(8, timeout=WAIT_SECONDS)


def with_a_branch_on_a_value(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return by_weight_first(x, weight) if x.isnan().any() else scaled.reference(x, weight)


def with_another_sum_when_traced(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    factor = 1.5 if torch.compiler.is_compiling() else 1.0
    return scaled.reference(x, weight) * factor


def with_a_loop_over_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    for row in range(x.shape[0]):
        out[row] = scaled.reference(x[row], weight)
    return out


def with_a_peak_on_the_host(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    peak = x.float().nan_to_num().abs().sum() + 1
    return (x.float().square() * weight.float() * (float(peak) / peak)).to(x.dtype)


def with_one_scratch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scratch = SCRATCH.setdefault(x.shape, torch.empty(x.shape))
    scratch.copy_(x)
    if threading.current_thread() is not threading.main_thread():
        EIGHT_THREADS.wait()  # for the copies of the others
    return (scratch.square() * weight.float()).to(x.dtype)


def with_another_last_bit_at_times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = scaled.reference(x, weight)
    return y if next(CALLS) % 3 else torch.nextafter(y, torch.zeros_like(y))


def in_other_precision_alone(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return scaled.reference(x, weight) if len(x) > 2 else lower(scaled.reference(x, weight))


def in_other_precision_at_the_end(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Look like a vector loop whose remainder depends on the length of the whole batch."""
    y = scaled.reference(x, weight)
    return torch.cat([y[:-1], lower(y[-1:])]) if len(x) > 2 else y


def lower(y: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(y, torch.full_like(y, -torch.inf))


FLOAT32 = Requires(dtypes=("float32",))


def kernel(target: str, *, properties: frozenset[str] = frozenset(), **options: Any) -> Kernel:
    return Kernel(
        "scaled",
        target,
        f"{__name__}:{target}",
        requires=FLOAT32,
        properties=properties,
        **options,
    )


SCALED = OpEntry("scaled", f"{__name__}:scaled", ALL_BUT_OPAQUE)
Tried = Callable[..., list[Trial]]


@pytest.fixture
def tried(registered: Callable[..., Registry]) -> Tried:
    def trials(*records: Record, device: Device = DEVICE, quick: bool = True) -> list[Trial]:
        all_trials = conformance(
            registered(TAPE, *records), device, op=records[0].name, quick=quick
        )
        return list(all_trials)

    return trials


def blamed(trials: list[Trial], name: str) -> set[Aspect]:
    return {trial.aspect for trial in trials if trial.candidate.name == name and trial.run()}


def aspects(trials: list[Trial], name: str) -> set[Aspect]:
    return {trial.aspect for trial in trials if trial.candidate.name == name}


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("target", "prepare", "properties"),
    [
        ("by_weight_first", "", ALL_BUT_OPAQUE),
        ("of_half_the_weight", "halve", ALL_BUT_OPAQUE),
        ("row_by_row_in_python", "", frozenset({"opaque", "deterministic", "batch_invariant"})),
        ("of_half_the_weight", "halve", frozenset({"opaque"})),
    ],
)
def test_a_correct_kernel_has_no_faults(
    tried: Tried, target: str, prepare: str, properties: frozenset[str]
) -> None:
    prepared = f"{__name__}:{prepare}" if prepare else ""
    trials = tried(SCALED, kernel(target, properties=properties, prepare=prepared))
    # One trace with a number of rows that varies stands for both where time is short.
    expected: set[Aspect] = {"numerics", "opcheck", "threads", "compile dynamic"}
    claims: dict[str, Aspect] = {
        "deterministic": "determinism",
        "batch_invariant": "batch invariance",
        "graph_safe": "graph capture",
    }
    expected |= {aspect for claim, aspect in claims.items() if claim in properties}
    assert aspects(trials, target) == expected
    assert [fault for trial in trials for fault in trial.run()] == []
    assert not any(trial.not_run for trial in trials)


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("target", "aspect", "claims"),
    [
        pytest.param(
            *("with_a_branch_on_a_value", "compile static", {"deterministic", "batch_invariant"}),
            marks=[pytest.mark.process, pytest.mark.slow],  # trials in full look for a compiler
        ),
        pytest.param(
            *("with_another_sum_when_traced", "compile static", {"graph_safe"}),
            marks=[pytest.mark.process, pytest.mark.slow],
        ),
        ("with_a_loop_over_rows", "compile dynamic", ALL_BUT_OPAQUE),
        ("with_a_peak_on_the_host", "graph capture", {"graph_safe", "opaque"}),
        ("with_one_scratch", "threads", {"deterministic", "batch_invariant", "opaque"}),
        ("with_another_last_bit_at_times", "determinism", {"deterministic", "opaque"}),
        ("in_other_precision_alone", "batch invariance", {"deterministic", "batch_invariant"}),
        ("in_other_precision_at_the_end", "batch invariance", {"batch_invariant", "graph_safe"}),
    ],
)
def test_a_false_property_fails_only_in_its_own_aspect(
    tried: Tried, target: str, aspect: Aspect, claims: set[str]
) -> None:
    needed_properties = {"traceable"} if aspect.startswith("compile") else set()
    quick = aspect != "compile static"
    trials = tried(
        SCALED, kernel(target, properties=frozenset(claims | needed_properties)), quick=quick
    )
    failed_aspects = blamed(trials, target)
    assert aspect in failed_aspects
    # A graph break is one for any number of rows.
    assert failed_aspects - {aspect} <= (
        {"compile dynamic"} if aspect == "compile static" else set()
    )
    assert blamed(trials, "reference") == set()


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("target", "compiles", "aspect"),
    [
        ("raised_in_order", "traceable", None),
        ("raised_one_by_one", "traceable", "compile dynamic"),
        ("raised_less_at_the_end", "opaque", "batch invariance"),
    ],
)
def test_properties_of_ragged_sequences_are_checked(
    tried: Tried, target: str, compiles: str, aspect: Aspect | None
) -> None:
    properties = frozenset({"batch_invariant", compiles})
    found = Kernel(
        "raised", target, f"{__name__}:{target}", requires=FLOAT32, properties=properties
    )
    entry = OpEntry("raised", f"{__name__}:raised", frozenset({"batch_invariant", "traceable"}))
    trials = tried(entry, found)
    assert aspects(trials, target) >= {"compile dynamic", "batch invariance"}
    assert not any(trial.not_run for trial in trials)
    assert blamed(trials, target) == ({aspect} if aspect else set())
    assert blamed(trials, "reference") == set()


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    "target",
    [
        "with_a_branch_on_a_value",
        "with_a_loop_over_rows",
        "with_a_peak_on_the_host",
        "with_another_last_bit_at_times",
        "in_other_precision_alone",
    ],
)
def test_undeclared_properties_are_not_tested(tried: Tried, target: str) -> None:
    trials = tried(SCALED, kernel(target))
    assert aspects(trials, target) == {"numerics", "opcheck", "threads"}
    assert blamed(trials, target) == set()


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("target", "check", "words"),
    [
        ("with_a_branch_on_a_value", "compile", "raised"),
        ("with_another_sum_when_traced", "compile", "above the bound"),
        ("with_a_peak_on_the_host", "graph", "above the bound"),
        ("with_one_scratch", "thread", "one thread and eight threads"),
        ("with_another_last_bit_at_times", "determinism", "runs 1 and"),
        ("in_other_precision_alone", "batch", "calls with 5 rows and one row"),
    ],
)
def test_a_fault_names_its_check_and_reason(
    tried: Tried, target: str, check: str, words: str
) -> None:
    trials = tried(SCALED, kernel(target, properties=ALL_BUT_OPAQUE))
    faults = [fault for t in trials if t.candidate.name == target for fault in t.run()]
    assert any(fault.check == check and words in str(fault) for fault in faults)


def test_an_op_that_traces_sizes_wrongly_is_found_by_opcheck(tried: Tried) -> None:
    trials = tried(OpEntry("scaled", f"{__name__}:scaled_by_size"))
    assert blamed(trials, "reference") == {"opcheck"}
    (fault,) = [fault for trial in trials for fault in trial.run()]
    assert fault.where == "test_aot_dispatch_dynamic"
    assert "to_bytes" in fault.reason


def test_a_reference_that_waits_for_a_value_is_found_without_a_platform(tried: Tried) -> None:
    safe = frozenset({"graph_safe"})
    waiting = OpEntry("scaled", f"{__name__}:scaled_waiting", safe)
    trials = tried(waiting, device=PLAIN_DEVICE)
    (capture,) = [trial for trial in trials if trial.aspect == "graph capture"]
    assert not capture.not_run
    assert [fault.check for fault in capture.run()] == ["graph"]


def test_a_property_that_cannot_be_tested_states_the_reason(tried: Tried) -> None:
    trials = tried(
        SCALED, kernel("by_weight_first", properties=ALL_BUT_OPAQUE), device=PLAIN_DEVICE
    )
    (trial,) = [t for t in trials if t.not_run]
    assert (trial.candidate.name, trial.aspect) == ("by_weight_first", "graph capture")
    assert "no plugin declares the platform 'plain'" in trial.not_run
    assert trial.run() == []


@pytest.mark.slow  # a first run compiles for twenty seconds
@pytest.mark.process  # trials in full look for a compiler
def test_ops_on_a_cache_with_nan_have_no_faults(tried: Tried) -> None:
    trials = tried(OpEntry("write", f"{__name__}:write", ALL_BUT_OPAQUE), quick=False)
    assert {trial.aspect for trial in trials} >= {"opcheck", "batch invariance", "graph capture"}
    assert [fault for trial in trials for fault in trial.run()] == []


def test_the_sign_of_zero_matters_for_exact_ops(tried: Tried) -> None:
    adding = Kernel("write", "adding", f"{__name__}:write_adding_zero")
    trials = tried(OpEntry("write", f"{__name__}:write"), adding)
    faults = [f for t in trials if t.candidate.name == "adding" for f in t.run()]
    assert faults
    assert all("-0.0 expected" in fault.reason and fault.check == "value" for fault in faults)
    assert blamed(trials, "reference") == set()


def write_adding_zero(cache: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
    cache[places] = rows + 0.0


@pytest.mark.process  # trials in full look for a compiler
def test_a_kernel_is_tested_in_every_accepted_dtype(tried: Tried) -> None:
    everywhere = Kernel("scaled", "everywhere", f"{__name__}:by_weight_first")
    float32_kernel = kernel("by_weight_first")
    dtypes: dict[str, set[str]] = {}
    for trial in tried(SCALED, everywhere, float32_kernel, quick=False):
        if trial.aspect == "threads":
            dtypes.setdefault(trial.candidate.name, set()).add(trial.request.dtype)
    assert dtypes["everywhere"] == dtypes["reference"] == {"float32", "bfloat16", "float16"}
    assert dtypes["by_weight_first"] == {"float32"}


@pytest.mark.process  # trials in full look for a compiler
def test_names_of_trials_are_unique(tried: Tried) -> None:
    trials = tried(SCALED, kernel("by_weight_first", properties=ALL_BUT_OPAQUE), quick=False)
    assert len(set(map(str, trials))) == len(trials)


def test_no_thread_remains_after_the_trials(tried: Tried) -> None:
    before = set(threading.enumerate())
    for trial in tried(SCALED, kernel("by_weight_first", properties=ALL_BUT_OPAQUE)):
        trial.run()
    assert set(threading.enumerate()) <= before


@pytest.mark.process  # trials in full look for a compiler
def test_quick_trials_call_a_kernel_at_most_a_hundred_times(tried: Tried) -> None:
    counts = {}
    for quick in (True, False):
        trials = tried(SCALED, kernel("counted", properties=ALL_BUT_OPAQUE), quick=quick)
        COUNTED.clear()
        for trial in trials:
            if trial.candidate.name == "counted" and not trial.aspect.startswith("compile"):
                assert trial.run() == []
        counts[quick] = len(COUNTED)
    assert counts[True] <= 100 < counts[False]
