"""GEMM with packed weights, called from Python; the C++ tests check every level."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from interposer import Capability, Config, Request, current_registry
from interposer.errors import ConfigError
from interposer_cpu import native
from interposer_cpu._features import architecture
from interposer_cpu._kernels import linear
from interposer_cpu._platform import CPUPlatform
from interposer_ops.quantizers import unpack_nibbles
from interposer_testing import Trial, conformance

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

OPS = (
    "fp8_block_linear",
    "fp8_linear",
    "int8_linear",
    "linear",
    "mxfp4_linear",
    "mxfp8_linear",
    "w4a16_linear",
    "w4a8_linear",
    "w8a16_linear",
)
LEVELS = native.levels()
# The lowest differs most from the best; those between are tried when there is time.
LOWER = [
    pytest.param(name, marks=[pytest.mark.slow] if i else []) for i, name in enumerate(LEVELS[:-1])
]


@pytest.fixture
def forced() -> Iterator[None]:
    yield
    native.force_level(None)


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


@pytest.mark.parametrize("level", LOWER)
def test_kernels_conform_on_every_level_below_the_best(level: str, forced: None) -> None:
    native.force_level(level)
    assert native.level() == level
    ran = set()
    for trial in trials():
        assert trial.run() == [], str(trial)
        ran.add(trial.candidate.name.removesuffix("_native"))
    assert ran == set(OPS)


def test_an_unknown_level_is_refused_with_the_available_levels(forced: None) -> None:
    before = native.level()
    with pytest.raises(ConfigError, match=f"no level 'avx1024' here.*{LEVELS[0]}"):
        native.force_level("avx1024")
    other = next(name for name in native.LEVELS.values() if name not in LEVELS)
    with pytest.raises(ConfigError, match=other):
        native.force_level(other)
    assert native.level() == before


@pytest.mark.parametrize("rows", [1, 5, 9, 40, 200])
def test_results_do_not_depend_on_the_number_of_threads(rows: int) -> None:
    weight, x = torch.randn(300, 96), torch.randn(rows, 96)
    packed = linear.pack(weight, torch.randn(300))["weight"]
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(linear.linear(x, packed, None))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("in_features", [8, 120, 136, 1032])
def test_a_row_gives_the_same_bits_in_any_batch(in_features: int, level: str, forced: None) -> None:
    # Pieces of a block hold 128 inputs: none is whole, one is, or several and a rest. Sums of
    # integers are exact, so that not a bit may differ.
    native.force_level(level)
    weight = torch.randint(-127, 128, (150, in_features), dtype=torch.int8)
    scale = torch.rand(150)
    packed = linear.pack_int8(weight, scale, None)["weight"]
    x = torch.randint(-127, 128, (8, in_features), dtype=torch.int8)
    x_scale = torch.rand(8, 1)

    def product(rows: slice) -> torch.Tensor:
        return linear.int8_linear(x[rows], packed, x_scale[rows], None, None, None, torch.float32)

    alone = torch.cat([product(slice(row, row + 1)) for row in range(8)])
    expected = (x.double() @ weight.double().T) * x_scale * scale
    torch.testing.assert_close(alone.double(), expected, rtol=1e-6, atol=1e-3)
    for rows in range(5, 9):
        assert torch.equal(product(slice(rows)), alone[:rows])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batched_matmuls_are_exact_for_small_integers(
    dtype: torch.dtype, level: str, forced: None
) -> None:
    # Integers whose sums are exact in float32 in any order.
    native.force_level(level)
    for in_features in (8, 56, 72, 1032):
        weight = torch.randint(-8, 9, (150, in_features)).to(dtype)
        x = torch.randint(-1, 2, (8, in_features)).to(dtype)
        packed = linear.pack(weight, None)["weight"]
        expected = (x.double() @ weight.double().T).to(dtype)
        for rows in range(5, 9):
            assert torch.equal(linear.linear(x[:rows], packed, None), expected[:rows])


def test_kernels_use_the_threads_of_torch() -> None:
    packed = linear.pack(torch.randn(256, 64), None)["weight"]
    linear.linear(torch.randn(2, 64), packed, None)
    lines = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line}
    assert len(runtimes) == 1
    assert "torch" in runtimes.pop()


def test_equal_weights_are_packed_into_equal_bytes() -> None:
    weight = torch.randint(0, 256, (70, 20), dtype=torch.uint8)
    scale, zeros = torch.rand(70, 5), torch.randint(0, 16, (70, 5), dtype=torch.uint8)
    made = []
    for filling in (0, 255):
        # Freed memory is likely to be reused for the packed weight: its padding must be
        # overwritten.
        spoilt = torch.full((1 << 16,), filling, dtype=torch.uint8)
        del spoilt
        made.append(linear.pack_w4a16(weight, scale, torch.rand(70) * 0, zeros)["weight"][0])
    assert torch.equal(*made)


def test_scales_are_narrowed_only_if_exact() -> None:
    weight = torch.randint(0, 256, (64, 32), dtype=torch.uint8)
    fine = torch.rand(64, 2) + 1
    coarse = fine.bfloat16().float()
    sizes = [len(linear.pack_w4a16(weight, scale, None)["weight"][0]) for scale in (fine, coarse)]
    assert sizes[0] - sizes[1] == 64 * 2 * 2
    codes = (unpack_nibbles(weight).double() - 8).unflatten(1, (2, -1))
    x = torch.randn(3, 64)
    for scale in (fine, coarse):
        packed = linear.pack_w4a16(weight, scale, None)["weight"]
        expected = x.double() @ (codes * scale.double().unsqueeze(-1)).flatten(1).T
        actual = linear.w4a16_linear(x, packed, None, None)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-3)


def test_a_device_without_the_instructions_is_refused_by_name() -> None:
    request = Request("kernel", "linear", "cpu", Capability(architecture(), frozenset()))
    assert "which the device lacks" in native.judge(request).reason
    request = Request("kernel", "linear", "cpu", Capability("riscv64", frozenset()))
    assert "is written for" in native.judge(request).reason


def test_compiled_code_calls_the_registered_op() -> None:
    packed = linear.pack(torch.randn(80, 48), torch.randn(80))["weight"]
    x = torch.randn(4, 48)
    compiled = torch.compile(
        lambda rows: linear.linear(rows, packed, None), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), linear.linear(x, packed, None))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 40])
def test_a_nan_weight_gives_nan_results(level: str, rows: int, forced: None) -> None:
    native.force_level(level)
    weight = torch.randn(70, 64).to(torch.float8_e4m3fn)
    codes = weight.view(torch.uint8)
    codes[3, 5], codes[66, 63] = 0x7F, 0xFF
    packed = linear.pack_fp8(weight, torch.ones(70), None)["weight"]
    x = torch.randn(rows, 64).to(torch.float8_e4m3fn)
    result = linear.fp8_linear(x, packed, torch.ones(rows, 1), None, None, torch.float32)
    expected = torch.full((70,), False)
    expected[3] = expected[66] = True
    assert torch.equal(result.isnan(), expected.expand(rows, 70))


@pytest.mark.landing(8)
@pytest.mark.parametrize("num_rows", [1, 8, 40])
@pytest.mark.parametrize("num_threads", [2, 3, 5, 70])
def test_every_output_is_written_once_under_work_stealing(num_threads: int, num_rows: int) -> None:
    # 3, and 9, blocks of 64 outputs: fewer than threads, and shares of unequal size.
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(num_threads)
    for out_features in (130, 576):
        weight = torch.randn(out_features, 64, generator=generator)
        x = torch.randn(num_rows, 64, generator=generator)
        packed = linear.pack(weight, None)["weight"]
        torch.set_num_threads(1)
        expected = linear.linear(x, packed, None)
        torch.set_num_threads(num_threads)
        try:
            for _ in range(20):
                assert torch.equal(linear.linear(x, packed, None), expected)
        finally:
            torch.set_num_threads(before)
