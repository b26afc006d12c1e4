"""MoE kernels, called from Python; the C++ tests check every level.

T tokens, H hidden size, E experts, I intermediate size, K experts per token.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from interposer import Case, Config, CustomOp, Request, current_registry
from interposer.errors import RequestError
from interposer_cpu import native
from interposer_cpu._kernels import experts as native_experts
from interposer_cpu._platform import CPUPlatform
from interposer_ops.experts import (
    fused_experts,
    fused_experts_fp8,
    fused_experts_mxfp4,
    fused_experts_w4a16,
)
from interposer_testing import Trial, check_kernel, conformance

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

OPS: dict[str, CustomOp[..., Any]] = {
    "fused_experts": fused_experts,
    "fused_experts_fp8": fused_experts_fp8,
    "fused_experts_mxfp4": fused_experts_mxfp4,
    "fused_experts_w4a16": fused_experts_w4a16,
}
# Additional dims of each op's samples.
FORMS: dict[str, dict[str, Any]] = {
    "fused_experts": {"biased": True},
    "fused_experts_fp8": {"granularity": "channel"},
    "fused_experts_mxfp4": {"biased": True},
    "fused_experts_w4a16": {"group_size": 32},
}


@pytest.fixture
def forced() -> Iterator[None]:
    yield
    native.force_level(None)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def sample(name: str, tokens: int, dtype: torch.dtype = torch.bfloat16, **dims: Any) -> Case:
    """Draw T tokens that use a random half of the experts."""
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_experts": 4, "top_k": 2}
    op = OPS[name]
    assert op.sample is not None
    return op.sample(dtype, {**sizes, "activation": "silu", **FORMS[name], **dims}, tokens, 0)


def packed(name: str, case: Case) -> dict[str, Any]:
    """Return the arguments of the kernel."""
    prepare = getattr(native_experts, f"pack_{name}")
    constants = {constant: case.arguments[constant] for constant in OPS[name].constants}
    return {**case.arguments, **prepare(**constants)}


def kernel_of(name: str) -> Callable[..., torch.Tensor]:
    """Wrap the kernel as a function with the op's arguments."""
    op = OPS[name]

    def kernel(*values: Any) -> torch.Tensor:
        given = dict(zip(op.signature.parameters, values, strict=True))
        arguments = packed(name, Case("", given))
        result: torch.Tensor = getattr(native_experts, name)(**arguments)
        return result

    return kernel


def result_of(name: str, case: Case) -> torch.Tensor:
    result: torch.Tensor = kernel_of(name)(*case.arguments.values())
    return result


def trials() -> Iterator[Trial]:
    device = CPUPlatform().devices()[0]
    # Whether the records' conditions may be asked is no matter here.
    registry = current_registry(Config(isolation="off"))
    for op in OPS:  # the cases of other ops are not even built
        for trial in conformance(
            registry, device, distribution="interposer-cpu", op=op, quick=True
        ):
            is_ours = trial.candidate.name == f"{op}_native"
            if is_ours and trial.aspect == "numerics" and trial.verdict:
                yield trial


@pytest.mark.parametrize(
    "level",
    # The lowest differs most from the best; those between are tried when there is time.
    [
        pytest.param(name, marks=[pytest.mark.slow] if index else [])
        for index, name in enumerate(native.levels()[:-1])
    ],
)
def test_kernels_conform_on_every_level_below_the_best(level: str, forced: None) -> None:
    native.force_level(level)
    ran = set()
    for trial in trials():
        assert trial.run() == [], str(trial)
        ran.add(trial.candidate.name.removesuffix("_native"))
    assert ran == set(OPS)


@pytest.mark.landing(2)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_of_one_expert_are_computed_in_segments(name: str, dtype: torch.dtype) -> None:
    # About 150 rows of each expert: more than are multiplied by a block at a time.
    case = sample(name, 300, dtype)
    assert check_kernel(OPS[name], kernel_of(name), case) == []


@pytest.mark.landing(3)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("tokens", [1, 7, 90])
def test_results_do_not_depend_on_the_number_of_threads(
    name: str, tokens: int, threads: Callable[[int], None]
) -> None:
    case = sample(name, tokens, num_experts=5, top_k=3)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(result_of(name, case))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_large_batches_are_computed_in_chunks() -> None:
    # A slot takes 24 kB of intermediate results, which are limited to 128 MiB.
    tokens, hidden, inner, experts, top_k = 3200, 4096, 16, 2, 2
    generator = torch.Generator().manual_seed(0)
    given = {
        "x": torch.randn(tokens, hidden, generator=generator).bfloat16(),
        "gate_up": torch.randn(experts, 2 * inner, hidden, generator=generator).bfloat16() / 64,
        "gate_up_bias": None,
        "down": torch.randn(experts, hidden, inner, generator=generator).bfloat16() / 4,
        "down_bias": None,
        "weights": torch.rand(tokens, top_k, generator=generator),
        "expert_ids": torch.randint(experts, (tokens, top_k), generator=generator),
        "activation": "silu",
    }
    arguments = packed("fused_experts", Case("", given))
    whole = native_experts.fused_experts(**arguments)
    for first in (0, 1500, 3000):
        rows = slice(first, first + 200)
        routed = ("x", "weights", "expert_ids")
        some = {**arguments, **{part: arguments[part][rows] for part in routed}}
        # Other rows beside them may be another way through a product: h and y move by roundings.
        actual = native_experts.fused_experts(**some)
        torch.testing.assert_close(actual, whole[rows], rtol=2**-7, atol=2**-8)


def test_experts_are_packed_into_one_tensor_with_reproducible_bytes() -> None:
    case = sample("fused_experts_mxfp4", 3)
    made = []
    for filling in (0, 255):
        # Freed memory is likely to be reused for the packed weight: its padding must be
        # overwritten.
        spoilt = torch.full((1 << 18,), filling, dtype=torch.uint8)
        del spoilt
        made.append(packed("fused_experts_mxfp4", case))
    first, second = made
    assert torch.equal(first["gate_up"], second["gate_up"])
    names = set(fused_experts_mxfp4.constants) - {"gate_up"}
    assert all(first[name] is None for name in names)


@pytest.mark.parametrize("block", [12, 10, 32])
@pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scales_of_any_block_size_are_accepted(block: int, form: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, inner, experts = 4 * block, 2 * block, 3

    def matrices(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.randn(experts, rows, columns, generator=generator)
        scales = 0.2 * (0.5 + torch.rand(experts, 2, columns // block, generator=generator))
        return numbers.to(form), scales

    gate_up, gate_up_scale = matrices(2 * inner, hidden)
    down, down_scale = matrices(hidden, inner)
    arguments: dict[str, Any] = {
        "x": torch.randn(5, hidden, generator=generator),
        "gate_up": gate_up,
        "gate_up_scale": gate_up_scale,
        "down": down,
        "down_scale": down_scale,
        "weights": torch.rand(5, 2, generator=generator),
        "expert_ids": torch.tensor([[0, 1], [2, -1], [1, 0], [2, 0], [-1, -1]]),
        "activation": "gelu",
    }
    expected = fused_experts_fp8.reference(**arguments)
    actual = result_of("fused_experts_fp8", Case("", arguments))
    # Sums of at most 128 terms and 64 terms, in float32, of results that are below 10.
    torch.testing.assert_close(actual, expected, rtol=0, atol=200 * 2**-24 * 10)
    assert bool((actual[4] == 0).all())


def test_noncontiguous_inputs_and_int64_ids_are_accepted() -> None:
    case = sample("fused_experts", 6, torch.float32)
    arguments = packed("fused_experts", case)
    expected = native_experts.fused_experts(**arguments)
    given = case.arguments
    apart = {
        "x": given["x"].t().contiguous().t(),
        "weights": given["weights"].t().contiguous().t(),
        "expert_ids": given["expert_ids"].to(torch.int64).t().contiguous().t(),
    }
    for name, tensor in apart.items():
        actual = native_experts.fused_experts(**{**arguments, name: tensor})
        assert torch.equal(actual, expected), name


def test_unsupported_expert_calls_are_refused() -> None:
    arguments = packed("fused_experts", sample("fused_experts", 2))
    with pytest.raises(RequestError, match="'relu' of experts; try 'silu', 'gelu' or"):
        native_experts.fused_experts(**{**arguments, "activation": "relu"})
    # After the last expert is other memory.
    beyond = torch.full((2, 2), 4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="code 4"):
        native_experts.fused_experts(**{**arguments, "expert_ids": beyond})
    spoilt = arguments["gate_up"].clone()
    spoilt[64] ^= 1
    with pytest.raises(RuntimeError, match="code 3"):
        native_experts.fused_experts(**{**arguments, "gate_up": spoilt})
    for name in ("experts", "begin_mixture"):
        with pytest.raises(TypeError, match="arguments, got 1"):
            getattr(native.library(), name)(1)


@pytest.mark.parametrize(("group", "sizes", "taken"), [(8, 64, True), (4, 64, False), (4, 4, True)])
def test_groups_that_divide_packed_words_are_refused(group: int, sizes: int, taken: bool) -> None:
    dims = {"group_size": group, "hidden_size": sizes, "intermediate_size": sizes}
    device = CPUPlatform().devices()[0]
    request = Request("kernel", "fused_experts_w4a16", "cpu", device.capability, "float32", dims)
    verdict = native_experts.judge_groups(request)
    assert bool(verdict) == taken
    assert taken or "groups of multiples of 8 inputs, got 4" in verdict.reason


def test_compiled_code_calls_the_registered_op() -> None:
    arguments = packed("fused_experts", sample("fused_experts", 5))
    expected = native_experts.fused_experts(**arguments)
    compiled = torch.compile(native_experts.fused_experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**arguments), expected)
