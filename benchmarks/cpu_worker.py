"""Worker process with one engine of ``cpu_decode.py`` or ``batch_kinds.py``.

    python cpu_worker.py MODULE PATH OPTION THREADS [SETTINGS]

Started by these scripts; SETTINGS is JSON of the class Settings in ``cpu_engines/contract.py``.

Loads the model, then runs one measurement per JSON line on stdin, and answers each with a JSON line
on the original stdout. Output of the libraries is redirected to stderr. The worker runs in the
engines' environments: standard library only.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from cpu_engines.contract import BatchEngine, Engine, Settings
from cpu_engines.kinds import run as run_kind

MIB = 2**20


class AnonymousPeak:
    """Peak of this process's anonymous memory, sampled during a ``with`` block.

    Pages of mapped files are excluded, because the system can reclaim them.
    """

    def __enter__(self) -> AnonymousPeak:
        self.bytes = memory("RssAnon")
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.bytes = max(self.bytes, memory("RssAnon"))

    def _watch(self) -> None:
        while not self.ended.wait(0.002):
            self.bytes = max(self.bytes, memory("RssAnon"))


def memory(field: str) -> int:
    """Read a memory size of this process from the system, in bytes; 0 if unknown."""
    status = Path("/proc/self/status")
    text = status.read_text(encoding="utf-8") if status.exists() else ""
    found = re.search(rf"{field}:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


def run(engine: Engine, row: dict[str, int]) -> dict[str, float]:
    """Measure the seconds of a prefill and of the following decode steps.

    Prompts are random, so that prefix caches have no effect.
    """
    generator = random.Random(row["seed"])
    batch, new_tokens = row["batch"], row["new_tokens"]
    prompts = [
        [generator.randrange(row["vocab_size"]) for _ in range(row["context"])]
        for _ in range(batch)
    ]
    engine.reserve(batch, row["context"] + new_tokens + 1)
    start = time.perf_counter()
    tokens = engine.prefill(prompts, new_tokens + 1)
    middle = time.perf_counter()
    counts = {len(tokens)}
    for _ in range(new_tokens):
        counts.add(len(engine.step()))
    end = time.perf_counter()
    engine.end()
    if counts != {batch}:
        raise RuntimeError(f"steps gave {sorted(counts)} tokens instead of {batch}")
    return {
        "prefill_s": middle - start,
        "decode_s": end - middle,
        "peak_rss_mib": memory("VmHWM") / MIB,
        "anonymous_mib": memory("RssAnon") / MIB,
    }


def answer(out: IO[str], **fields: Any) -> None:
    out.write(json.dumps(fields) + "\n")
    out.flush()


def main() -> None:
    module, path, option, threads, *more = sys.argv[1:]
    settings = [Settings.of(json.loads(text)) for text in more]
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    start = time.perf_counter()
    library = importlib.import_module(f"cpu_engines.{module}")
    with AnonymousPeak() as peak:
        engine: BatchEngine = library.open_engine(Path(path), option, int(threads), *settings)
        seconds = time.perf_counter() - start
    answer(
        out,
        load_s=seconds,
        load_peak_mib=peak.bytes / MIB,
        facts=engine.facts(),
    )
    for line in sys.stdin:
        row = json.loads(line)
        # A row without a kind is one that every engine runs.
        answer(out, **(run_kind(engine, row) if "kind" in row else run(engine, row)))


if __name__ == "__main__":
    main()
