"""Build the wheels of all distributions into one folder.

    python platforms/wheels.py [FOLDER] [--architectures x86_64 aarch64 s390x]

Wheels without native code serve every machine. For distributions with native code, GCC compiles
for the architecture, Zig links for the oldest supported C library, and auditwheel names the wheel
after the systems that it runs on. docs/install.md lists the required packages. Wheels of earlier
runs in the folder are replaced.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = [
    "ARCHITECTURES",
    "NATIVE",
    "OLDEST",
    "WheelError",
    "build",
    "build_pure",
    "distributions",
    "require",
]

ROOT = Path(__file__).parents[1]
NATIVE = ("platforms/cpu", "plugins/gguf")
"""Folders of the distributions with native code."""

ARCHITECTURES = ("x86_64", "aarch64", "s390x")
OLDEST = (2, 28)
"""Version of the oldest supported C library, which is also that of torch."""

_GLIBC = ".".join(map(str, OLDEST))
_TOOLCHAIN = ROOT / "platforms" / "cpu" / "native" / "toolchains" / "manylinux.cmake"
_DEBIAN = {name: f"g++-{name.replace('_', '-')}-linux-gnu" for name in ARCHITECTURES}


class WheelError(Exception):
    """A wheel cannot be built; the text says why and what to do."""


def distributions() -> Iterator[str]:
    """Yield the folders of all distributions, relative to the repository."""
    for pattern in ("*/pyproject.toml", "*/*/pyproject.toml"):
        for path in sorted(ROOT.glob(pattern)):
            yield path.parent.relative_to(ROOT).as_posix()


def build_pure(distribution: str, folder: Path) -> Path:
    """Build the wheel of a distribution without native code into ``folder``; return its path.

    Raises: WheelError: the build failed.
    """
    with tempfile.TemporaryDirectory() as name:
        _pip_wheel(distribution, Path(name))
        (wheel,) = Path(name).glob("*.whl")
        return _replace(wheel, folder, wheel.name.split("-")[0] + "-*.whl")


def build(distribution: str, architecture: str, folder: Path, cache: Path) -> Path:
    """Build the wheel of a distribution with native code into ``folder``; return its path.

    ``cache`` keeps objects, so that a later build compiles only changed files.

    Raises: WheelError: a program is missing, compilation fails, or the wheel needs a C library
        newer than ``OLDEST``.
    """
    require(architecture)
    with tempfile.TemporaryDirectory() as name:
        raw = _compile(distribution, architecture, Path(name), cache)
        repaired = Path(name) / "repaired"
        # auditwheel determines the tag. It copies nothing into the wheel, so the libraries keep
        # their names.
        _run(
            *(sys.executable, "-m", "auditwheel", "repair", "--patcher", "none"),
            *("--wheel-dir", str(repaired), str(raw)),
        )
        (wheel,) = repaired.glob("*.whl")
        tag = re.search(r"\bmanylinux_(\d+)_(\d+)_(\w+?)\.", wheel.name)
        if tag is None or (int(tag[1]), int(tag[2])) > OLDEST or tag[3] != architecture:
            raise WheelError(
                f"auditwheel calls the wheel {wheel.name}, which is for newer systems than those "
                f"with glibc {_GLIBC}. Try: python -m auditwheel show {wheel.name}, which names "
                "the symbols"
            )
        return _replace(wheel, folder, f"{wheel.name.split('-')[0]}-*_{architecture}.whl")


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


def _compile(distribution: str, architecture: str, folder: Path, cache: Path) -> Path:
    """Compile the wheel before auditwheel; its tag has only the architecture."""
    objects = (cache / architecture / Path(distribution).name).absolute()
    headers = (cache / "headers").absolute()
    shutil.copytree(sysconfig.get_path("include"), headers, dirs_exist_ok=True)
    # Debian's pyconfig.h includes the file of one architecture, which a cross compiler does not
    # find. All 64-bit Linux systems have the same sizes of types, and the limited API does not
    # depend on the byte order.
    shutil.copyfile(_pyconfig(), headers / "pyconfig.h")
    defined = {
        "CMAKE_TOOLCHAIN_FILE": str(_TOOLCHAIN),
        "INTERPOSER_ARCHITECTURE": architecture,
        "INTERPOSER_GLIBC": _GLIBC,
        "INTERPOSER_ZIG": f"{sys.executable} -m ziglang",
        "Python_INCLUDE_DIR": str(headers),
    }
    settings = [f"--config-settings=cmake.define.{name}={text}" for name, text in defined.items()]
    settings.append(f"--config-settings=build-dir={objects}")
    _pip_wheel(distribution, folder, *settings, _PYTHON_HOST_PLATFORM=f"linux-{architecture}")
    (wheel,) = folder.glob("*.whl")
    # A failed compilation still gives a wheel, without native code.
    if not wheel.stem.endswith(f"linux_{architecture}"):
        raise WheelError(
            f"the kernels do not compile for {architecture}, so the wheel is {wheel.name}. Try: "
            f"python -m pip wheel --verbose {ROOT / distribution} with {' '.join(settings)}"
        )
    return wheel


def _pyconfig() -> Path:
    """Locate the header of this Python that defines the sizes of types."""
    plain = Path(sysconfig.get_config_h_filename())
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    specific = plain.parents[1] / multiarch / plain.parent.name / plain.name
    return specific if multiarch and specific.is_file() else plain


def _replace(wheel: Path, folder: Path, earlier: str) -> Path:
    """Copy a wheel into ``folder``, in place of files that match the pattern ``earlier``."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(earlier):
        path.unlink()
    return Path(shutil.copy(wheel, folder))


def _pip_wheel(distribution: str, folder: Path, *settings: str, **variables: str) -> None:
    _run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", str(folder), *settings, str(ROOT / distribution)),
        **variables,
    )


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
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist")
    parser.add_argument(
        "--architectures",
        nargs="+",
        default=[platform.machine()],
        help=f"of native code: {', '.join(ARCHITECTURES)}; this machine's by default",
    )
    parser.add_argument(
        "--cache", type=Path, default=ROOT / ".wheels_cache", help="keeps objects between runs"
    )
    options = parser.parse_args(arguments)
    try:
        for architecture in options.architectures:
            require(architecture)
        for distribution in distributions():
            if distribution not in NATIVE:
                print(build_pure(distribution, options.folder), flush=True)
        for distribution in NATIVE:
            for architecture in options.architectures:
                print(f"Compiling {distribution} for {architecture} ...", flush=True)
                wheel = build(distribution, architecture, options.folder, options.cache)
                print(f"{wheel}, {wheel.stat().st_size / 2**20:.1f} MiB", flush=True)
    except WheelError as error:
        sys.exit(f"No wheel: {error}")


if __name__ == "__main__":
    main()
