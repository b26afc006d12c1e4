"""Tasks of registered ops: their cases, and samples of a model's size to time."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from interposer import Case, CustomOp, Registry
from interposer.records import load_target
from interposer_testing._judge.task import Task, Workload
from interposer_testing._tasks.expected import counted
from interposer_testing.cases import CaseSpace, PlannedCase, planned_cases

_SAMPLE_TOKENS = (1, 128)
# Numbers of tokens at one size of the test cases, whose numbers and sizes change together: a kernel
# may keep what it computed from the first number for all calls of that size.
_UNTIMED_TOKENS = (3, 7)
_MAX_OTHER_TOKENS = 1024
# Sizes as in models; those of test cases are small.
_MODEL_DIMS = {
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "in_features": 4096,
    "out_features": 4096,
}


def read_op(registry: Registry, name: str) -> Task:
    """Create the task of an op: a few cases that cover every label, and its samples.

    The dims of the samples are those of a model, and for other dims those of the largest case.
    """
    op: CustomOp[..., Any] = load_target(registry.ops[name].target)
    plans = list(planned_cases(op, 0, quick=True))
    cases = [
        Workload(f"{_dtype_name(plan.dtype)}: {plan.label}", partial(_case, op, plan), timed=False)
        for plan in plans
    ]
    definition = f"{op.schema}\n{inspect.getsource(op.reference)}"
    return Task(
        name=name,
        source="op",
        digest=hashlib.sha256(definition.encode()).hexdigest(),
        op=op,
        workloads=(*cases, *_samples(op, plans)),
        expect=partial(counted, op),
    )


def _case(op: CustomOp[..., Any], plan: PlannedCase, generator: torch.Generator) -> Case:
    space, seed = op.cases, _seed(generator)
    if isinstance(space, CaseSpace) and plan.point is not None:
        return space.build(plan.point, plan.dtype, seed)
    cases = space(plan.dtype, seed)
    return next((case for case in cases if case.label == plan.label), plan.build())


def _samples(op: CustomOp[..., Any], plans: list[PlannedCase]) -> list[Workload]:
    """Return workloads of several numbers of tokens; only workloads of model size are timed."""
    sample = op.sample
    if sample is None or not plans:
        return []
    # The samples of most ops accept every dtype, and bfloat16 is the dtype of most models.
    dtypes = {plan.dtype for plan in plans}
    dtype = torch.bfloat16 if torch.bfloat16 in dtypes else plans[0].dtype
    largest = max((plan.build() for plan in plans if plan.dtype == dtype), key=_num_elements)
    model_dims = _model_dims(largest.dims)

    def case(
        num_tokens: int, generator: torch.Generator, dims: Mapping[str, Any] = model_dims
    ) -> Case:
        return sample(dtype, dims, num_tokens, _seed(generator))

    def of_other_size(generator: torch.Generator) -> Case:
        num_tokens = int(torch.randint(1, _MAX_OTHER_TOKENS, (), generator=generator))
        return case(num_tokens, generator)

    timed = [
        Workload(
            f"{_dtype_name(dtype)}: sample of {count} tokens",
            partial(case, count),
            of_other_size=of_other_size,
        )
        for count in _SAMPLE_TOKENS
    ]
    untimed = [
        Workload(
            f"{_dtype_name(dtype)}: small sample of {count} tokens",
            partial(case, count, dims=largest.dims),
            timed=False,
        )
        for count in _UNTIMED_TOKENS
    ]
    return [*timed, *untimed]


def _model_dims(dims: Mapping[str, Any]) -> dict[str, Any]:
    """Return dims with a model's widths; MoE and group-quantized widths stay unchanged."""
    if "num_experts" in dims:
        return dict(dims)
    fixed = {"hidden_size", "in_features"} if "group_size" in dims else set[str]()
    return {n: _MODEL_DIMS[n] if n in _MODEL_DIMS.keys() - fixed else v for n, v in dims.items()}


def _num_elements(case: Case) -> int:
    return sum(v.numel() for v in case.arguments.values() if isinstance(v, torch.Tensor))


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (), generator=generator))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
