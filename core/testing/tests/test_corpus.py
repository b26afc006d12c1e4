"""The corpus for judges: complete entries, honest kernels that are right, cheats that attack."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch

from interposer import CustomOp
from interposer_ops.activations import silu_and_mul
from interposer_ops.experts import topk_softmax
from interposer_ops.linear import linear
from interposer_ops.norms import rms_norm
from interposer_ops.rotary import rotary_embedding
from interposer_testing import check_kernel
from interposer_testing.cases import CaseSpace
from interposer_testing.corpus import Entry, Kind, Symptom, entries

OPS: dict[str, CustomOp[..., Any]] = {
    op.name: op for op in (silu_and_mul, rms_norm, linear, topk_softmax, rotary_embedding)
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAIVE_JUDGE = Path(__file__).with_name("naive_judge.py")
# A honest kernel with one of these needs starts a compiler, or an accelerator.
NOT_QUICK = ("compiler", "triton", "cuda")


def named(entry: Entry) -> str:
    return entry.name


@cache
def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"corpus_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def faults(entry: Entry, dtype: torch.dtype, every: int = 1) -> list[str]:
    """Check an honest kernel on each ``every``-th case that covers a value of an axis."""
    if entry.needs == "numpy":
        pytest.importorskip("numpy")
    op, kernel = OPS[entry.op], getattr(module_of(entry.path), entry.function)
    space = op.cases
    assert isinstance(space, CaseSpace)
    cases = [space.build(point, dtype, seed=1) for point in list(space.covering(dtype))[::every]]
    return [
        f"{case.label}: {fault}"
        for case in cases
        for fault in check_kernel(op, kernel, case, gradients=entry.backward)
    ]


def test_corpus_has_many_cheats_and_honest_kernels_of_several_ops() -> None:
    verdicts = Counter(entry.verdict for entry in entries())
    assert verdicts["refused"] >= 60
    assert verdicts["accepted"] >= 60
    for verdict in ("refused", "accepted"):
        assert {entry.op for entry in entries(verdict=verdict)} == set(OPS)


def test_every_kind_and_symptom_occurs() -> None:
    assert {entry.kind for entry in entries()} == set(get_args(Kind))
    assert {entry.symptom for entry in entries()} == set(get_args(Symptom))
    cheats, honest = entries(verdict="refused"), entries(verdict="accepted")
    assert {entry.kind for entry in cheats}.isdisjoint(entry.kind for entry in honest)


def test_entries_are_selected_by_kind_op_and_verdict() -> None:
    chosen = entries(kind="replay", op="linear", verdict="refused")
    assert {(e.kind, e.op, e.verdict) for e in chosen} == {("replay", "linear", "refused")}
    assert entries(kind="replay", verdict="accepted") == []


def test_every_file_has_entries_and_names_are_unique() -> None:
    home = entries()[0].path.parents[1]
    files = {*(home / "cheats").iterdir(), *(home / "honest").iterdir()}
    assert {file for file in files if file.suffix == ".py"} == {e.path for e in entries()}
    assert max(Counter(entry.name for entry in entries()).values()) == 1


@pytest.mark.parametrize("entry", entries(), ids=named)
def test_entry_explains_itself(entry: Entry) -> None:
    assert re.fullmatch(r"[A-Z][^\n]{20,}\.", entry.why)
    assert re.fullmatch(r"own|arXiv:\d{4}\.\d{5}|https://\S+", entry.source)
    assert bool(entry.symptom) == (entry.verdict == "refused")


@pytest.mark.parametrize("path", sorted({e.path for e in entries()}), ids=lambda path: path.stem)
def test_kernels_import_nothing_of_this_project(path: Path) -> None:
    allowed = {*sys.stdlib_module_names, "torch", "triton", "numpy", "acme_rotary"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=aliases):
                assert {alias.name.partition(".")[0] for alias in aliases} <= allowed
            case ast.ImportFrom(module=str(module)):
                assert module.partition(".")[0] in allowed


# Kernels with threads keep them, and other tests of this process would see them; test_judge.py has
# these kernels too.
IN_THIS_PROCESS = [entry for entry in entries(verdict="accepted") if entry.kind != "threads"]


@pytest.mark.parametrize(
    "entry", [entry for entry in IN_THIS_PROCESS if entry.needs not in NOT_QUICK], ids=named
)
def test_honest_kernel_is_right_in_a_few_cases(entry: Entry) -> None:
    assert faults(entry, torch.float32, every=6) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch's compiler imports
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "entry",
    [entry for entry in IN_THIS_PROCESS if entry.needs not in ("triton", "cuda")],
    ids=named,
)
def test_honest_kernel_is_right(entry: Entry, dtype: torch.dtype) -> None:
    assert faults(entry, dtype) == []


@pytest.mark.slow
def test_every_cheat_deceives_a_careless_judge() -> None:
    command = [sys.executable, str(NAIVE_JUDGE)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    judges = dict(re.findall(r"^(\w+\.\w+) (\w+)", printed, re.MULTILINE))
    on_cpu = {entry.name for entry in entries(verdict="refused") if entry.needs == "cpu"}
    assert judges.keys() == on_cpu
    assert [name for name, judge in judges.items() if judge == "none"] == []
