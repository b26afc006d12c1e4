"""Build manylinux wheels of this platform for every architecture, on any machine.

    python platforms/cpu/manylinux.py [FOLDER] [--architectures x86_64 aarch64 s390x]

GCC compiles for the architecture, Zig links for the oldest supported C library, and auditwheel
checks the result. docs/build-wheels.md lists the required packages. Wheels of earlier runs in the
folder are replaced.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ARCHITECTURES", "OLDEST", "WheelError", "build", "require"]

CPU = Path(__file__).parent
ARCHITECTURES = ("x86_64", "aarch64", "s390x")
OLDEST = (2, 28)
"""The version of the oldest C library that is served, as by torch."""

_GLIBC = ".".join(map(str, OLDEST))
_TOOLCHAIN = CPU / "native" / "toolchains" / "manylinux.cmake"
_DEBIAN = {name: f"g++-{name.replace('_', '-')}-linux-gnu" for name in ARCHITECTURES}


class WheelError(Exception):
    """A wheel cannot be built; the text says why and what to do."""


def build(architecture: str, folder: Path, cache: Path) -> Path:
    """Build the wheel for an architecture into ``folder``, and return its path.

    ``cache`` keeps objects, so that a later build compiles only changed files.

    Raises: WheelError: a program is missing, compilation fails, or the wheel needs a C library
        newer than ``OLDEST``.
    """
    require(architecture)
    with tempfile.TemporaryDirectory() as name:
        raw, repaired = _compiled(architecture, Path(name), cache), Path(name) / "repaired"
        # Which tag is for auditwheel to find. Nothing is copied into the wheel, so its libraries
        # need no new names.
        _run(
            *(sys.executable, "-m", "auditwheel", "repair", "--patcher", "none"),
            *("--wheel-dir", str(repaired), str(raw)),
        )
        (wheel,) = repaired.glob("*.whl")
        tag = re.search(r"-cp311-abi3-manylinux_(\d+)_(\d+)_(\w+?)\.", wheel.name)
        if tag is None or (int(tag[1]), int(tag[2])) > OLDEST or tag[3] != architecture:
            raise WheelError(
                f"auditwheel calls the wheel {wheel.name}, which is for newer systems than those "
                f"with glibc {_GLIBC}. Try: python -m auditwheel show {wheel.name}, which names "
                "the symbols"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"interposer_cpu-*_{architecture}.whl"):
            old.unlink()
        return Path(shutil.copy(wheel, folder))


def require(architecture: str) -> None:
    """Raise WheelError unless the programs that build for an architecture are installed."""
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise WheelError(f"no kernels are written for {architecture!r}. Try one of: {known}")
    compiler = f"{architecture}-linux-gnu-g++"
    if shutil.which(compiler) is None:
        raise WheelError(
            f"{compiler} is not installed. Try, on Debian: apt-get install {_DEBIAN[architecture]}"
        )
    for module in ("auditwheel", "ziglang"):
        if importlib.util.find_spec(module) is None:
            raise WheelError(f"{module} is not installed. Try: pip install --group wheels")


def _compiled(architecture: str, folder: Path, cache: Path) -> Path:
    """Compile the wheel, not yet repaired; its tag has only the architecture."""
    build, headers = (cache / architecture).absolute(), (cache / "headers").absolute()
    shutil.copytree(sysconfig.get_path("include"), headers, dirs_exist_ok=True)
    # Debian's file of this name includes that of the architecture, which is not there. Sizes are
    # those of any 64-bit Linux, and of the order of bytes the limited API knows nothing.
    shutil.copyfile(_sizes(), headers / "pyconfig.h")
    defined = {
        "CMAKE_TOOLCHAIN_FILE": str(_TOOLCHAIN),
        "INTERPOSER_ARCHITECTURE": architecture,
        "INTERPOSER_GLIBC": _GLIBC,
        "INTERPOSER_ZIG": f"{sys.executable} -m ziglang",
        "Python_INCLUDE_DIR": str(headers),
    }
    settings = [f"--config-settings=cmake.define.{name}={text}" for name, text in defined.items()]
    settings.append(f"--config-settings=build-dir={build}")
    _run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", str(folder), *settings, str(CPU)),
        _PYTHON_HOST_PLATFORM=f"linux-{architecture}",
    )
    (wheel,) = folder.glob("*.whl")
    if not wheel.stem.endswith(f"linux_{architecture}"):
        raise WheelError(
            f"the kernels do not compile for {architecture}, so the wheel is {wheel.name}. Try: "
            f"python -m pip wheel --verbose {CPU} with {' '.join(settings)}"
        )
    return wheel


def _sizes() -> Path:
    """Locate the header of this Python that defines the sizes of types."""
    plain = Path(sysconfig.get_config_h_filename())
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    own = plain.parents[1] / multiarch / plain.parent.name / plain.name
    return own if multiarch and own.is_file() else plain


def _run(*command: str, **variables: str) -> None:
    """Run a command. Raises: WheelError: the command failed."""
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise WheelError(f"{' '.join(command[:4])} ... failed:\n{done.stdout[-4000:]}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the wheels requested on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=CPU / "dist")
    parser.add_argument("--architectures", nargs="+", default=ARCHITECTURES)
    parser.add_argument("--cache", type=Path, default=CPU / ".wheels_cache", help="keeps objects")
    given = parser.parse_args(arguments)
    for architecture in given.architectures:
        try:
            wheel = build(architecture, given.folder, given.cache)
        except WheelError as error:
            sys.exit(f"No wheel for {architecture}: {error}")
        print(f"{wheel}, {wheel.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
