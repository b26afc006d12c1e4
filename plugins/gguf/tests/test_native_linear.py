"""The native kernels at every level of this processor, the lower ones forced."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.forks import forks
from tests.landing import num_examples

from interposer_gguf import _native_library as native_library
from interposer_gguf import _native_linear as native_linear
from interposer_gguf._block_formats import FORMATS, BlockFormat
from interposer_gguf._cases import gguf_linear_cases, gguf_linear_sample, random_rows
from interposer_gguf._linear import gguf_linear
from interposer_testing import check_kernel

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        native_library.path() is None,
        reason="needs the native library: install g++ and reinstall interposer-gguf",
    ),
]

LEVELS = native_library.LEVELS
each_level = pytest.mark.parametrize("level", range(len(LEVELS)), ids=LEVELS)
each_format = pytest.mark.parametrize("layout", FORMATS.values(), ids=FORMATS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _level_is_there(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    level = callspec.params.get("level", 0) if callspec else 0
    if level > native_library.library().level:
        pytest.skip(f"needs a processor with {LEVELS[level]}")


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


def weight_of(layout: BlockFormat, rows: int, in_features: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return random_rows(layout, rows, in_features, generator, in_features**-0.5)


def inputs_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@each_level
@each_dtype
def test_kernels_conform_to_the_op(level: int, dtype: torch.dtype) -> None:
    linear, formats = native_linear.at_level(level), set()
    for point in gguf_linear_cases.covering(dtype):
        case = gguf_linear_cases.build(point, dtype, 0)
        assert check_kernel(gguf_linear, linear, case) == [], case.label
        formats.add(case.arguments["stored_as"])
    assert formats == set(FORMATS)


@each_level
@each_dtype
@each_format
def test_kernels_conform_for_any_number_of_tokens(
    level: int, dtype: torch.dtype, layout: BlockFormat
) -> None:
    dims: dict[str, int | float | str | bool] = {
        "in_features": 768,
        "out_features": 9,
        "stored_as": layout.name,
    }
    most = native_linear.MOST_TOKENS[level]
    for num_tokens in {1, 2, 3, 4, 5, 8, 9, most + 1}:
        case = gguf_linear_sample(dtype, dims, num_tokens, num_tokens)
        assert check_kernel(gguf_linear, native_linear.at_level(level), case) == [], num_tokens


@each_level
@each_dtype
@each_format
def test_kernels_accept_strided_and_unaligned_memory(
    level: int, dtype: torch.dtype, layout: BlockFormat
) -> None:
    weight, bias = weight_of(layout, 7, 512), inputs_of(7, dtype=dtype)
    linear = native_linear.at_level(level)
    # One byte after an aligned address, rows with a gap; one number after it, rows with a gap.
    odd = torch.zeros(7, weight.shape[1] + 3, dtype=torch.uint8)[:, 1:-2].copy_(weight)
    for num_tokens in (1, 2, 5, 40):
        x = inputs_of(num_tokens, 512, dtype=dtype)
        expected = linear(x, weight, bias, layout.name)
        apart = torch.zeros(num_tokens, 519, dtype=dtype)[:, 1:513].copy_(x)
        turned = x.T.contiguous().T
        beside = torch.zeros(15, dtype=dtype)[1::2].copy_(bias)
        for place in (apart, turned):
            actual = linear(place, odd, beside, layout.name)
            if num_tokens <= native_linear.MOST_TOKENS[level]:
                assert torch.equal(actual, expected)
            else:  # torch multiplies, whose order of sums depends on where numbers lie
                torch.testing.assert_close(actual, expected)


@each_level
@each_format
@settings(max_examples=num_examples(25))
@given(data=st.data())
def test_random_bytes_dequantize_as_in_torch(
    level: int, layout: BlockFormat, data: st.DataObject
) -> None:
    num_rows, num_blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    size = num_rows * num_blocks * layout.num_bytes
    content = data.draw(st.binary(min_size=size, max_size=size))
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(num_rows, -1)
    actual = native_linear.dequantized(level, rows, layout.name)
    expected = layout.dequantized(rows, torch.float32)
    scale, offset = layout.scales(rows, torch.float32)
    # Where an offset is added, a product may be rounded before or not: by half of the last of 24
    # bits, and so may the sum.
    slack = torch.zeros_like(expected)
    if offset is not None:
        products = layout.quantized(rows) * scale.repeat_interleave(layout.group_size, 1)
        offsets = offset.repeat_interleave(layout.group_size, 1)
        slack = 2**-23 * (products.abs() + offsets.abs())
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    assert (same | ((actual - expected).abs() <= slack)).all()


@each_level
@each_dtype
@each_format
def test_nan_stays_in_its_row(level: int, dtype: torch.dtype, layout: BlockFormat) -> None:
    weight, linear = weight_of(layout, 5, 256), native_linear.at_level(level)
    for num_tokens in (1, 3, 6):
        x = inputs_of(num_tokens, 256, dtype=dtype)
        expected = linear(x, weight, None, layout.name)
        x[-1, 100] = torch.nan
        actual = linear(x, weight, None, layout.name)
        assert actual[-1].isnan().all()
        assert torch.equal(actual[:-1], expected[:-1])


@each_level
@pytest.mark.usefixtures("_threads_as_before")
def test_the_number_of_threads_does_not_change_results(level: int) -> None:
    layout, linear = FORMATS["q4_k"], native_linear.at_level(level)
    weight = weight_of(layout, 517, 1024)
    for num_tokens in (1, 3):
        x, results = inputs_of(num_tokens, 1024, dtype=torch.bfloat16), []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(linear(x, weight, None, layout.name))
        assert all(torch.equal(results[0], other) for other in results[1:])
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(linear, x, weight, None, layout.name) for _ in range(16)]
            assert all(torch.equal(call.result(), results[0]) for call in calls)


# Prints how many threads there are before the first product, after it, and after an operation of
# torch's own; then the libraries of OpenMP.
THREADS = """
import os, re
import torch
from interposer_gguf import _native_linear as native_linear
from interposer_gguf._block_formats import FORMATS
from interposer_gguf._cases import random_rows

def count():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
weight = random_rows(FORMATS["q8_0"], 512, 1024, torch.Generator().manual_seed(0))
x, before = torch.ones(1, 1024), count()
native_linear.gguf_linear(x, weight, None, "q8_0")
after = count()
torch.ones(1 << 22).exp()
found = re.findall(r"/\\S*lib[gi]?omp\\S*", open("/proc/self/maps").read())
print(before, after, count(), *set(map(os.path.realpath, found)))
"""


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the /proc of Linux")
def test_kernels_use_the_threads_of_torch() -> None:
    done = forks().run("-c", THREADS)
    assert done.returncode == 0, done.stderr
    before, after, last, *libraries = done.stdout.split()
    assert len(libraries) == 1
    assert int(after) == int(before) + 2
    assert int(last) == int(after)


def test_an_unsupported_level_is_refused() -> None:
    with pytest.raises(ValueError, match=r"level is 9, must be from 0 to \d on this processor"):
        native_linear.at_level(9)


ABOVE_AVX2 = re.compile(r"%zmm|%k[0-7]|\{evex\}|%[xy]mm(1[6-9]|2\d|3[01])")
ABOVE_PORTABLE = re.compile(r"%ymm|" + ABOVE_AVX2.pattern)


@pytest.mark.process
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_functions_use_only_registers_of_their_level() -> None:
    """A name that two levels share, as of an inline function, would be linked from one of them."""
    command = ("objdump", "--disassemble", "--no-show-raw-insn", str(native_library.path()))
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "file format elf64-x86-64" not in listing:
        pytest.skip("needs a library for x86-64")
    seen: set[str] = set()
    strays, function = [], ""
    for line in listing.splitlines():
        if line.endswith(">:"):
            function = line
            seen.update(level for level in LEVELS if f"{len(level)}{level}" in function)
        elif "avx512" in function:
            continue
        elif (ABOVE_AVX2 if "4avx2" in function else ABOVE_PORTABLE).search(line):
            strays.append(function + line)
    if not seen:
        pytest.skip("needs a library whose symbols were not stripped")
    assert seen == set(LEVELS)
    assert strays == []
