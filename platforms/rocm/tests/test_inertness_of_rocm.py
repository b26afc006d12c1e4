"""On a machine without such a GPU the plugin adds one line that says so, and loads nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from interposer_rocm._hardware.system import look

MODEL = Path(__file__).parents[3] / "examples/models/stdlib-lm"
pytestmark = pytest.mark.skipif(
    look().device_file or bool(look().on_bus), reason="needs a machine without a GPU of AMD"
)
EXPLAIN = """
import interposer
with interposer.use(disable=%r):
    print(interposer.explain(%r))
"""
# What a process has become that did something.
STATE = """
import sys
from pathlib import Path
import torch
vendor = ("libamdhip", "libhsa", "librocm", "librocblas", "libhipblas")
mapped = {line.rsplit("/", 1)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
print(sorted(name for name in mapped if name.startswith(vendor)))
print(sorted(name for name in sys.modules if name.partition(".")[0] == "aiter"))
print(torch.cuda.is_initialized())
"""


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_refusals_are_added() -> None:
    """They stand at the end of their subjects or between others; nothing else is different."""
    without = run(EXPLAIN % ({"rocm", "otel"}, str(MODEL)))
    present = run(EXPLAIN % ({"otel"}, str(MODEL)))
    own = re.compile(r"^     not \S+ \(interposer-rocm 0\.1\.0\): (.*)\n", re.MULTILINE)
    reasons = own.findall(present)
    settings = re.compile(r"^  disable = .*\n", re.MULTILINE)
    assert settings.sub("", own.sub("", present)) == settings.sub("", without)
    assert reasons[0] == "no GPU of AMD: no /dev/kfd and none on the bus"
    assert {*reasons[1:]} == {"runs on rocm, the request is for cpu"}


@pytest.mark.parametrize(
    "statement",
    [
        "import interposer_rocm.plugin",
        "from interposer_rocm import _platform, _scaled_products\n"
        "from interposer_rocm._aiter import flash, latent",
        "from interposer_rocm._platform import ROCmPlatform; assert not ROCmPlatform.probe()",
        "import interposer; interposer.place()",
        f"import interposer; interposer.explain({str(MODEL)!r}, 'mi300x')",
    ],
    ids=["plugin", "modules", "probe", "place", "plan"],
)
def test_nothing_of_the_vendor_is_loaded(statement: str) -> None:
    assert run(f"{statement}\n{STATE}").splitlines() == ["[]", "[]", "False"]


def test_the_plugin_module_is_light() -> None:
    heavy = "{'torch', 'ctypes', 'subprocess', 'triton', 'aiter'}"
    program = f"import sys, interposer_rocm.plugin; print({heavy} & set(sys.modules))"
    assert run(program).strip() == "set()"


def test_asking_for_it_says_why_it_cannot_be_had() -> None:
    program = """
import interposer
from interposer.errors import PlatformUnavailableError
try:
    interposer.place(interposer.Config(platform="rocm"))
except PlatformUnavailableError as error:
    print(error)
"""
    text = run(program)
    assert "No platform 'rocm', which was asked for" in text
    assert "rocm (interposer-rocm 0.1.0): no GPU of AMD: no /dev/kfd" in text
