"""Prints what kernels and a model do below the torch of this Python, as JSON.

    python serve.py MODEL PROMPT NUM_TOKENS

Every native kernel is verified on few cases: called as the library's own functions, and traced as
ops of torch's registry. One is compiled besides, and a model generates. How far it got is said on
the standard error output.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_THREADS = 3


def runtimes() -> list[str]:
    """Return the OpenMP runtimes of this process, by their files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split()[-1] for line in lines if "/" in line}
    return sorted(f for f in files if Path(f).name.startswith(("libgomp", "libomp", "libiomp")))


def num_tasks() -> int:
    """Return how many threads this process has."""
    return len(list(Path("/proc/self/task").iterdir()))


def native_linear() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the function and the preparation of the compiled kernel for ``linear``."""
    from interposer import Kernel, current_registry

    registry = current_registry()
    for candidate in registry.candidates("kernel", "linear"):
        record = candidate.record
        if candidate.name == "linear_native" and isinstance(record, Kernel):
            return registry.load(candidate, record.target), registry.load(candidate, record.prepare)
    raise LookupError("there is no kernel linear_native")


def doors() -> dict[str, float]:
    """Return errors of a product: of the library's function, torch's op, and what is compiled.

    One is what 256 products and sums lose at most in float32, in any order.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 256, generator=generator)
    x = torch.randn(5, 256, generator=generator)
    bias = torch.randn(300, generator=generator)
    expected = x.double() @ weight.double().T + bias
    bound = 257 * 2**-24 * (x.double().abs() @ weight.double().abs().T + bias.abs())
    linear, pack = native_linear()
    constants = pack(weight, bias)
    packed, num_outputs = constants["weight"]

    def product(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = linear(x, (packed, num_outputs), None)
        return found

    registered = torch.empty(5, 300)
    torch.ops.interposer_cpu.linear_out(registered, x, packed, packed)
    results = {
        "function": product(x),
        "registry": registered,
        "compiled": torch.compile(product, fullgraph=True)(x),
    }
    return {name: float(((r - expected).abs() / bound).max()) for name, r in results.items()}


def threads() -> dict[str, Any]:
    """Return the number of threads of a task that wants more, and if results stay the same.

    Nothing of torch's has used its threads before.
    """
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator)
    linear, pack = native_linear()
    packed = pack(torch.randn(2048, 256, generator=generator), None)["weight"]
    results, tasks = list[torch.Tensor](), list[int]()
    for count in (1, NUM_THREADS):
        torch.set_num_threads(count)
        results.append(linear(x, packed, None))
        tasks.append(num_tasks())
    torch.set_num_threads(1)
    return {"more": tasks[1] - tasks[0], "equal": torch.equal(*results)}


def verified() -> dict[str, Any]:
    """Return the result of verifying the platform's distribution, on few cases."""
    from interposer_testing import verify

    report = verify("interposer-cpu", quick=True, progress=progress())
    return {
        "correct": [f"{c.subject} {c.name}" for c in report.in_state("correct")],
        "wrong": str(report) if report.in_state("wrong") else "",
    }


def progress() -> Callable[[int, str], None]:
    """Return a function that reports every candidate once."""
    said = set[str]()

    def tell_of(number: int, trial: str) -> None:
        candidate = trial.split("/")[0]
        if candidate not in said:
            said.add(candidate)
            tell(f"{number} {candidate}")

    return tell_of


def generated(model: str, prompt: str, num_tokens: int) -> list[int]:
    """Return the tokens that follow a prompt."""
    from interposer_engine import load

    language_model = load(model, dtype="float32", max_sequences=1)
    (completion,) = language_model.generate(prompt, max_new_tokens=num_tokens)
    return list(completion.token_ids)


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main(model: str, prompt: str, num_tokens: str) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        import torch

        from interposer_cpu import native

        found: dict[str, Any] = {
            "torch": torch.__version__,
            "absent": native.why_absent(),
            "levels": native.levels(),
        }
        tell(f"torch {torch.__version__}")
        found |= {"threads": threads(), "doors": doors(), "verified": verified()}
        tell("generating")
        found["tokens"] = generated(model, prompt, int(num_tokens))
        found["runtimes"] = runtimes()
    found["warnings"] = sorted({f"{w.filename}: {w.message}" for w in warned})
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
