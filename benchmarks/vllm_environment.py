"""Makes a Python with vLLM for CPUs and this repository's distributions, and prints its path.

vLLM comes from the package index, once; the distributions are built from the sources of the moment.
Usage: vllm_environment.py FOLDER
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from cpu_peers import ENVIRONMENTS, Unavailable, environment_python

ROOT = Path(__file__).parents[1]
# What interposer-vllm needs to run on a CPU.
DISTRIBUTIONS = (
    "core",
    "core/sandbox",
    "core/testing",
    "core/tools",
    "ops",
    "quantization",
    "models",
    "models/engine",
    "models/adapt",
    "platforms/cpu",
    "plugins/vllm",
)
# What the tests of plugins/vllm import there.
TESTS = ("hypothesis", "pytest>=9,<9.2", "pytest-timeout", "pytest-xdist")


def install(python: Path) -> None:
    """Build wheels with the tools of the running Python, and install them into another.

    Raises: CalledProcessError: a build or an installation failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
        sources = [str(ROOT / name) for name in DISTRIBUTIONS]
        subprocess.run([sys.executable, "-m", "pip", *build, *sources], check=True)
        wheels = [str(path) for path in Path(folder).glob("*.whl")]
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        # What they require, which vLLM's own requirements hold to its versions, and then they.
        subprocess.run([*pip, *TESTS, *wheels], check=True)
        subprocess.run([*pip, "--no-deps", "--force-reinstall", *wheels], check=True)


def main(folder: Path) -> None:
    environment = replace(ENVIRONMENTS["vllm"], name=folder.name)
    try:
        python = environment_python(environment, folder.parent)
        install(python)
    except (Unavailable, subprocess.CalledProcessError) as error:
        raise SystemExit(f"no environment with vLLM: {error}") from None
    print(python)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
