"""The example device is built, installed from wheels, and keeps all its promises.

The promises are the tests in examples/example-device/tests, which run in the environment that has
the device. No other environment has one, because torch takes it for the machine's accelerator.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.test_plugin_install import execute, link_packages

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.xdist_group("wheels"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "example-device"
MODEL = ROOT / "examples" / "models" / "stdlib-lm"


@pytest.fixture(scope="module")
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install wheels of the device and its platform in an environment; return its Python."""
    assert request.config.cache is not None
    # Objects of earlier runs are kept, so that only changed files are compiled.
    sources = Path(request.config.cache.mkdir("example-device"))
    folder = tmp_path_factory.mktemp("device")
    for part in ("backend", "platform"):
        shutil.copytree(EXAMPLE / part, sources / part, dirs_exist_ok=True)
        options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "wheels"))
        done = run(sys.executable, "-m", "pip", "wheel", *options, sources / part)
        assert done.returncode == 0, done.stdout[-4000:]
    done = execute(sys.executable, "-m", "venv", "--without-pip", folder / "environment")
    assert done.returncode == 0, done.stderr
    python = folder / "environment" / "bin" / "python"
    link_packages(folder / "environment")
    wheels = sorted((folder / "wheels").iterdir())
    pip = (sys.executable, "-m", "pip", "--python", python)
    done = execute(*pip, "install", "--no-deps", "--no-index", *wheels)
    assert done.returncode == 0, done.stderr
    return python


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, text=True, check=False, **options)


def test_the_device_keeps_its_promises(environment: Path, tmp_path: Path) -> None:
    cache = {"INTERPOSER_CACHE_DIR": str(tmp_path)}
    tests = EXAMPLE / "tests"
    done = run(environment, "-m", "pytest", "-p", "no:cacheprovider", "-q", tests, **cache)
    assert done.returncode == 0, done.stdout[-8000:]
    assert "skipped" not in done.stdout


def test_a_damaged_extension_is_named_with_the_remedy(environment: Path) -> None:
    (library,) = environment.parents[1].glob("lib/*/site-packages/torch_example_device/_C.*.so")
    whole = library.read_bytes()
    library.write_bytes(b"no library")
    try:
        done = run(environment, "-m", "interposer_tools", "doctor")
        assert done.returncode == 1
        assert "'example' of torch-example-device 0.1.0" in done.stdout
        assert "ImportError: " in done.stdout
        without = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stdout
        done = run(environment, "-m", "interposer_tools", "explain", MODEL, **without)
        assert done.returncode == 0, done.stdout
        assert done.stdout.startswith("device: cpu")
    finally:
        library.write_bytes(whole)
