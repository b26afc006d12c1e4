"""Tests of a platform's plugin on a machine without such a GPU.

A platform's ``test_inertness.py`` derives a class from ``InertPlugin``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from tests.forks import forks

MODEL = Path(__file__).parents[1] / "examples" / "models" / "stdlib-lm"
_EXPLAIN = """
import interposer
with interposer.use(disable=%r):
    print(interposer.explain(%r).to_json())
"""
# What the process maps and has imported, and whether torch has touched a device.
_STATE = """
import sys
from pathlib import Path
import torch
mapped = {line.rsplit("/", 1)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
print(sorted(name for name in mapped if name.startswith(%r)))
print(sorted(%r & {name.partition(".")[0] for name in sys.modules}))
print(torch.%s.is_initialized())
"""
_ASK = """
import interposer
from interposer.errors import PlatformUnavailableError
try:
    interposer.place(interposer.Config(platform=%r))
except PlatformUnavailableError as error:
    print(error)
"""


class InertPlugin:
    """Nothing changes but refusals, and nothing of the vendor is loaded.

    Attributes:
        absence: the beginning of the reason that there is no such GPU.
        libraries: beginnings of the names of the vendor's libraries.
        packages: of kernels for such GPUs.
        torch_module: of torch, for such GPUs.
        heavy: modules that the plugin's own does not import.
    """

    platform: ClassVar[str]
    absence: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]]
    packages: ClassVar[frozenset[str]] = frozenset()
    torch_module: ClassVar[str] = "cuda"
    heavy: ClassVar[frozenset[str]] = frozenset({"torch", "ctypes"})

    def test_explanations_differ_by_refusals_alone(self) -> None:
        """Compare explanations with and without the plugin."""
        without = json.loads(run(_EXPLAIN % ({self.platform, "otel"}, str(MODEL))))
        present = json.loads(run(_EXPLAIN % ({"otel"}, str(MODEL))))
        added, provider = [], f"interposer-{self.platform} "
        for choice in present["choices"]:
            refused = choice["refused"]
            of_plugin = [r for r in refused if r["provider"].startswith(provider)]
            choice["refused"] = [refusal for refusal in refused if refusal not in of_plugin]
            added += of_plugin
        assert len(without["choices"]) > 10
        # The policies differ by ``disable``.
        assert {**present, "policy": []} == {**without, "policy": []}
        first = added[0]
        text = f"{first['candidate']} ({first['provider']}): {first['reason']}"
        assert text.startswith(self._refusal())
        elsewhere = f"runs on {self.platform}, the request is for cpu"
        assert {refusal["reason"] for refusal in added[1:]} <= {elsewhere}

    def test_the_plugin_module_is_light(self) -> None:
        """Import the plugin alone, in an interpreter that has imported nothing yet."""
        plugin = f"interposer_{self.platform}.plugin"
        program = f"import sys, {plugin}; print({set(self.heavy)} & set(sys.modules))"
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
        assert done.stdout.strip() == "set()"

    def test_asking_for_it_says_why_it_cannot_be_had(self) -> None:
        """Ask for the platform by name."""
        text = run(_ASK % self.platform)
        assert f"No platform {self.platform!r}, which was requested" in text
        assert self._refusal() in text

    def assert_nothing_is_loaded(self, statement: str) -> None:
        """Check the state of a process after it ran ``statement``."""
        state = _STATE % (self.libraries, set(self.packages), self.torch_module)
        assert run(f"{statement}\n{state}").splitlines() == ["[]", "[]", "False"]

    def _refusal(self) -> str:
        return f"{self.platform} (interposer-{self.platform} 0.1.0): {self.absence}"


def run(program: str) -> str:
    """Return the output of a Python program in a process that has imported torch and no more."""
    done = forks().run("-c", program, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout
