"""The level without instructions of x86, cross-compiled, on emulated processors."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from interposer_gguf._block_formats import FORMATS
from interposer_gguf._cases import random_rows

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SOURCES = [HERE / "products.cpp", *(HERE.parent / "native" / f"{n}.cpp" for n in ("call", "level"))]
# The second has the opposite order of bytes.
PROCESSORS = ("aarch64", "s390x")


@cache
def program(processor: str) -> Path:
    """Return products.cpp, compiled for a processor."""
    compiler = f"{processor}-linux-gnu-g++"
    for tool in (compiler, f"qemu-{processor}"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    built = Path(mkdtemp()) / "products"
    options = ["-std=c++17", "-O3", "-static", "-ffp-contract=fast", "-DLEVEL=portable"]
    subprocess.run([compiler, *options, *SOURCES, "-o", built], check=True, timeout=300)
    return built


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_matmuls_and_dequantized_values_are_right(processor: str, dtype: torch.dtype) -> None:
    built, generator = program(processor), torch.Generator().manual_seed(0)
    text, expected = [], []
    for layout in FORMATS.values():
        for num_tokens in (1, 3, 5):
            rows = random_rows(layout, 5, 512, generator, 512**-0.5)
            x = torch.randn(num_tokens, 512, generator=generator).to(dtype)
            if dtype == torch.float32:
                values = " ".join(float(number).hex() for number in x.flatten())
            else:
                wide = x.view(torch.int16).int() & 0xFFFF
                values = " ".join(map(str, wide.flatten().tolist()))
            sizes = (layout.number, int(dtype == torch.bfloat16), num_tokens, 5, 512, rows.shape[1])
            stored = " ".join(map(str, rows.flatten().tolist()))
            text.append(f"{' '.join(map(str, sizes))}\n{stored}\n{values}\n")
            numbers = layout.dequantized(rows, torch.float64)
            expected.append((x.double() @ numbers.T, numbers))
    command = [f"qemu-{processor}", "-cpu", "max", str(built)]
    done = subprocess.run(
        command, input="".join(text), capture_output=True, text=True, check=True, timeout=300
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected)
    for line, (products, numbers) in zip(lines, expected, strict=True):
        words = line.split()
        actual = words[: products.numel()]
        if dtype == torch.float32:
            result = torch.tensor([float.fromhex(word) for word in actual])
        else:
            result = torch.tensor([int(word) << 16 for word in actual]).int().view(torch.float32)
        # The rounding of the result, and of sums of 512 numbers of about 1.
        torch.testing.assert_close(
            result.double().view_as(products), products, atol=1e-5, rtol=torch.finfo(dtype).eps
        )
        found_numbers = torch.tensor([float.fromhex(word) for word in words[products.numel() :]])
        # Two roundings of a number, as of the product and of the sum with the offset.
        torch.testing.assert_close(
            found_numbers.double().view_as(numbers), numbers, atol=2**-23, rtol=2**-23
        )
