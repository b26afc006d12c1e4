"""Processes of the engines; only one runs at a time."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cpu_engines.contract import Settings
from cpu_peers import ENVIRONMENTS, INSTRUCTIONS, Engine, Unavailable

__all__ = ["Worker", "available_mib"]

WORKER = Path(__file__).with_name("cpu_worker.py")


class Worker:
    """A process with a loaded model, suspended by a signal whenever it is idle.

    Otherwise, its spinning threads would take processor cores from the other engines.
    """

    def __init__(
        self,
        engine: Engine,
        python: Path,
        folder: Path,
        threads: int,
        timeout_s: float,
        settings: Settings | None = None,
        instructions: str = "",
        program: Path = WORKER,
    ) -> None:
        self.engine = engine
        self.timeout_s = timeout_s
        source = folder / engine.source
        if not source.exists():
            writer = program.name.replace("worker", "models")
            raise Unavailable(f"{source} is missing. Try: benchmarks/{writer}")
        self.log = tempfile.NamedTemporaryFile(mode="w+b", suffix=".log")  # noqa: SIM115 - see end
        number = str(threads)
        more = [] if settings is None else [json.dumps(asdict(settings))]
        self.process = subprocess.Popen(
            [python, program, engine.module, source, engine.option, number, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            # Its own process group, so that child processes are suspended and ended with it.
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": number,
                "HF_HUB_OFFLINE": "1",
                **INSTRUCTIONS[instructions],
                **ENVIRONMENTS[engine.environment].variables(Path(python)),
            },
        )
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.loaded = self._answer()
        self._signal(signal.SIGSTOP)

    def run(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Run a measurement in the process and return its result.

        Raises: Unavailable: the process failed or took too long; it is then ended.
        """
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(row) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Unavailable(self._last_words()) from None
        found = self._answer()
        self._signal(signal.SIGSTOP)
        return found

    def end(self) -> None:
        """End the process and its child processes."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.reader.join()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                # Data that the process has not read can no longer be delivered.
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _signal(self, number: signal.Signals) -> None:
        # After waiting for a process, its id can belong to another process.
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def _answer(self) -> dict[str, Any]:
        try:
            line = self.answers.get(timeout=self.timeout_s)
        except queue.Empty:
            self.end()
            raise Unavailable(f"no answer within {self.timeout_s:.0f} s") from None
        if not line:
            reason = self._last_words()
            self.end()
            raise Unavailable(reason)
        return json.loads(line)  # type: ignore[no-any-return]

    def _last_words(self) -> str:
        """Return the last output line that looks like an error, or the last line."""
        status = self.process.wait()
        lines = Path(self.log.name).read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [line.strip() for line in lines if line.strip()]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return (errors or lines or [f"ended with status {status}"])[-1]


def available_mib() -> int:
    """Read the available memory of the system in MiB."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 1 << 20
