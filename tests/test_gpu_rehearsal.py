"""The bundle in an otherwise empty Python of another version, without a network: all stages.

The Python has what the target has, at its versions: 3 GB are downloaded and 8 GB lie below pytest's
temporary folder meanwhile. ``make gpu-rehearsal`` runs this, nothing else does.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def succeed(*command: str | Path, **options: Any) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout[-4000:]
    said: str = done.stdout
    return said


def python_of(version: str) -> str:
    """Return a Python of that version, or skip."""
    # On a path that pyenv manages stands a script, which refuses versions that are not selected.
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    found = str(pyenv[-1]) if pyenv else shutil.which(f"python{version}")
    if found is None:
        pytest.skip(f"needs python{version} on the path")
    return found


def no_network() -> tuple[str, ...]:
    """Return the prefix of a command that must have no network, or skip."""
    for options in (("-n",), ("-rn",)):
        command = ("unshare", *options)
        if (
            shutil.which("unshare")
            and subprocess.run([*command, "true"], check=False).returncode == 0
        ):
            return command
    pytest.skip("needs unshare, and the right to make a network namespace")


@pytest.mark.process
@pytest.mark.versions
@pytest.mark.timeout(5400)
def test_all_stages_run_from_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from evidence.ledger import Ledger
    from evidence.manifest import Bundle
    from evidence.stages import STAGES
    from evidence.target import read_target

    target, isolated = read_target(), no_network()
    bundle, python = tmp_path / "bundle", tmp_path / "python" / "bin" / "python"
    print(succeed(sys.executable, BENCHMARKS / "gpu_bundle.py", bundle))
    succeed(python_of(target.python), "-m", "venv", tmp_path / "python")
    known = {name: version for name, version in target.installed.items() if version}
    pip = (python, "-m", "pip")
    # The interpreter of triton 3.6 makes scalars of arrays of one, which a newer numpy refuses.
    known["numpy"] = "2.3.5"
    pins = [f"{name}=={version}" for name, version in known.items()]
    succeed(*pip, "install", "--quiet", "--no-cache-dir", *pins)
    # Whatever came along of what the bundle brings must come from the bundle.
    brought = [wheel.name for wheel in Bundle.read(bundle).wheels if not wheel.ours]
    succeed(*pip, "uninstall", "--quiet", "--yes", *brought)
    out = tmp_path / "out"
    program: tuple[str | Path, ...] = (
        *isolated,
        python,
        BENCHMARKS / "gpu_evidence.py",
        "--tiny",
        "--patience",
        "4",
    )
    folders = ("--bundle", bundle, "--out", out, "--work", tmp_path / "work")
    print(succeed(*program, *folders, "--limit", "4000"))
    ledger = Ledger(out)
    states = {
        stage.name: entry.state for stage in STAGES if (entry := ledger.entry(stage.steps[0].name))
    }
    assert states.keys() == {stage.name for stage in STAGES}
    assert {*states.values()} <= {"held", "cut"}
