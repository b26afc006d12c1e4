"""Object files of the native kernels, for each level of each architecture."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["MODELS", "NATIVE", "ToolError", "compiler_of", "listing_of", "objects_of", "require"]

NATIVE = Path(__file__).parents[2] / "platforms" / "cpu" / "native"

MODELS = {
    "aarch64": {
        "neon": ("cortex-a72", "neoverse-n1"),
        "dotprod": ("neoverse-n1",),
        "bf16_i8mm": ("neoverse-n2", "neoverse-v1", "neoverse-v2"),
    },
    "s390x": {"z14": ("z14",), "z15": ("z15", "z16")},
    "x86_64": {
        "avx2": ("haswell", "znver3"),
        "avx2_vnni": ("alderlake",),
        "avx512": ("skylake-avx512",),
        "avx512_vnni": ("icelake-server",),
        "avx512_bf16": ("sapphirerapids", "znver4"),
        "amx": ("sapphirerapids",),
    },
}
"""Processors that LLVM has a model of, by the level of instructions that the library uses there."""


class ToolError(Exception):
    """A program is missing, or the kernels do not compile."""


def compiler_of(architecture: str) -> str:
    """Return the name of the compiler, which is the same on any machine."""
    return f"{architecture}-linux-gnu-g++"


def require(*programs: str) -> None:
    """Raise ToolError unless every program is installed."""
    for program in programs:
        if shutil.which(program) is None:
            raise ToolError(
                f"{program} is not installed. On Debian: apt-get install {_package(program)}"
            )


def objects_of(
    architecture: str, build: Path, flags: str = "", family: str = ""
) -> Iterator[tuple[str, str, Path]]:
    """Yield level, family and object file of everything that is compiled for levels.

    ``build`` is a build folder of CMake, whose objects are reused. ``flags`` come last on each
    command, so that they override those of a level. A ``family`` is compiled alone.

    Raises: ToolError: there is no such compiler, or it fails.
    """
    require("cmake", compiler_of(architecture))
    toolchain = NATIVE / "toolchains" / f"{architecture}-linux-gnu.cmake"
    switches = ("-DINTERPOSER_PYTHON=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON")
    _run("cmake", "-S", NATIVE, "-B", build, f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", *switches)
    every = list(_wanted(architecture, build))
    wanted = [(level, name) for level, name in every if family in ("", name)]
    if not wanted:
        known = ", ".join(sorted({name for _, name in every}))
        raise ToolError(f"there is no family {family!r} for {architecture}. Try one of: {known}")
    targets = [f"{name}_{level}" for level, name in wanted]
    if not flags:
        _run("cmake", "--build", build, "--parallel", "2", "--target", *targets)
    for (level, name), target in zip(wanted, targets, strict=True):
        file = build / "CMakeFiles" / f"{target}.dir" / name / "level.cpp.o"
        yield level, name, _compiled(build, file, flags) if flags else file


def listing_of(architecture: str, file: Path) -> str:
    """Return the code of an object file, as text."""
    options = ("--disassemble", "--demangle", "--no-show-raw-insn", "--wide")
    return _run(f"{architecture}-linux-gnu-objdump", *options, file)


def _package(program: str) -> str:
    """Return the package of Debian that a compiler is in, or another program."""
    architecture, found, _ = program.partition("-linux-gnu-g++")
    return f"g++-{architecture.replace('_', '-')}-linux-gnu" if found else program


def _wanted(architecture: str, build: Path) -> Iterator[tuple[str, str]]:
    """Yield the levels and families that the build folder has targets for."""
    families = sorted(file.parent.name for file in NATIVE.glob("*/level.cpp"))
    for level in MODELS[architecture]:
        for family in families:
            if (build / "CMakeFiles" / f"{family}_{level}.dir").is_dir():
                yield level, family


def _compiled(build: Path, file: Path, flags: str) -> Path:
    """Return an object file that is compiled as ``file`` is, with more flags."""
    commands = json.loads((build / "compile_commands.json").read_text())
    name = file.relative_to(build).as_posix()
    (command,) = (shlex.split(c["command"]) for c in commands if f" {name} " in c["command"])
    result = file.with_suffix(".flags.o")
    result.parent.mkdir(parents=True, exist_ok=True)
    command[command.index("-o") + 1] = str(result)
    _run(*command, *shlex.split(flags))
    return result


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(f"{command[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout
