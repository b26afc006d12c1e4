"""One wheel of the native kernels below every version of torch that is declared.

Each version has an environment of its own, with all that pip installs for it: up to 3 GB are
downloaded, 5 GB lie below pytest's temporary folder meanwhile. ``make test-torch`` runs these
tests, nothing else does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from interposer_cpu import native
from interposer_engine import load

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "models" / "stdlib-lm"
SERVE = Path(__file__).parent / "foreign" / "serve.py"
PROMPT, NUM_TOKENS = "import os\nimport sys\n\n\ndef main(", 24
VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
OURS = (
    *("core", "core/sandbox", "core/testing", "ops", "quantization"),
    *("models", "models/engine", "models/adapt", "platforms/cpu"),
)
# What follows from torch's version. Everything else is what it is in these tests.
OF_TORCH = {"setuptools", "torch", "triton"}
# What torch warns of itself, where its compiler is imported.
TORCH_ITSELF = ("`torch.jit.script_method` is deprecated",)


def succeed(*command: str | Path, **variables: str) -> str:
    """Return the output of a command with ``variables`` in its environment; errors go to ours."""
    given = {**os.environ, **variables}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=given, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return wheels of our distributions, the kernels compiled once."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = sys.executable, "-m", "pip"
    succeed(*pip, "wheel", "--no-deps", "--wheel-dir", folder, *(ROOT / name for name in OURS))
    found = sorted(folder.glob("*.whl"))
    # Where nothing could be compiled, this would be any platform's.
    assert [wheel.name for wheel in found if "-cp311-abi3-" in wheel.name], found
    return found


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """Return the tokens that the model generates with the torch of these tests."""
    language_model = load(MODEL, dtype="float32", max_sequences=1)
    (completion,) = language_model.generate(PROMPT, max_new_tokens=NUM_TOKENS)
    return list(completion.token_ids)


@pytest.fixture
def environment(version: str, wheels: list[Path], tmp_path: Path) -> Iterator[Path]:
    """Yield the Python of an environment with a version of torch; it is removed afterwards."""
    folder, constraints = tmp_path / "environment", tmp_path / "constraints.txt"
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(p for p in pins if p.partition("==")[0] not in OF_TORCH))
    try:
        succeed(sys.executable, "-m", "venv", "--without-pip", folder)
        python = folder / "bin" / "python"
        pip = sys.executable, "-m", "pip", "--python", python
        options = "-qq", "--no-cache-dir", "--no-compile", "--constraint", constraints
        succeed(*pip, "install", *options, f"torch=={version}.*", *wheels)
        yield python
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_declared_are_the_versions_that_are_tested() -> None:
    declared = dict[str, set[str]]()
    for file in (*ROOT.glob("*/pyproject.toml"), *ROOT.glob("*/*/pyproject.toml")):
        for text in tomllib.loads(file.read_text())["project"]["dependencies"]:
            if (requirement := Requirement(text)).name == "torch":
                candidates = [f"2.{minor}.0" for minor in range(100)]
                found = requirement.specifier.filter(candidates)
                declared[file.parent.name] = {v.rpartition(".")[0] for v in found}
    assert len(declared) >= len(OURS)
    assert declared == {name: set(VERSIONS) for name in declared}


@pytest.mark.versions
@pytest.mark.native
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("torch versions")
@pytest.mark.parametrize("version", VERSIONS)
def test_one_binary_serves_every_version(
    version: str, environment: Path, expected: list[int], tmp_path: Path
) -> None:
    output = succeed(
        environment,
        *(SERVE, MODEL, PROMPT, str(NUM_TOKENS)),
        INTERPOSER_CACHE_DIR=str(tmp_path / "cache"),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
        # Threads that spin while they wait take time from those that work.
        OMP_WAIT_POLICY="passive",
    )
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    print(json.dumps({**found, "tokens": len(found["tokens"])}))
    assert found["torch"].startswith(f"{version}.")
    assert found["absent"] == ""
    assert tuple(found["levels"]) == native.levels()
    assert found["verified"]["wrong"] == ""
    correct = found["verified"]["correct"]
    assert sum(name.endswith("native") for name in correct) > 30
    assert found["doors"].keys() == {"function", "registry", "compiled"}
    assert max(found["doors"].values()) <= 1
    assert found["threads"] == {"more": 2, "equal": True}
    (runtime,) = found["runtimes"]
    assert str(environment.parents[1]) in runtime
    assert [w for w in found["warnings"] if not any(own in w for own in TORCH_ITSELF)] == []
    assert found["tokens"] == expected
