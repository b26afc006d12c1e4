"""Prints what the installed native kernels do in this Python, as JSON.

Products are computed at every level, by one thread and by two, and compared with float64. Importing
torch in an emulator takes most of the time.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from interposer import Config, Kernel, current_registry
from interposer_cpu import native

# An emulator starts no processes of its own architecture.
CONFIG = Config(isolation="off")


def native_linear() -> tuple[Any, Any]:
    """Return the function and the preparation of the compiled kernel for ``linear``."""
    registry = current_registry(CONFIG)
    for candidate in registry.candidates("kernel", "linear"):
        record = candidate.record
        if candidate.name == "linear_native" and isinstance(record, Kernel):
            return registry.load(candidate, record.target), registry.load(candidate, record.prepare)
    raise LookupError("there is no kernel linear_native")


def error_of_linear(rows: int, threads: int) -> float:
    """Return the error of a product, by what 256 products and sums in float32 may lose.

    In any order: (257 / 2^24) * sum |x * w|.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 256, generator=generator)
    x = torch.randn(rows, 256, generator=generator)
    expected = x.double() @ weight.double().T
    bound = 257 * 2**-24 * (x.double().abs() @ weight.double().abs().T)
    torch.set_num_threads(threads)
    linear, pack = native_linear()
    packed, num_outputs = pack(weight, None)["weight"]
    found = linear(x, (packed, num_outputs), None)
    torch.set_num_threads(1)
    return float(((found - expected).abs() / bound).max())


def main() -> None:
    found: dict[str, Any] = {
        "absent": native.why_absent(),
        "byteorder": sys.byteorder,
        "errors": {},
        "levels": native.levels(),
        "python": sys.version_info[:2],
        "torch": torch.__version__,
    }
    for level in native.levels():
        native.force_level(level)
        found["errors"][level] = [
            error_of_linear(rows, threads) for rows in (1, 5, 40) for threads in (1, 2)
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
