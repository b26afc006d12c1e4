"""Time to compile a JSON schema for the first time, with and without a child process before it.

    python benchmarks/constraint_process.py MODEL [--rounds 60]

Prints the medians of paired rounds in milliseconds. Each round compiles a schema that neither side
has seen. ``child`` is the time of the child process alone, with the exchange.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from interposer_models import Constraint, ConstraintLimits, TextTokenizer
from interposer_models._engine.constraints import Constraints

_NUM_PROPERTIES = 8


def schema(number: int) -> Constraint:
    """Return an ordinary schema: an object with eight bounded strings."""
    names = [f"field_{number}_{index}" for index in range(_NUM_PROPERTIES)]
    properties = {name: {"type": "string", "maxLength": 30} for name in names}
    return Constraint.json_schema(
        {"type": "object", "properties": properties, "required": names[:1]}
    )


def timed(function: Callable[[Constraint], object], constraint: Constraint) -> float:
    """Return the milliseconds of one call."""
    began = time.perf_counter()
    function(constraint)
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    """Measure paired rounds and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    tokenizer = TextTokenizer(options.model)
    vocab_size = len(tokenizer.vocabulary)
    alone, checked = Constraints(tokenizer, vocab_size), Constraints(tokenizer, vocab_size)
    checked.limit(ConstraintLimits())
    for constraints in (alone, checked):
        constraints.compiled(schema(-1))  # reads the vocabulary, and starts the child process
    process = checked._process
    assert process is not None
    rows = []
    for number in range(options.rounds):
        first, second = schema(2 * number), schema(2 * number + 1)
        rows.append(
            (
                timed(alone.compiled, first),
                timed(checked.compiled, first),
                timed(process.num_bytes, second),
            )
        )
    checked.limit(None)
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    later = statistics.median(row[1] - row[0] for row in rows)
    names = ("here alone", "child first", "child")
    print(", ".join(f"{name} {value:.2f} ms" for name, value in zip(names, medians, strict=True)))
    print(f"the child process costs {later:.2f} ms more (median of {options.rounds} differences)")


if __name__ == "__main__":
    main()
