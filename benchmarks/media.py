"""Images and speech beside transformers, llama.cpp, OpenVINO and whisper.cpp, on equal weights.

    python benchmarks/media_models.py DIR
    python benchmarks/media.py DIR [--rows ROW ...] [--rounds 3] [--threads 2]
    python benchmarks/media.py DIR --rows batch --rounds 1       # a short run; repeat to add rounds
    python benchmarks/media.py DIR --rounds 0 --record "AMD EPYC, AVX512-BF16, two cores"

Images: a Llava with CLIP-L/14 at 336 pixels and the text model of Qwen2-0.5B, bfloat16 beside 16
bits of the others. The row ``encode`` measures the vectors of an image; ``answer`` the first token
after an image and a text of 20 tokens, and the rest of 32 tokens; ``batch`` eight such requests at
once, which start together and are measured until the last has 32 tokens. Speech: Whisper base and
small, 28 seconds of sound, greedy, in 32 bits, and in 16 bits beside whisper.cpp, which has no
convolutions in 32 bits on a CPU. Special tokens of these models are never the likeliest, so every
engine writes as many tokens as it does for a window at most.

Every engine has its own process, suspended by a signal while another one runs. In every round, each
row is run by all engines in a new order, with new inputs. Before its first round, an engine runs a
smaller input. Results are medians over the rounds, with minimum and maximum in brackets. The ratio
of another engine is the median of its seconds by those of interposer in the same round.

Before the rounds, vectors and tokens of equal inputs are compared with those of transformers. The
row ``weights`` only compares, tokens of the Llava in float32 arithmetic: random models amplify the
different roundings of 16 bits from token to token. DIR/media.json keeps every round: later runs add
to it, unless ``--restart`` drops the rounds of the chosen rows. The table at the end has all of
them, with the reason for every engine that cannot be run; ``--record`` also writes it to
results/media.txt.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from cpu_peers import ENVIRONMENTS, Engine, Unavailable, cache_folder, environment_python
from cpu_processes import Worker

RESULTS = Path(__file__).with_name("results") / "media.txt"
WORKER = Path(__file__).with_name("media_worker.py")
OURS, REFERENCE = "interposer", "transformers"
NEW_TOKENS, BATCH, SECONDS = 32, 8, 28
# Seeds of the inputs: of comparisons, of warm-ups, and the first of measurements.
COMPARED, WARM, FIRST = 0, 10, 1000
TIMEOUT_S = 280.0


@dataclass(frozen=True)
class Row:
    """A measurement that engines of equal bits per weight run.

    Attributes:
        command: of the worker, without the seed.
        batch: requests at once, each with a seed.
        labels: lines of the table by the field of the worker's answer. Without any, results are
            compared, and nothing is measured.
    """

    name: str
    bits: int
    engines: tuple[Engine, ...]
    command: Mapping[str, Any]
    labels: Mapping[str, str]
    batch: int = 1

    def input(self, seed: int, is_small: bool = False) -> dict[str, Any]:
        """Build the command for a seed, or a smaller one that warms up."""
        command = dict(self.command)
        if command["kind"] == "answer":
            batch = min(2, self.batch) if is_small else self.batch
            command["seeds"] = [seed * self.batch + number for number in range(batch)]
            if is_small:
                command["new_tokens"] = 2
        else:
            command["seed"] = seed
        return command


def _engines(model: str, bits: int) -> tuple[Engine, ...]:
    """Return the engines of a model: their options, and the files of ``media_models.py``."""
    dtype = {16: "bf16", 32: "f32"}[bits]
    source = f"{model}-{dtype}"
    found = [
        Engine(f"{OURS}:{dtype}", bits, "interposer_media", source, "ours"),
        Engine(f"{REFERENCE}:{dtype}", bits, "transformers_media", source, "transformers"),
    ]
    if model == "llava":
        found += [
            Engine(f"llama.cpp:{kind}", bits, "llama_cpp_mtmd", f"llava-{kind}-gguf", "llama_cpp")
            for kind in ("bf16", "f16")
        ]
        found.append(Engine("openvino:f16", bits, "openvino_media", "llava-openvino", "openvino"))
    elif bits == 16:
        # Not in 32 bits: ggml's convolutions on a CPU have float16 weights only, and whisper.cpp
        # 1.8.5 ends with "GGML_ASSERT(src0->type == GGML_TYPE_F16) failed" in ops.cpp.
        file = f"{model}-f16.bin"
        found.append(Engine("whisper.cpp:f16", bits, "whisper_cpp", file, "whisper_cpp"))
    return tuple(found)


def _rows() -> Iterator[Row]:
    images = _engines("llava", 16)
    answer = {"kind": "answer", "new_tokens": NEW_TOKENS}
    rest = f"the {NEW_TOKENS - 1} tokens after it"
    labels = {"first_s": "first token after an image", "rest_s": rest}
    together = f"{BATCH} requests at once, an image and {NEW_TOKENS} tokens each"
    arithmetic = tuple(
        Engine(f"{name}:f32", 32, f"{name}_media", source, environment)
        for name, source, environment in (
            (OURS, "llava-bf16", "ours"),
            (REFERENCE, "llava-bf16", "transformers"),
            ("openvino", "llava-openvino", "openvino"),
        )
    )
    yield Row("weights", 32, arithmetic, answer, {})
    yield Row("encode", 16, images, {"kind": "encode"}, {"seconds": "vectors of an image"})
    yield Row("answer", 16, images, answer, labels)
    yield Row("batch", 16, images, answer, {"seconds": together}, BATCH)
    for model in ("base", "small"):
        for bits in (32, 16):
            label = {"seconds": f"Whisper {model}, {bits} bits, {SECONDS} s of sound"}
            command = {"kind": "transcribe", "seconds": SECONDS}
            engines = _engines(f"whisper-{model}", bits)
            yield Row(f"whisper-{model}-{bits}", bits, engines, command, label)


ROWS = {row.name: row for row in _rows()}


class Records:
    """The rounds and comparisons of all runs, kept in a JSON file.

    Attributes:
        rounds: by row, the fields of each engine's answer; an engine that failed is missing.
        checks: by row and engine, how its results compare with those of transformers.
        facts: by engine, versions and precision.
        failures: by row and engine, why there is no result.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        text = file.read_text(encoding="utf-8") if file.exists() else "{}"
        found: dict[str, Any] = json.loads(text)
        self.rounds: dict[str, list[dict[str, dict[str, float]]]] = found.get("rounds", {})
        self.checks: dict[str, dict[str, str]] = found.get("checks", {})
        self.facts: dict[str, dict[str, str]] = found.get("facts", {})
        self.failures: dict[str, dict[str, str]] = found.get("failures", {})

    def drop(self, row: str) -> None:
        """Forget the rounds, comparisons and failures of a row."""
        for kept in (self.rounds, self.checks, self.failures):
            kept.pop(row, None)

    def save(self) -> None:
        kept = {name: value for name, value in vars(self).items() if name != "file"}
        self.file.write_text(json.dumps(kept, indent=1), encoding="utf-8")

    def table(self) -> Iterator[str]:
        """Yield the lines of the tables: a line per measurement and engine."""
        yield "| measurement | engine | ms, median (lowest-highest) | rounds | beside interposer |"
        yield "|---|---|---|---|---|"
        for row in ROWS.values():
            for field, label in row.labels.items():
                yield from self._lines(row, field, label)

    def _lines(self, row: Row, field: str, label: str) -> Iterator[str]:
        rounds = self.rounds.get(row.name, [])
        ours = f"{OURS}:{'bf16' if row.bits == 16 else 'f32'}"
        for engine in row.engines:
            values = [round_[engine.name][field] for round_ in rounds if engine.name in round_]
            if not values:
                reason = self.failures.get(row.name, {}).get(engine.name, "not measured")
                yield f"| {label} | {engine.name} | {reason} | 0 | - |"
                continue
            low, middle, high = (1e3 * f(values) for f in (min, statistics.median, max))
            cell = f"{middle:.0f} ({low:.0f}-{high:.0f})"
            if row.command["kind"] == "transcribe":
                cell += f", {SECONDS * 1e3 / middle:.1f} times real time"
            pairs = [
                round_[engine.name][field] / round_[ours][field]
                for round_ in rounds
                if engine.name in round_ and ours in round_
            ]
            ratio = f"x{statistics.median(pairs):.2f}" if pairs and engine.name != ours else "-"
            yield f"| {label} | {engine.name} | {cell} | {len(values)} | {ratio} |"

    def report(self, machine: str) -> str:
        """Return the text of results/media.txt."""
        day = datetime.now(UTC).date().isoformat()
        lines = [
            f"Images and speech beside other engines, {day}; {machine}",
            "",
            "python benchmarks/media_models.py DIR && python benchmarks/media.py DIR",
            "",
            "Random weights, equal in all engines. Every round has new inputs and a new order of",
            "engines. The last column is the median of the ratios within a round.",
            "",
            *self.table(),
            "",
            "Precision and version of each engine:",
            "",
            *(
                f"- {name}: {', '.join(str(value) for value in facts.values())}"
                for name, facts in sorted(self.facts.items())
            ),
            "",
            "Results of equal inputs beside those of transformers:",
            "",
            *(
                f"- {row}, {name}: {text}"
                for row, checks in self.checks.items()
                for name, text in checks.items()
            ),
        ]
        return "\n".join(lines) + "\n"


def measured(row: Row, folder: Path, options: argparse.Namespace, records: Records) -> None:
    """Load the engines of a row, compare their results, and add rounds to the records."""
    failures: dict[str, str] = {}
    records.failures[row.name] = failures
    size = _image_size(folder) if row.command["kind"] != "transcribe" else None
    extra = {"size": size} if size else {}
    workers: dict[str, Worker] = {}

    def run(name: str, command: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return workers[name].run({**command, **extra})
        except Unavailable as error:
            _note(f"{row.name}, {name}: {error}")
            failures[name] = str(error)
            workers.pop(name).end()
            return None

    try:
        for engine in row.engines:
            if options.engines and not {engine.name, engine.name.partition(":")[0]} & set(
                options.engines
            ):
                continue
            _note(f"{row.name}, {engine.name}: loading")
            try:
                python = environment_python(ENVIRONMENTS[engine.environment], options.environments)
                workers[engine.name] = Worker(
                    engine, python, folder, options.threads, TIMEOUT_S, program=WORKER
                )
            except Unavailable as error:
                _note(f"{row.name}, {engine.name}: {error}")
                failures[engine.name] = str(error)
                continue
            facts = workers[engine.name].loaded["facts"]
            records.facts[engine.name] = {name: str(value) for name, value in facts.items()}
        if not records.checks.get(row.name):
            records.checks[row.name] = compared(row, folder, run, list(workers))
        else:
            for name in list(workers):
                run(name, row.input(WARM, is_small=True))
        rounds = records.rounds.setdefault(row.name, [])
        for _ in range(options.rounds if row.labels else 0):
            order = list(workers)
            random.Random(len(rounds)).shuffle(order)
            found: dict[str, dict[str, float]] = {}
            for name in order:
                answer = run(name, row.input(FIRST + len(rounds)))
                if answer is not None:
                    found[name] = _fields(answer)
            rounds.append(found)
            records.save()
            _note(f"{row.name}, round {len(rounds)}: {found}")
    finally:
        for worker in workers.values():
            worker.end()
        records.save()


def compared(row: Row, folder: Path, run: Any, names: Sequence[str]) -> dict[str, str]:
    """Describe how results of equal inputs differ from those of transformers."""
    reference = next((name for name in names if name.startswith(REFERENCE)), None)
    if reference is None:
        return {}
    if row.command["kind"] == "encode":
        return _compared_vectors(row, folder, run, names, reference)
    # Images of one colour, which look the same however an engine resizes them.
    command = {**row.input(COMPARED), "blocks": 1}
    answers = {name: run(name, command) for name in names}
    expected = answers[reference]
    checks: dict[str, str] = {}
    for name, answer in answers.items():
        if name == reference or answer is None or expected is None:
            continue
        equal = total = 0
        for ours, theirs in zip(answer["tokens"], expected["tokens"], strict=True):
            pairs = list(zip(ours, theirs, strict=False))
            equal += next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
            total += len(pairs)
        written = sum(len(tokens) for tokens in answer["tokens"])
        checks[name] = f"the first {equal} of {total} tokens are equal; it writes {written}"
    return checks


def _compared_vectors(
    row: Row, folder: Path, run: Any, names: Sequence[str], reference: str
) -> dict[str, str]:
    """Describe the relative distance of vectors, beside that of another image."""
    vectors: dict[str, Any] = {}
    for name in [*names, reference]:
        other = "other" if name in vectors else name
        file = folder / f"vectors-{other}.npy"
        seed = COMPARED + (other == "other")
        if run(name, {**row.input(seed), "save": str(file)}) is not None:
            vectors[other] = np.load(file)
            file.unlink()
    if reference not in vectors or "other" not in vectors:
        return {}
    right = vectors[reference]

    def distance(name: str) -> float:
        return float(np.linalg.norm(vectors[name] - right) / np.linalg.norm(right))

    def shifted(name: str) -> float:
        """Leave out the first patch, which llama.cpp has not: see ``write_gguf``."""
        return float(np.linalg.norm(vectors[name][:-1] - right[1:]) / np.linalg.norm(right[1:]))

    checks: dict[str, str] = {}
    for name in names:
        if name != reference and name in vectors:
            is_shifted = name.startswith("llama.cpp")
            found = shifted(name) if is_shifted else distance(name)
            rows = "all but the first" if is_shifted else "all"
            checks[name] = (
                f"{rows} vectors differ by {found:.2%}; those of another image by "
                f"{distance('other'):.0%}"
            )
    return checks


def _fields(answer: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of an answer: in all, to the first token, and after it."""
    found = {"seconds": float(answer["seconds"])}
    if answer.get("first_s"):
        found["first_s"] = float(answer["first_s"])
        found["rest_s"] = found["seconds"] - found["first_s"]
    return found


def _image_size(folder: Path) -> int:
    """Read the size of the model's images, so that no engine resizes one.

    Raises: Unavailable: the model is missing.
    """
    file = folder / "llava-bf16" / "config.json"
    if not file.exists():
        raise Unavailable(f"{file} is missing. Try: benchmarks/media_models.py {folder}")
    size = json.loads(file.read_text(encoding="utf-8"))["vision_config"]["image_size"]
    return int(size)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure the chosen rows, and print the table of all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--engines", nargs="+", help="by default all of a row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--restart", action="store_true", help="drop earlier rounds of the rows")
    parser.add_argument("--record", metavar="MACHINE", help="write results/media.txt")
    parser.add_argument("--environments", type=Path, default=cache_folder())
    options = parser.parse_args()
    folder = options.directory.absolute()
    options.environments = options.environments.absolute()
    records = Records(folder / "media.json")
    started = time.perf_counter()
    for name in options.rows if options.rounds else ():
        if options.restart:
            records.drop(name)
        try:
            measured(ROWS[name], folder, options, records)
        except Unavailable as error:
            sys.exit(str(error))
    _note(f"{time.perf_counter() - started:.0f} s")
    print("\n".join(records.table()))
    if options.record:
        RESULTS.write_text(records.report(options.record), encoding="utf-8")


if __name__ == "__main__":
    main()
