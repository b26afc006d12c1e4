"""A process that verifies one part of a distribution after the other, and the other end of it.

    python benchmarks/gpu_worker.py DIST PLATFORM

Standard input has a part per line, an op or one of ``PARTS``; standard output has one line of JSON
for each. A worker computes with one thread of the processor: there are as many workers as
processors, and threads of all for each made trivial ops last a minute.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interposer_testing import Report, Trial

_SHARES = {"attention": 8, "layers": 4, "schemes": 1}
PARTS = tuple(
    f"{kind} {number}/{shares}" for kind, shares in _SHARES.items() for number in range(shares)
)
"""The kinds of records that a distribution declares beside kernels of ops, in shares: "layers 1/4"
are the trials of layers whose number is 1 modulo 4."""

_MOST_FAULTS = 4


class Worker:
    """The process, as whoever asks it sees it; it starts when it is first asked."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
        self.end = ""

    def ask(self, part: str, limit_s: float) -> dict[str, Any] | None:
        """Return the answer for a part; None if the process ended or took too long, see ``end``."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{part}\n".encode())
            process.stdin.flush()
        except BrokenPipeError:
            self.end = self._last_words(process)
            return None
        line = _line(process.stdout, time.monotonic() + limit_s)
        if line is None:
            self.end = f"took more than {limit_s:.0f} s"
            return None
        if not line:
            self.end = self._last_words(process)
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        self._said.close()

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        status = process.wait()
        self._said.seek(0)
        said = self._said.read().decode(errors="replace")
        return f"ended with {status} and said: {said[-600:]}"


def _line(stream: IO[bytes], end: float) -> bytes | None:
    """Return the next line, nothing at the end of the stream, None if it takes too long."""
    found = b""
    while not found.endswith(b"\n"):
        ready, _, _ = select.select([stream], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        read = os.read(stream.fileno(), 65536)
        if not read:
            return b""
        found += read
    return found


def main() -> None:
    distribution, platform = sys.argv[1:3]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a kernel prints is no answer
    for line in sys.stdin:
        print(json.dumps(verified(distribution, line.strip(), platform)), file=answers, flush=True)


def verified(distribution: str, part: str, platform: str) -> dict[str, Any]:
    """Return the state of a part, its candidates, and the first faults."""
    from interposer.errors import described, foreign_errors
    from interposer_testing import verify

    try:
        if part in PARTS:
            return _tried(distribution, part, platform)
        return _told(verify(distribution, op=part, platform=platform, quick=True))
    except foreign_errors() as error:
        return {"state": "wrong", "candidates": [], "faults": [f"raised {described(error)}"]}


def _told(report: Report) -> dict[str, Any]:
    faults = [
        f"{candidate.name}: {tally.aspect}, {finding.dtype}, {finding.case}: {finding.reason}"
        for candidate in report.in_state("wrong")
        for tally in candidate.tallies
        for finding in tally.findings
    ]
    candidates = [
        {"name": candidate.name, "state": candidate.state, "dtypes": list(candidate.dtypes)}
        for candidate in report.candidates
    ]
    return {"state": report.state, "candidates": candidates, "faults": faults[:_MOST_FAULTS]}


def _tried(distribution: str, part: str, platform: str) -> dict[str, Any]:
    """Return the state, candidates and first faults of a share of the trials that are of no op."""
    from interposer import Config, current_registry, place
    from interposer_testing import attention_trials, layer_trials, scheme_trials

    registry = current_registry()
    device = place(Config(platform=platform) if platform else None).device
    kind, _, share = part.partition(" ")
    first, of = map(int, share.split("/"))
    trials: Iterable[Trial]
    if kind == "attention":
        trials = attention_trials(registry, device, distribution, 0, quick=True)
    else:
        trials = {"layers": layer_trials, "schemes": scheme_trials}[kind](
            registry, device, distribution, 0
        )
    ran: dict[str, int] = {}
    faults = []
    for trial in islice(trials, first, None, of):
        if not trial.verdict or trial.not_run:
            continue
        name = trial.candidate.name
        ran[name] = ran.get(name, 0) + 1
        faults += [f"{trial}: {fault}" for fault in trial.run()]
    state = "wrong" if faults else "correct" if ran else "not run"
    candidates = [{"name": name, "trials": count} for name, count in ran.items()]
    return {"state": state, "candidates": candidates, "faults": faults[:_MOST_FAULTS]}


if __name__ == "__main__":
    main()
