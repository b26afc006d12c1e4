"""Wheels as ``make wheels`` builds them: they install without a compiler, also on old systems.

Tests that run wheels of other architectures are in tests/test_foreign_torch.py.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.wheel_recipe import recipe, wheel_for

from interposer_engine import load

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "models" / "stdlib-lm"
SERVE = Path(__file__).parent / "foreign" / "serve.py"
PROMPT, NUM_TOKENS = "import os\nimport sys\n\n\ndef main(", 24
MACHINES = {
    "x86_64": ("EM_X86_64", True),
    "aarch64": ("EM_AARCH64", True),
    "s390x": ("EM_S390", False),
}
# What every system has that the tag is for, as PEP 600 and the policies of auditwheel say.
LIBRARIES = re.compile(r"lib(c|dl|m|gcc_s|stdc\+\+)\.so\.\d+|ld(-linux-.*|64)\.so\.\d+")

each_architecture = pytest.mark.parametrize("architecture", MACHINES)
each_native = pytest.mark.parametrize("distribution", recipe().NATIVE)


def compiles(test: Any) -> Any:
    """Mark a test that compiles for minutes. One worker does so for all of them."""
    group = pytest.mark.xdist_group("wheels")
    return pytest.mark.slow(pytest.mark.timeout(3600)(group(test)))


@pytest.fixture
def wheel(distribution: str, architecture: str, request: pytest.FixtureRequest) -> Path:
    return wheel_for(architecture, request, distribution)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for architecture, package in [
        ("aarch64", "g++-aarch64-linux-gnu"),
        ("x86_64", "g++-x86-64-linux-gnu"),
    ]:
        with pytest.raises(recipe().WheelError, match=f"apt-get install {re.escape(package)}$"):
            recipe().require(architecture)


def test_architectures_without_kernels_are_refused(tmp_path: Path) -> None:
    expected = "no kernels are written for 'riscv64'. Try one of: x86_64, aarch64, s390x"
    with pytest.raises(recipe().WheelError, match=expected):
        recipe().build("platforms/cpu", "riscv64", tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []


@compiles
@each_native
@each_architecture
def test_auditwheel_states_the_tag(architecture: str, wheel: Path) -> None:
    tags = wheel.name.removesuffix(".whl").split("-")[-1].split(".")
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", "--json", wheel],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(tag.endswith(f"_{architecture}") for tag in tags)
    assert json.loads(done.stdout)["overall_tag"] in tags


@compiles
@each_native
@each_architecture
def test_a_wheel_asks_for_no_more_than_old_systems_have(
    distribution: str, architecture: str, wheel: Path, tmp_path: Path
) -> None:
    from elftools.elf.elffile import ELFFile

    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        module = archive.extract(name, tmp_path)
    with Path(module).open("rb") as file:
        elf: Any = ELFFile(file)
        assert (elf["e_machine"], elf.little_endian) == MACHINES[architecture]
        needed = [t.needed for t in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
        assert [library for library in needed if not LIBRARIES.fullmatch(library)] == []
        versions = dict(versions_of(elf))
        symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())[1:]
    oldest = recipe().OLDEST
    glibc = [number_of(v) for v in versions.values() if v.startswith("GLIBC_")]
    assert max(glibc) <= oldest
    # Of GCC 8, which distributions with this C library were built by.
    assert max(number_of(v) for v in versions.values() if v.startswith("GLIBCXX_")) <= (3, 4, 25)
    undefined = [s.name for s in symbols if s["st_shndx"] == "SHN_UNDEF" and s.name not in versions]
    assert [name for name in undefined if not re.match("_?Py", name)] == []
    exported = [s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF"]
    modules = ["PyInit__native"] if distribution == "platforms/cpu" else []
    assert [name for name in exported if name.startswith("PyInit_")] == modules


def versions_of(elf: Any) -> Iterator[tuple[str, str]]:
    """Yield names of symbols that come from libraries, and the version that is asked for."""
    symbols = elf.get_section_by_name(".dynsym")
    places = elf.get_section_by_name(".gnu.version")
    names = {
        auxiliary["vna_other"]: auxiliary.name
        for _, versions in elf.get_section_by_name(".gnu.version_r").iter_versions()
        for auxiliary in versions
    }
    for at, symbol in enumerate(symbols.iter_symbols()):
        number = places.get_symbol(at)["ndx"]
        if symbol.name and number in names:
            yield symbol.name, names[number]


def number_of(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.rpartition("_")[2].split("."))


@pytest.fixture
def environment(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Create an environment with our wheels, beside this one's torch; return its Python."""
    folder, wheels = tmp_path / "environment", tmp_path / "wheels"
    for distribution in recipe().distributions():
        if distribution in recipe().NATIVE:
            shutil.copy(wheel_for(platform.machine(), request, distribution), wheels)
        elif not distribution.startswith("examples/"):
            recipe().build_pure(distribution, wheels)
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
        "--no-index", *sorted(wheels.iterdir()))  # fmt: skip
    # Links to all other packages of this environment, and to none of ours: the examination
    # refuses two distributions of one name.
    (site,) = folder.glob("lib/python*/site-packages")
    others = tmp_path / "others"
    others.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "interposer" not in entry.name and entry.suffix != ".pth":
            (others / entry.name).symlink_to(entry)
    (site / "others.pth").write_text(str(others))
    return python


def run(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@compiles
@pytest.mark.native
def test_an_installed_wheel_is_right(environment: Path) -> None:
    program = (
        "import interposer_cpu._native as n, interposer; print(n.__file__, interposer.__file__)"
    )
    for file in run(environment, "-c", program).split():
        assert environment.parents[1] in Path(file).parents
    found = json.loads(run(environment, SERVE, MODEL, PROMPT, str(NUM_TOKENS)).splitlines()[-1])
    assert found["absent"] == ""
    assert found["verified"]["wrong"] == ""
    assert sum(name.endswith("native") for name in found["verified"]["correct"]) > 30
    assert max(found["doors"].values()) <= 1
    language_model = load(MODEL, dtype="float32", max_sequences=1)
    (completion,) = language_model.generate(PROMPT, max_new_tokens=NUM_TOKENS)
    assert found["tokens"] == list(completion.token_ids)
