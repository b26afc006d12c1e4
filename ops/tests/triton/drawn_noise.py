# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Compare the noise that kernels draw with that of the ops, as JSON.

In a process of its own with TRITON_INTERPRET=1: triton decides when it is imported.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

from interposer_ops.sampling import _noise as defined
from interposer_ops.sampling._noise_triton import gumbel_noise, stream_key, uniform_noise
from interposer_testing.exact_interpreter import make_exact

VOCAB_SIZE = 20_000


@triton.jit
def draw(seeds, steps, uniform, gumbel, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    key = stream_key(tl.load(seeds + row), tl.load(steps + row))
    token = tl.arange(0, COLUMNS)
    place = row * SIZE + token
    tl.store(uniform + place, uniform_noise(key, token), mask=token < SIZE)
    tl.store(gumbel + place, gumbel_noise(key, token), mask=token < SIZE)


def main() -> None:
    make_exact()
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
    steps = torch.tensor([0, 7, 1, 2**40, 3, 2**31])
    uniform, gumbel = torch.empty(2, len(seeds), VOCAB_SIZE)
    columns = triton.next_power_of_2(VOCAB_SIZE)
    draw[(len(seeds),)](seeds, steps, uniform, gumbel, SIZE=VOCAB_SIZE, COLUMNS=columns)
    expected = defined.gumbel_noise(seeds, steps, VOCAB_SIZE, torch.float64)
    results = {
        "uniform": torch.equal(uniform, defined.uniform_noise(seeds, steps, VOCAB_SIZE)),
        "gumbel error": float(((gumbel - expected).abs() / expected.abs().clamp(min=1)).max()),
    }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
