"""On a machine without such a GPU nothing changes but one line that says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from interposer_cuda._hardware.system import look

MODEL = Path(__file__).parents[3] / "examples/models/stdlib-lm"
pytestmark = pytest.mark.skipif(
    bool(look().nodes), reason="needs a machine without a GPU of NVIDIA"
)
EXPLAIN = """
import interposer
with interposer.use(disable=%r):
    print(interposer.explain(%r))
"""
# What the process maps, and whether torch has touched a device.
STATE = """
from pathlib import Path
import torch
mapped = {line.rsplit("/", 1)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
print(sorted(name for name in mapped if name.startswith(("libcuda", "libnvidia", "libnvrtc"))))
print(torch.cuda.is_initialized())
"""


def run(program: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_explanations_differ_by_refusals_alone() -> None:
    without = run(EXPLAIN % ({"cuda", "otel"}, str(MODEL))).splitlines()
    present = run(EXPLAIN % ({"otel"}, str(MODEL))).splitlines()
    added = [line for line in present if "interposer-cuda" in line]
    assert len(without) > 100
    assert [line for line in present if line not in added and " disable = " not in line] == [
        line for line in without if " disable = " not in line
    ]
    assert added[0].startswith("     not cuda (interposer-cuda 0.1.0): no GPU of NVIDIA")
    assert all(line.startswith("     not ") for line in added)
    assert all(line.endswith(": runs on cuda, the request is for cpu") for line in added[1:])


@pytest.mark.parametrize(
    "statement",
    [
        "import interposer_cuda.plugin",
        "import interposer_cuda._platform",
        "from interposer_cuda._platform import CUDAPlatform; assert not CUDAPlatform.probe()",
        "import interposer; interposer.place()",
        f"import interposer; interposer.explain({str(MODEL)!r}, 'h100')",
    ],
)
def test_no_library_of_the_vendor_is_loaded(statement: str) -> None:
    assert run(f"{statement}\n{STATE}").splitlines() == ["[]", "False"]


def test_the_plugin_module_is_light() -> None:
    program = "import sys, interposer_cuda.plugin; print({'torch', 'ctypes'} & set(sys.modules))"
    assert run(program).strip() == "set()"


def test_asking_for_it_says_why_it_cannot_be_had() -> None:
    program = """
import interposer
from interposer.errors import PlatformUnavailableError
try:
    interposer.place(interposer.Config(platform="cuda"))
except PlatformUnavailableError as error:
    print(error)
"""
    text = run(program)
    assert "No platform 'cuda', which was asked for" in text
    assert "cuda (interposer-cuda 0.1.0): no GPU of NVIDIA" in text
