"""The conformance suite blames wrong kernels and no right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer import (
    Capability,
    Case,
    Device,
    Kernel,
    OpEntry,
    Registry,
    Request,
    Requires,
    Tolerance,
    Verdict,
    custom_op,
)
from interposer.records import Record
from interposer_testing import Fault, Trial, check_kernel, check_lightness, conformance

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICE = Device("cpu", "cpu", "test", Capability("x86_64"))


# Ops: a norm with a second output, a write into a cache, and a sum over pages.


def norm_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "rows": torch.randn(5, 300, generator=generator),
        "strided": torch.randn(4, 96, generator=generator)[:, 16:80],
        "smaller than eps": torch.randn(3, 64, generator=generator) * 1e-3,
        "zeros": torch.zeros(2, 8),
        "no rows": torch.zeros(0, 8),
    }
    for label, x in inputs.items():
        width = x.shape[-1]
        weight = torch.rand(width, generator=generator).to(dtype)
        arguments = {"x": x.to(dtype), "weight": weight, "eps": 1e-5}
        yield Case(label, arguments, {"width": width}, reduction=width, magnitude=4.0)


@custom_op("toy_norm", cases=norm_cases, constants=("weight",), tolerance=Tolerance(roundings=3))
def toy_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight).to(x.dtype), x.argmax(-1) if x.numel() else x.sum(-1).long()


def write_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    cache = torch.full((6, 4), torch.nan, dtype=dtype)
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    arguments = {"cache": cache, "rows": rows, "places": torch.tensor([4, 0, 3])}
    yield Case("scattered", arguments, reduction=0)


@custom_op("toy_write", cases=write_cases, mutates=("cache",), tolerance=Tolerance(roundings=0))
def toy_write(cache: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
    cache[places] = rows


def sum_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed)
    for label, lengths in {"within a page": [3, 6], "at page edges": [4, 8]}.items():
        table = torch.tensor([[4, 1], [0, 3]])
        pages = torch.full((5, 4), torch.nan)
        for sequence, length in enumerate(lengths):
            for position in range(length):
                page = table[sequence, position // 4]
                pages[page, position % 4] = torch.rand((), generator=generator)
        arguments = {"pages": pages.to(dtype), "table": table, "lengths": torch.tensor(lengths)}
        yield Case(label, arguments, reduction=8, magnitude=8.0)


@custom_op("toy_sum", cases=sum_cases)
def toy_sum(pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    rows = pages[table].flatten(1)
    is_written = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
    return torch.where(is_written, rows, 0).sum(-1)


def faults_of(
    op: Any, function: Callable[..., Any], prepare: Callable[..., Mapping[str, Any]] | None = None
) -> list[Fault]:
    return [
        fault
        for dtype in DTYPES
        for case in op.cases(dtype, 0)
        for fault in check_kernel(op, function, case, prepare=prepare)
    ]


# Kernels that are right, each in its own way.


def norm_in_float64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    wide = x.double()
    y = wide / (wide.square().sum(-1, keepdim=True) / wide.shape[-1] + eps).sqrt() * weight
    return y.to(x.dtype), toy_norm.reference(x, weight, eps)[1]


def norm_column_by_column(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    total = torch.zeros(x.shape[0])
    for column in x.float().unbind(-1):
        total = total + column * column
    y = x.float() * (total / x.shape[-1] + eps).rsqrt()[:, None] * weight
    return y.to(x.dtype), toy_norm.reference(x, weight, eps)[1]


def norm_rounding_before_the_weight(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    scaled, index = toy_norm.reference(x, torch.ones_like(weight), eps)
    return scaled * weight, index


def norm_into_empty_memory(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    y, index = toy_norm.reference(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype)
    out.copy_(y)
    return out, index


def write_row_by_row(cache: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
    for place, row in zip(places.tolist(), rows, strict=True):
        cache[place].copy_(row)


def sum_token_by_token(
    pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    sums = torch.zeros(len(lengths))
    for sequence, length in enumerate(lengths.tolist()):
        for position in range(length):
            sums[sequence] += pages[table[sequence, position // 4], position % 4]
    return sums.to(pages.dtype)


@pytest.mark.parametrize(
    ("op", "function"),
    [
        (toy_norm, toy_norm.reference),
        (toy_norm, norm_in_float64),
        (toy_norm, norm_column_by_column),
        (toy_norm, norm_rounding_before_the_weight),
        (toy_norm, norm_into_empty_memory),
        (toy_write, toy_write.reference),
        (toy_write, write_row_by_row),
        (toy_sum, toy_sum.reference),
        (toy_sum, sum_token_by_token),
    ],
)
def test_correct_kernels_have_no_faults(op: Any, function: Callable[..., Any]) -> None:
    assert faults_of(op, function) == []


# Kernels that are wrong.


def norm_ignoring_eps(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return toy_norm.reference(x, weight, 1e-9)


def norm_without_eps(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return toy_norm.reference(x, weight, 0.0)


def norm_summing_in_storage_dtype(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    total = torch.zeros(x.shape[0], dtype=x.dtype)
    for column in x.unbind(-1):
        total = total + column * column
    y = x.float() * (total.float() / x.shape[-1] + eps).rsqrt()[:, None] * weight
    return y.to(x.dtype), toy_norm.reference(x, weight, eps)[1]


def norm_with_a_wrong_index(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    y, index = toy_norm.reference(x, weight, eps)
    return y, index + 1


def norm_taking_rows_as_dense(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    y, _ = toy_norm.reference(x.as_strided(x.shape, (x.shape[-1], 1)), weight, eps)
    return y, toy_norm.reference(x, weight, eps)[1]


def norm_writing_its_input(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    result = toy_norm.reference(x, weight, eps)
    x.mul_(2)
    return result


def norm_writing_beside_its_input(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(0)
    return toy_norm.reference(x, weight, eps)


def norm_into_its_input(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    y, index = toy_norm.reference(x, weight, eps)
    return x.copy_(y), index


def norm_of_flat_shape(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    y, index = toy_norm.reference(x, weight, eps)
    return y.flatten(), index


def norm_of_wide_dtype(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    y, index = toy_norm.reference(x.float(), weight, eps)
    return y, index


def norm_of_transposed_stride(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    y, index = toy_norm.reference(x, weight, eps)
    return y.T.contiguous().T, index


def norm_as_a_list(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return list(toy_norm.reference(x, weight, eps))


def norm_of_one_output(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return toy_norm.reference(x, weight, eps)[0]


def norm_leaving_a_column(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    y, index = toy_norm.reference(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype)
    out[:, :-1] = y[:, :-1]
    return out, index


BUFFERS: dict[object, torch.Tensor] = {}


def norm_into_one_buffer(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    y, index = toy_norm.reference(x, weight, eps)
    return BUFFERS.setdefault((x.shape, x.dtype), torch.empty(y.shape, dtype=y.dtype)).copy_(
        y
    ), index


def norm_scribbling_on_earlier_results(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    y, index = toy_norm.reference(x, weight, eps)
    BUFFERS.pop("earlier", y).fill_(0)
    BUFFERS["earlier"] = y
    return y.clone() if x.numel() == 0 else y, index


def norm_with_outputs_in_one_memory(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    y, index = toy_norm.reference(x, weight, eps)
    room = torch.empty(2 * index.numel() + y.numel(), dtype=torch.int64)
    both = room[: index.numel()].copy_(index), room[index.numel() :].view(y.dtype)
    return both[1][: y.numel()].view(y.shape).copy_(y), both[0]


def write_nothing(cache: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
    pass


def write_one_row_too_many(cache: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
    toy_write.reference(cache, rows, places)
    cache[1] = 0


def write_behind_the_cache(cache: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
    toy_write.reference(cache, rows, places)
    cache.as_strided((1,), (1,), cache.storage_offset() + cache.numel()).fill_(0)


def write_with_an_answer(
    cache: torch.Tensor, rows: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    toy_write.reference(cache, rows, places)
    return cache


def sum_of_whole_pages(
    pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    return toy_sum.reference(pages, table, (lengths + 3) // 4 * 4)


def sum_weighing_by_zero(
    pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    rows = pages[table].flatten(1)
    return (rows * (torch.arange(8) < lengths[:, None])).sum(-1)


def sum_missing_the_last_token_of_a_page(
    pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    return toy_sum.reference(pages, table, lengths - (lengths % 4 == 0).long())


@pytest.mark.landing(11)
@pytest.mark.parametrize(
    ("op", "function", "check"),
    [
        (toy_norm, norm_ignoring_eps, "value"),
        (toy_norm, norm_without_eps, "value"),
        (toy_norm, norm_summing_in_storage_dtype, "value"),
        (toy_norm, norm_with_a_wrong_index, "value"),
        (toy_norm, norm_taking_rows_as_dense, "value"),
        (toy_norm, norm_writing_its_input, "mutation"),
        (toy_norm, norm_writing_beside_its_input, "guard"),
        (toy_norm, norm_into_its_input, "alias"),
        (toy_norm, norm_of_flat_shape, "shape"),
        (toy_norm, norm_of_wide_dtype, "dtype"),
        (toy_norm, norm_of_transposed_stride, "stride"),
        (toy_norm, norm_as_a_list, "structure"),
        (toy_norm, norm_of_one_output, "structure"),
        (toy_norm, norm_leaving_a_column, "value"),
        (toy_norm, norm_into_one_buffer, "alias"),
        (toy_norm, norm_scribbling_on_earlier_results, "alias"),
        (toy_norm, norm_with_outputs_in_one_memory, "alias"),
        (toy_write, write_nothing, "value"),
        (toy_write, write_one_row_too_many, "value"),
        (toy_write, write_behind_the_cache, "guard"),
        (toy_write, write_with_an_answer, "structure"),
        (toy_sum, sum_of_whole_pages, "value"),
        (toy_sum, sum_weighing_by_zero, "value"),
        (toy_sum, sum_missing_the_last_token_of_a_page, "value"),
    ],
)
def test_wrong_kernels_have_the_expected_fault(
    op: Any, function: Callable[..., Any], check: str
) -> None:
    assert check in {fault.check for fault in faults_of(op, function)}


def test_a_fault_states_index_error_and_bound() -> None:
    def shifted(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        y, index = toy_norm.reference(x, weight, eps)
        y[1, 7] += 0.5
        return y, index

    case = next(iter(toy_norm.cases(torch.float32, 0)))
    (fault,) = check_kernel(toy_norm, shifted, case)
    assert (fault.check, fault.where) == ("value", "output 0")
    assert fault.error == pytest.approx(0.5, abs=1e-4)
    assert fault.bound is not None
    assert 0 < fault.bound < 1e-3
    assert "[1, 7]" in str(fault)
    assert "1 of 1500 wrong" in str(fault)


def halved(*, weight: torch.Tensor) -> dict[str, Any]:
    return {"weight": (weight / 2,)}


def norm_of_halved_weight(x: torch.Tensor, weight: tuple[torch.Tensor], eps: float) -> Any:
    y, index = toy_norm.reference(x, weight[0], eps)
    return y * 2, index


def test_constants_are_prepared() -> None:
    assert faults_of(toy_norm, norm_of_halved_weight, halved) == []
    assert faults_of(toy_norm, toy_norm.reference, lambda weight: {"weight": weight + 1})


def doubly_rounded_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    y, places = toy_norm.reference(x, weight, eps)
    return y * (1 + 4 * torch.finfo(x.dtype).eps), places


@pytest.mark.process
@pytest.mark.parametrize("extra", [0, 8])
def test_extra_roundings_widen_the_bound_of_one_kernel(trials_of: TrialsOf, extra: int) -> None:
    """A kernel may be off by eight roundings more if its record says so; the op stays as it is."""
    target = f"{__name__}:doubly_rounded_norm"
    record = Kernel("toy_norm", "toy_norm_rough", target, extra_roundings=extra)
    trials = trials_of(OpEntry("toy_norm", f"{__name__}:toy_norm"), record)
    wrong = {t.candidate.name for t in trials if t.aspect == "numerics" and t.verdict and t.run()}
    assert wrong == (set() if extra else {"toy_norm_rough"})
    assert toy_norm.tolerance.roundings == 3
    assert toy_norm.allowing(0) is toy_norm


def test_preparing_must_not_write_the_constants() -> None:
    def greedy(*, weight: torch.Tensor) -> dict[str, Any]:
        prepared = halved(weight=weight)
        weight.zero_()
        return prepared

    faults = faults_of(toy_norm, norm_of_halved_weight, greedy)
    assert {(fault.check, fault.where) for fault in faults} == {("mutation", "argument 'weight'")}


def test_preparing_must_return_the_constants() -> None:
    with pytest.raises(ValueError, match="weight"):
        faults_of(toy_norm, toy_norm.reference, lambda weight: {})


@given(
    dtype=st.sampled_from(DTYPES),
    values=st.lists(st.floats(-100, 100, width=16), min_size=2, max_size=40),
    scale=st.floats(0.01, 100),
)
def test_rounding_to_storage_is_within_the_bound(
    dtype: torch.dtype, values: list[float], scale: float
) -> None:
    exact = torch.tensor(values, dtype=torch.float64) * scale
    stored = exact.to(dtype)
    bound = Tolerance(roundings=1).bound(exact, dtype, Case("", {}, reduction=0))
    assert bool(((stored.double() - exact).abs() <= bound).all())


@given(values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=60), seed=st.integers())
def test_a_float32_sum_in_any_order_is_within_the_bound(values: list[float], seed: int) -> None:
    terms = torch.tensor(values)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed % 2**60))
    total = torch.zeros(())
    for term in terms[order]:
        total = total + term
    exact = terms.double().sum()
    case = Case("", {}, reduction=len(values), magnitude=float(terms.double().abs().sum()))
    bound = Tolerance(roundings=0).bound(exact, torch.float32, case)
    assert float((total.double() - exact).abs()) <= float(bound)


# Registered kernels.


def raise_an_error(*arguments: object) -> Any:
    raise ZeroDivisionError


def judge_by_raising(request: Request) -> Verdict:
    raise KeyError(request.name)


def judge_width(request: Request) -> Verdict:
    if int(request.dims["width"]) > 64:
        return Verdict.refuse("rows are wider than 64")
    return Verdict.accept()


TrialsOf = Callable[..., list[Trial]]


@pytest.fixture
def trials_of(registered: Callable[..., Registry]) -> TrialsOf:
    def trials(*records: Record) -> list[Trial]:
        everything = conformance(registered(*records), DEVICE)
        return [trial for trial in everything if trial.aspect == "numerics"]

    return trials


def norm_kernel(name: str, target: str, **options: Any) -> Kernel:
    return Kernel("toy_norm", name, f"{__name__}:{target}", **options)


NORM = OpEntry("toy_norm", f"{__name__}:toy_norm")


@pytest.mark.process
def test_every_case_of_every_candidate_is_a_trial(trials_of: TrialsOf) -> None:
    good = norm_kernel("good", "norm_in_float64")
    bad = norm_kernel("bad", "norm_ignoring_eps")
    prepared = norm_kernel("prepared", "norm_of_halved_weight", prepare=f"{__name__}:halved")
    trials = trials_of(NORM, good, bad, prepared)
    cases = len(DTYPES) * len(list(norm_cases(torch.float32, 0)))
    names = [trial.candidate.name for trial in trials]
    assert {name: names.count(name) for name in names} == dict.fromkeys(
        ("reference", "good", "bad", "prepared"), cases
    )
    assert len(set(map(str, trials))) == len(trials)
    assert {trial.candidate.name for trial in trials if trial.run()} == {"bad"}


@pytest.mark.process
def test_a_refused_trial_differs_from_a_passed_one(trials_of: TrialsOf) -> None:
    only_bfloat16 = norm_kernel(
        "only_bfloat16", "raise_an_error", requires=Requires(dtypes=("bfloat16",))
    )
    narrow = norm_kernel("narrow", "norm_in_float64", predicate=f"{__name__}:judge_width")
    trials = trials_of(NORM, only_bfloat16, narrow)
    refused = {trial.verdict.reason for trial in trials if not trial.verdict}
    assert refused == {
        "needs dtype bfloat16, got float32",
        "needs dtype bfloat16, got float16",
        "rows are wider than 64",
    }
    assert all(trial.run() == [] for trial in trials if not trial.verdict)


@pytest.mark.process
def test_candidates_for_other_platforms_are_omitted(trials_of: TrialsOf) -> None:
    elsewhere = norm_kernel("elsewhere", "raise_an_error", platform="elsewhere")
    cpu_kernel = norm_kernel("here", "norm_in_float64", platform="cpu")
    assert {t.candidate.name for t in trials_of(NORM, elsewhere, cpu_kernel)} == {
        "reference",
        "here",
    }


@pytest.mark.process
def test_an_exception_is_a_fault_with_traceback(trials_of: TrialsOf) -> None:
    raising = norm_kernel("raising", "raise_an_error")
    missing = norm_kernel("missing", "nowhere")
    judging = norm_kernel("judging", "norm_in_float64", predicate=f"{__name__}:judge_by_raising")
    trials = trials_of(NORM, raising, missing, judging)
    reasons = {"raising": "ZeroDivisionError", "missing": "nowhere", "judging": "KeyError"}
    for trial in trials:
        if trial.candidate.name == "reference":
            continue
        (fault,) = trial.run()
        assert fault.check == "call"
        assert reasons[trial.candidate.name] in fault.reason
        assert "Traceback" in fault.traceback


def test_an_op_that_cannot_be_loaded_is_a_fault(trials_of: TrialsOf) -> None:
    (trial,) = trials_of(OpEntry("toy_norm", f"{__name__}:nowhere"))
    (fault,) = trial.run()
    assert fault.check == "import"
    assert "nowhere" in fault.reason


# Plugin modules.


@pytest.mark.process
def test_a_light_module_passes() -> None:
    assert check_lightness("interposer.hookspecs") == []


@pytest.mark.process
def test_a_heavy_module_is_a_fault() -> None:
    (fault,) = check_lightness("interposer._contract.op")
    assert fault.check == "import"
    assert "torch" in fault.reason


@pytest.mark.process
def test_a_module_that_cannot_be_imported_is_a_fault() -> None:
    (fault,) = check_lightness("interposer.nowhere")
    assert "ModuleNotFoundError" in fault.traceback
