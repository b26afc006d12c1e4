"""The whole conformance kit with every level of instructions of this processor forced in turn."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interposer_cpu import native

pytestmark = [
    pytest.mark.process,
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent()),
]

NATIVE = Path(__file__).parents[1] / "native"
PROGRAM = Path(__file__).with_name("verify_level.py")
FIXED = ", compile dynamic: the op declares no batched arguments, so it has no number of rows"


def needed(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"needs {program} (on Debian: cmake g++)")
    return path


def succeed(*command: str | Path) -> str:
    """Run a command and return its output."""
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    return process.stdout


def check(level: str, *options: str | Path) -> None:
    output = succeed(sys.executable, PROGRAM, level, *options)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert found["level"] == level
    assert found["wrong"] == [], found["text"]
    assert sum(name.endswith("_native") for name in found["correct"]) > 30
    assert [reason for reason in found["not run"] if not says_nothing_of_levels(reason)] == []


def says_nothing_of_levels(reason: str) -> bool:
    """Check whether a trial may be skipped at every level, on any processor.

    The wheel's tag does not depend on the level, and an editable installation has none. The one op
    named here has tokens as its second dimension, and the kit varies only the first.
    """
    op, _, _ = reason.partition(" ")
    return ", wheel: " in reason or (op == "batched_linear" and reason.endswith(FIXED))


@pytest.mark.parametrize("level", native.levels())
def test_the_conformance_kit_passes_at_every_level(level: str) -> None:
    check(level)


def test_the_conformance_kit_passes_with_emulated_tiles(request: pytest.FixtureRequest) -> None:
    if "avx512_bf16" not in native.levels():
        pytest.skip("needs a processor with the level avx512_bf16")
    cmake, cache = needed("cmake"), request.config.cache
    assert cache is not None
    needed("c++")
    folder = cache.mkdir("emulated-tiles")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        python = f"-DPython_EXECUTABLE={sys.executable}", f"-DPython_ROOT_DIR={sys.prefix}"
        succeed(cmake, f"-S{NATIVE}", f"-B{folder}", "-DINTERPOSER_EMULATED_TILES=ON", *python)
        succeed(cmake, "--build", folder, "--parallel", "2", "--target", "_native")
    check("amx", "--library", folder / "_native.abi3.so")
