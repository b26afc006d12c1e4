from collections.abc import Iterator

import pytest
import torch
from tests.landing import landing_sample

from interposer import (
    Capability,
    Case,
    Config,
    Device,
    Kernel,
    Request,
    Resolver,
    current_registry,
)
from interposer.records import load_target
from interposer_cpu import _linear as linear
from interposer_cpu import plugin
from interposer_cpu._platform import CPUPlatform
from interposer_ops.linear import linear as linear_op
from interposer_testing import Trial, check_kernel, conformance

AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}
KERNELS = [record for record in plugin.interposer_records() if isinstance(record, Kernel)]


def described(*features: str, architecture: str = "x86_64") -> Device:
    return Device("cpu", "cpu", "described", Capability(architecture, frozenset(features)))


def trials() -> Iterator[Trial]:
    device = CPUPlatform().devices()[0]
    registry = current_registry(Config(isolation="off"))
    yield from conformance(registry, device, distribution="interposer-cpu", quick=True)


@pytest.mark.slow
def test_all_records_conform() -> None:
    """Run the checks of ops/tests/test_conformance.py for this plugin's kernels and records."""
    assert [(str(trial), faults) for trial in trials() if (faults := trial.run())] == []


@pytest.mark.process
def test_conformance_tries_every_kernel_and_every_record_is_valid() -> None:
    """The trials of kernels, backends and layers are run in ops/tests/test_conformance.py."""
    ran = set()
    for trial in trials():
        if trial.aspect in ("records", "lightness"):
            assert trial.run() == [], str(trial)
        if trial.verdict:
            ran.add(trial.candidate.name)
        else:
            assert trial.verdict.reason
    packed = {kernel.name for kernel in KERNELS if kernel.op == "linear"}
    assert ran >= {kernel.name for kernel in KERNELS} - packed | {"sdpa"}
    if CPUPlatform().capability("cpu").features >= AVX512:
        assert ran >= packed


@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 100])
def test_packed_by_rows_is_correct_below_and_above_its_limit(tokens: int) -> None:
    arguments = {
        "x": torch.randn(tokens, 128),
        "weight": torch.randn(128, 128),
        "bias": torch.randn(128),
    }
    case = Case("limit", arguments, reduction=129, magnitude=300.0, rounded=60.0)
    function, prepare = linear.linear_packed_by_rows, linear.pack_both
    assert check_kernel(linear_op, function, case, prepare=prepare) == []


@pytest.mark.parametrize(
    ("dtype", "size", "expected"),
    [
        (torch.float32, 256, "linear_packed_by_rows"),
        (torch.float32, 2048, "linear_packed"),
        (torch.bfloat16, 256, "linear_packed_bfloat16"),
        (torch.bfloat16, 2048, "linear_packed_bfloat16"),
        (torch.float16, 2048, "reference"),
    ],
)
def test_linear_is_chosen_by_dtype_and_size(dtype: torch.dtype, size: int, expected: str) -> None:
    # Of a described device nothing is loaded: this machine may lack what the kernel needs.
    resolver = Resolver(current_registry(), described(*AVX512), Config(), described=True)
    dims = {"in_features": size, "out_features": size}
    assert resolver.kernel(linear_op, dtype, dims, "").choice.chosen.name == expected


@pytest.mark.parametrize(
    ("device", "reason", "chosen"),
    [
        (described("avx2"), "avx512f", "reference"),
        (described("neon", "bf16", architecture="aarch64"), "aarch64", "linear_native"),
        (described("avx512f", "avx512bw", "avx512dq", "avx512vl"), "avx512_bf16", "reference"),
    ],
)
def test_packing_is_refused_on_unmeasured_processors(
    device: Device, reason: str, chosen: str
) -> None:
    resolver = Resolver(current_registry(), device, Config())
    dims = {"in_features": 1024, "out_features": 1024}
    choice = resolver.kernel(linear_op, torch.bfloat16, dims, "").choice
    refusals = {refusal.candidate: refusal.reason for refusal in choice.refusals}
    assert choice.chosen.name == chosen
    assert reason in refusals["linear_packed_bfloat16"]


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    "kernel",
    landing_sample((kernel for kernel in KERNELS if "traceable" in kernel.properties), every=5),
    ids=lambda kernel: kernel.name,
)
def test_traceable_kernels_are_traced_whole(kernel: Kernel) -> None:
    op = load_target(current_registry().ops[kernel.op].target)
    case = next(iter(op.cases(torch.float32, 0)))
    compiled = torch.compile(load_target(kernel.target), fullgraph=True, backend="aot_eager")
    prepare = load_target(kernel.prepare) if kernel.prepare else None
    assert check_kernel(op, compiled, case, prepare=prepare) == []


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_have_the_signature_of_their_op(kernel: Kernel) -> None:
    op = load_target(current_registry().ops[kernel.op].target)
    function = load_target(kernel.target)
    code = function.__code__
    assert list(code.co_varnames[: code.co_argcount]) == list(op.signature.parameters)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_are_for_this_platform_only(kernel: Kernel) -> None:
    candidates = current_registry().candidates("kernel", kernel.op)
    (candidate,) = [c for c in candidates if c.record == kernel]
    verdict = candidate.judge(Request("kernel", kernel.op, "elsewhere", dtype="float32"))
    assert not verdict
    assert "runs on cpu" in verdict.reason
