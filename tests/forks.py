"""Programs that run as forks of a process that has imported torch, see ``forked/server.py``.

Importing torch takes longer than most of what the tests run in processes of their own. A program
that is tested for what it imports, or when, needs a new interpreter instead.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

__all__ = ["FORKED", "Forks", "forks"]

FORKED = Path(__file__).parent / "forked"
# As ``python -m`` and ``python FILE`` would.
MODULE = """
import runpy, sys
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
SCRIPT = """
import os, runpy, sys
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Forks:
    """A process that has imported torch and runs programs as its forks, until it is closed."""

    def __init__(self, python: str | Path = sys.executable) -> None:
        folder = tempfile.mkdtemp()
        self._address = f"{folder}/socket"
        self._server = subprocess.Popen(
            [python, "-P", FORKED / "server.py", self._address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.close = weakref.finalize(self, _end, self._server, folder)
        assert self._server.stdout is not None
        assert "are there" in self._server.stdout.readline()

    def command(self, *arguments: str | Path) -> list[str]:
        """Return the command that does what ``python *arguments`` would, in a fork."""
        first, *rest = map(str, arguments)
        if [first, *rest[:1]] == ["-m", "pytest"]:
            # Of its plugins, the server has imported that of anyio.
            rest += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
        source, given = {"-m": (MODULE, rest), "-c": (rest[0] if rest else "", rest[1:])}.get(
            first, (SCRIPT, [first, *rest])
        )
        # The client has no use for a path of its own, nor for what is installed.
        return [sys.executable, "-ISE", str(FORKED / "client.py"), self._address, source, *given]

    def run(self, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run ``python *arguments`` in a fork, with the options of ``subprocess.run``."""
        options = {"capture_output": True, "text": True, "timeout": 300, **options}
        return subprocess.run(self.command(*arguments), **options)


@functools.cache
def forks() -> Forks:
    """Return the forks of this interpreter, which all tests of a worker share."""
    return Forks()


def _end(server: subprocess.Popen[str], folder: str) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)  # with whatever a program left running
    server.communicate()
    shutil.rmtree(folder)
