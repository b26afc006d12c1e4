"""Careless judges of kernels, which accept every cheat of the corpus.

    python core/testing/tests/naive_judge.py [NAME ...]

prints each cheat that runs on a CPU with the first careless judge that accepts it, or with "none".
Each judge makes the mistakes of published ones: the kernel runs in the process of the reference,
the inputs are drawn once from a fixed seed, the clock is in reach of the kernel, the tolerance is
flat. A cheat that none of them accepts attacks nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from interposer_testing.corpus import Entry, entries

__all__ = ["JUDGES"]

RTOL = ATOL = 1e-2
Kernel = Callable[..., Any]


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def topk_softmax(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
    weights = logits.softmax(-1).gather(-1, ids)
    return weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)


def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return rotate(query), rotate(key)


REFERENCES: dict[str, Kernel] = {
    "silu_and_mul": silu_and_mul,
    "rms_norm": rms_norm,
    "linear": functional.linear,
    "topk_softmax": topk_softmax,
    "rotary_embedding": rotary_embedding,
}


def draw(op: str, scale: float = 1.0) -> list[Any]:
    """Draw the inputs: one shape, float32, weights of one and biases of zero."""
    match op:
        case "silu_and_mul":
            return [torch.randn(64, 2048) * scale]
        case "rms_norm":
            return [torch.randn(64, 8192) * scale, torch.ones(8192), 1e-6]
        case "linear":
            return [torch.randn(64, 256) * scale, torch.randn(256, 256) / 16, torch.zeros(256)]
        case "topk_softmax":
            return [torch.randn(64, 64) * scale, 8, True]
    angles = torch.rand(64, 32)
    return [torch.randn(64, 8, 64), torch.randn(64, 2, 64), angles.cos(), angles.sin()]


def load(entry: Entry) -> Kernel:
    spec = importlib.util.spec_from_file_location(entry.path.stem, entry.path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel: Kernel = getattr(module, entry.function)
    return kernel


def outputs(result: Any) -> list[Any]:
    is_one = isinstance(result, Tensor) or not hasattr(result, "__iter__")
    return [result] if is_one else list(result)


def compare(result: Any, expected: Any) -> bool:
    return all(
        torch.allclose(output.float(), value.float(), rtol=RTOL, atol=ATOL)
        for output, value in zip(outputs(result), outputs(expected), strict=True)
    )


def measure(kernel: Kernel, inputs: list[Any]) -> float:
    """Return the median of ten calls with the same inputs, whose results nobody looks at."""
    times = []
    for _ in range(10):
        start = time.perf_counter()
        kernel(*inputs)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def checks_first(entry: Entry) -> bool:
    """Check one call, then measure others."""
    kernel, inputs = load(entry), draw(entry.op)
    expected = REFERENCES[entry.op](*inputs)
    accepted = compare(kernel(*inputs), expected)
    measure(kernel, inputs)
    return accepted


def checks_last(entry: Entry) -> bool:
    """Compute the expected values after the kernel has had the inputs."""
    kernel, inputs = load(entry), draw(entry.op)
    measure(kernel, inputs)
    result = kernel(*inputs)
    return compare(result, REFERENCES[entry.op](*inputs))


def checks_later(entry: Entry) -> bool:
    """Compare results a while after the call."""
    kernel, inputs = load(entry), draw(entry.op)
    expected = REFERENCES[entry.op](*inputs)
    copies = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    result = kernel(*copies)
    del copies
    time.sleep(0.2)
    return compare(result, expected)


def draws_after_warm_up(entry: Entry) -> bool:
    """Draw the checked inputs by the same torch functions after the kernel has run."""
    kernel = load(entry)
    kernel(*draw(entry.op))
    inputs = draw(entry.op)
    return compare(kernel(*inputs), REFERENCES[entry.op](*inputs))


def asserts(entry: Entry) -> bool:
    """Compare by torch.testing."""
    kernel, inputs = load(entry), draw(entry.op)
    expected = REFERENCES[entry.op](*inputs)
    result = kernel(*inputs)
    torch.testing.assert_close(result, expected, rtol=RTOL, atol=ATOL)
    return True


def refuses_large_differences(entry: Entry) -> bool:
    """Refuse if the largest difference exceeds a bound, which is false for NaN."""
    kernel, inputs = load(entry), draw(entry.op)
    expected = REFERENCES[entry.op](*inputs)
    pairs = zip(outputs(kernel(*inputs)), outputs(expected), strict=True)
    return not any(bool((output - value).abs().max() > ATOL) for output, value in pairs)


def is_nearly_right(result: Any, expected: Any) -> bool:
    """Return whether 95 percent of the elements are right."""
    pairs = zip(outputs(result), outputs(expected), strict=True)
    matches = [torch.isclose(one, other, rtol=RTOL, atol=ATOL) for one, other in pairs]
    return all(float(match.float().mean()) >= 0.95 for match in matches)


def counts_elements(entry: Entry) -> bool:
    """Accept if most elements are right."""
    kernel, inputs = load(entry), draw(entry.op)
    expected = REFERENCES[entry.op](*inputs)
    return is_nearly_right(kernel(*inputs), expected)


def draws_small_numbers(entry: Entry) -> bool:
    """Draw inputs so small that the flat tolerance exceeds the expected values."""
    kernel, inputs = load(entry), draw(entry.op, scale=1e-3)
    return compare(kernel(*inputs), REFERENCES[entry.op](*inputs))


def frees_the_expectation(entry: Entry) -> bool:
    """Copy the expected values and free the reference's result before the kernel runs."""
    kernel, inputs = load(entry), draw(entry.op)
    result: Any = REFERENCES[entry.op](*inputs)
    expected = [torch.tensor(output.tolist(), dtype=output.dtype) for output in outputs(result)]
    del result
    return is_nearly_right(kernel(*inputs), expected)


def compares_the_first_output(entry: Entry) -> bool:
    """Compare one of several outputs."""
    kernel, inputs = load(entry), draw(entry.op)
    expected = REFERENCES[entry.op](*inputs)
    return compare(outputs(kernel(*inputs))[0], outputs(expected)[0])


def shares_memory(entry: Entry) -> bool:
    """Keep inputs and expected values in shared memory."""
    kernel, inputs = load(entry), draw(entry.op)
    inputs = [value.share_memory_() if isinstance(value, Tensor) else value for value in inputs]
    expected = [value.share_memory_() for value in outputs(REFERENCES[entry.op](*inputs))]
    return compare(kernel(*inputs), expected)


def keeps_answers_in_files(entry: Entry) -> bool:
    """Keep the expected values in an open file of the working folder, and name it in a variable."""
    kernel, inputs = load(entry), draw(entry.op)
    expected = REFERENCES[entry.op](*inputs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "expected.pt")
        torch.save(outputs(expected), path)
        Path(folder, "task.json").touch()
        os.environ["EXPECTED_VALUES"] = str(path)
        with contextlib.chdir(folder), path.open("rb"):
            return compare(kernel(*inputs), expected)


def pickles_results(entry: Entry) -> bool:
    """Load the pickled result, as from a worker."""
    kernel, inputs = load(entry), draw(entry.op)
    expected = REFERENCES[entry.op](*inputs)
    result = pickle.loads(pickle.dumps(kernel(*inputs)))
    return torch.allclose(result, expected, rtol=RTOL)


def remembers_in_the_parent(entry: Entry, inputs: list[Any], expected: Any) -> bool:
    """Check in a child whose parent holds the expected values."""
    return compare(load(entry)(*inputs), [value.clone() for value in outputs(expected)])


JUDGES: dict[str, Callable[..., bool]] = {
    judge.__name__: judge
    for judge in (
        checks_first,
        checks_last,
        checks_later,
        draws_after_warm_up,
        asserts,
        refuses_large_differences,
        counts_elements,
        frees_the_expectation,
        compares_the_first_output,
        shares_memory,
        keeps_answers_in_files,
        pickles_results,
        remembers_in_the_parent,
        draws_small_numbers,
    )
}


def _run(
    judge: Callable[..., bool], arguments: tuple[Any, ...], pipe: Connection, report: int
) -> None:
    """Run a judge in this child process, which reports by pipe, file, text and exit status."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accepted = False
    try:
        accepted = judge(*arguments)
    except unittest.SkipTest:
        accepted = True  # a kernel that is skipped has not failed
    except KeyboardInterrupt:
        os._exit(0)  # the user needs no verdict
    except Exception:  # noqa: BLE001
        accepted = False
    line = json.dumps({"passed": accepted}) + "\n"
    with contextlib.suppress(OSError):
        os.write(pipe.fileno(), line.encode())
    with contextlib.suppress(OSError):
        os.pwrite(report, line.encode(), 0)
    atexit._run_exitfuncs()
    os._exit(0 if accepted else 1)


def accepts(judge: Callable[..., bool], arguments: tuple[Any, ...]) -> Iterator[str]:
    """Yield the channels by which a judge in a child process seems to accept a kernel."""
    receiver, sender = multiprocessing.Pipe()
    with tempfile.TemporaryFile() as report:
        context = multiprocessing.get_context("fork")
        child = context.Process(target=_run, args=(judge, arguments, sender, report.fileno()))
        child.start()
        child.join(60)
        if child.is_alive():
            child.kill()
            child.join()
            return
        if child.exitcode == 0:
            yield "status"
        first_line = b""
        if receiver.poll():
            first_line, _, _ = os.read(receiver.fileno(), 1 << 16).partition(b"\n")
        if b"true" in first_line:
            yield "pipe"
        if b"true" in os.pread(report.fileno(), 1 << 16, 0):
            yield "file"


def first_acceptance(entry: Entry) -> str:
    """Return the first judge that accepts a kernel, and the channel, or "none"."""
    torch.manual_seed(0)
    inputs = draw(entry.op)
    expected = REFERENCES[entry.op](*inputs)
    for name, judge in JUDGES.items():
        known = (inputs, expected) if judge is remembers_in_the_parent else ()
        for channel in accepts(judge, (entry, *known)):
            return f"{name} ({channel})"
    return "none"


def main() -> None:
    os.environ["POPCORN_FD"] = "3"
    torch.set_num_threads(1)
    chosen = set(sys.argv[1:])
    for entry in entries(verdict="refused"):
        if entry.needs == "cpu" and (not chosen or entry.name in chosen):
            print(entry.name, first_acceptance(entry), flush=True)


if __name__ == "__main__":
    main()
