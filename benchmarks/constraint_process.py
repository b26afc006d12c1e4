"""Time to compile a JSON schema for the first time, with and without a child process before it.

    python benchmarks/constraint_process.py MODEL [--rounds 60]

Prints the medians of paired rounds in milliseconds. Each round compiles a schema that neither model
has compiled before.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from interposer_engine import AsyncLanguageModel, Constraint, ConstraintLimits, load

_NUM_PROPERTIES = 8


def schema(number: int) -> Constraint:
    """Return an ordinary schema: an object with eight bounded strings."""
    names = [f"field_{number}_{index}" for index in range(_NUM_PROPERTIES)]
    properties = {name: {"type": "string", "maxLength": 30} for name in names}
    return Constraint.json_schema(
        {"type": "object", "properties": properties, "required": names[:1]}
    )


async def milliseconds(model: AsyncLanguageModel, constraint: Constraint) -> float:
    """Return the time to compile a constraint."""
    start = time.perf_counter()
    await model.compile_constraint(constraint)
    return 1e3 * (time.perf_counter() - start)


async def measure(path: str, num_rounds: int) -> None:
    """Measure paired rounds and print their medians."""
    first, second = (load(path, cache_tokens=512) for _ in range(2))
    async with (
        AsyncLanguageModel(first) as alone,
        AsyncLanguageModel(second, constraint_limits=ConstraintLimits()) as limited,
    ):
        for model in (alone, limited):
            await model.compile_constraint(schema(-1))  # reads the vocabulary, starts the child
        rows = [
            (await milliseconds(alone, schema(number)), await milliseconds(limited, schema(number)))
            for number in range(num_rounds)
        ]
    without, with_child = (statistics.median(column) for column in zip(*rows, strict=True))
    more = statistics.median(limited - plain for plain, limited in rows)
    print(f"without the child process {without:.2f} ms, with it {with_child:.2f} ms")
    print(f"it costs {more:.2f} ms more (median of {num_rounds} differences)")


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    asyncio.run(measure(options.model, options.rounds))


if __name__ == "__main__":
    main()
