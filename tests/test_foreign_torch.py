"""Wheels below a torch of another architecture, and a model on big-endian memory.

Debian's packages of the other architecture are unpacked into a cache folder, a gigabyte each, and
run by an emulator, which says nothing about speed. Kernels are those of the wheel for it, which is
built by platforms/wheels.py. ``INTERPOSER_FOREIGN_CACHE`` names another
folder than ``~/.cache/interposer/foreign``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from tests.wheel_recipe import wheel_for

from interposer_engine import load

pytestmark = [
    pytest.mark.foreign,
    pytest.mark.timeout(7200),
    pytest.mark.xdist_group("foreign torch"),
]

ROOT = Path(__file__).parents[1]
FOREIGN = Path(__file__).parent / "foreign"
MODEL = ROOT / "examples" / "models" / "stdlib-lm"
PROMPT, NUM_TOKENS = "import os\nimport sys\n\n\ndef main(", 24
CACHE = Path(
    os.environ.get("INTERPOSER_FOREIGN_CACHE", Path.home() / ".cache" / "interposer" / "foreign")
)
PYTHON = "python3.14"
PACKAGES = (
    PYTHON,
    "python3-numpy",
    "python3-packaging",
    "python3-platformdirs",
    "python3-pluggy",
    "python3-pydantic",
    "python3-rich",
    "python3-safetensors",
    "python3-tokenizers",
    "python3-torch",
    "python3-transformers",
    "python3-typer",
)
TOOLS = "on Debian: apt dpkg qemu-user"
# Folders of distributions, and what they need that Debian does not have; it is all Python.
OURS = {
    "interposer-sandbox": "core/sandbox",
    "interposer": "core",
    "interposer-testing": "core/testing",
    "interposer-ops": "ops",
    "interposer-quantization": "quantization",
    "interposer-models": "models",
    "interposer-engine": "models/engine",
}
PURE = ("importlib-metadata", "lazy-importer", "zipp")
ARCHITECTURES = {
    "aarch64": ("arm64", "little", ["neon", "dotprod", "bf16_i8mm"]),
    "s390x": ("s390x", "big", ["z14", "z15"]),
}

# What the kernel of the other system says of the processor that is emulated.
FEATURES = {
    "aarch64": "Features\t: fp asimd asimddp bf16 i8mm\n",
    "s390x": "features\t: vx vxd vxe vxe2\n",
}

# One of every family and kind of weight; the kit tries whatever else there is.
KERNELS = (
    "linear_native",
    "w4a16_linear_native",
    "w8a16_linear_native",
    "mxfp4_linear_native",
    "int8_linear_native",
    "w4a8_linear_native",
    "fp8_linear_native",
    "rms_norm_native",
    "layer_norm_native",
    "qk_norm_native",
    "rotary_embedding_native",
    "silu_and_mul_native",
    "quantize_int8_per_token_native",
)


def needed(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"needs {program} ({TOOLS})")
    return path


def succeed(*command: str | Path, told: int | None = subprocess.PIPE) -> str:
    """Return the output of a command; ``told`` is where its errors go, None to ours."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=told, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + (done.stderr or "")[-4000:]
    return done.stdout


def root_of(architecture: str) -> Path:
    """Return a folder with the other architecture's Python and torch."""
    needed("apt-get"), needed("dpkg-deb")
    name = ARCHITECTURES[architecture][0]
    folder, done = CACHE / name, CACHE / f"{name}.packages"
    if not done.is_file() or done.read_text().split() != list(PACKAGES):
        CACHE.mkdir(parents=True, exist_ok=True)
        succeed("sh", FOREIGN / "make_root.sh", name, folder, *PACKAGES)
        done.write_text("\n".join(PACKAGES))
    # Files below this folder stand before those of the same path in the system.
    (folder / "proc" / "cpuinfo").write_text(FEATURES[architecture])
    return folder


def site_for(wheel: Path, site: Path) -> None:
    """Fill a folder with our distributions, the wheel among them, and what they need besides."""
    for name, folder in OURS.items():
        shutil.copytree(
            ROOT / folder / "src",
            site,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.so"),
        )
        _copy_metadata(name, site)
    for name in PURE:
        found = distribution(name)
        package = name.replace("-", "_")
        shutil.copytree(str(found.locate_file(package)), site / package)
        _copy_metadata(name, site)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def _copy_metadata(name: str, site: Path) -> None:
    found = distribution(name)
    folder = f"{name.replace('-', '_')}-{found.version}.dist-info"
    shutil.copytree(str(found.locate_file(folder)), site / folder)


def run(architecture: str, folder: Path, wheel: Path, *script: str) -> dict[str, Any]:
    """Return the result of a script in the other architecture's Python, with the wheel."""
    emulator = needed(f"qemu-{architecture}")
    root = root_of(architecture)
    site = folder / "site"
    site_for(wheel, site)
    libraries = f"/usr/lib/{architecture}-linux-gnu"
    environment = {
        # Debian chooses among these when packages are installed, which they are not here.
        "LD_LIBRARY_PATH": f"{libraries}/blas:{libraries}/lapack",
        "PYTHONPATH": f"{site}:{root}/usr/lib/python3/dist-packages",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(folder),
        "INTERPOSER_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "2",
        # Threads that spin while they wait take the emulator's time from those that work.
        "OMP_WAIT_POLICY": "passive",
    }
    passed = [part for name, value in environment.items() for part in ("-E", f"{name}={value}")]
    python = root / "usr" / "bin" / PYTHON
    command = (emulator, "-cpu", "max", "-L", str(root), *passed, str(python), *script)
    output = succeed(*command, told=None)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.fixture
def wheel(architecture: str, request: pytest.FixtureRequest) -> Path:
    """Return the wheel that is given to users of an architecture."""
    return wheel_for(architecture, request)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_wheel_loads_and_multiplies_at_every_level(
    architecture: str, wheel: Path, tmp_path: Path
) -> None:
    found = run(architecture, tmp_path, wheel, str(FOREIGN / "load.py"))
    print(json.dumps(found))
    _, byteorder, levels = ARCHITECTURES[architecture]
    assert found["absent"] == ""
    assert (found["byteorder"], found["levels"]) == (byteorder, levels)
    assert list(found["errors"]) == levels
    assert max(max(errors) for errors in found["errors"].values()) <= 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_conform_and_a_model_generates_the_same_tokens(
    architecture: str, wheel: Path, tmp_path: Path
) -> None:
    script = (str(FOREIGN / "conform.py"), str(MODEL), PROMPT, str(NUM_TOKENS))
    found = run(architecture, tmp_path, wheel, *script)
    print(json.dumps({**found, "tokens": len(found["tokens"])}))
    _, byteorder, levels = ARCHITECTURES[architecture]
    assert found["absent"] == ""
    assert (found["byteorder"], found["levels"]) == (byteorder, levels)
    assert found["faults"] == []
    for level in levels:
        assert found["ran"][level].keys() >= set(KERNELS), level
    ours = load(MODEL, dtype="float32", max_sequences=1)
    (completion,) = ours.generate(PROMPT, max_new_tokens=NUM_TOKENS)
    assert found["tokens"] == list(completion.token_ids)
