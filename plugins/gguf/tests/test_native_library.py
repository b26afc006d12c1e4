"""An installation has the native library, or says that it was not built."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from interposer import Config, Request, Resolver, Site, current_registry, explain
from interposer_cpu import CPUPlatform
from interposer_gguf import _native_library as native_library
from interposer_gguf._linear import gguf_linear

PROJECT = Path(__file__).parents[1]
REQUEST = Request("kernel", "gguf_linear", "cpu")
DIMS: dict[str, int | str] = {"in_features": 256, "out_features": 8, "stored_as": "q4_k"}
REASON = "no C++ compiler was found when it was built, or too old a one; install g++ 11 or newer"


def chosen(dtype: torch.dtype) -> dict[str, object]:
    """Return the choice for a product as ``explain`` tells it."""
    site = Site(Resolver(current_registry(), CPUPlatform().devices()[0], Config()), "q", dtype)
    site.bind_kernel(gguf_linear, **DIMS)
    (choice,) = explain(site).to_dict()["choices"]
    found: dict[str, object] = choice
    return found


@pytest.mark.native
@pytest.mark.skipif(native_library.path() is None, reason="needs the native library")
def test_the_native_kernel_is_chosen_if_the_library_exists() -> None:
    assert native_library.check_library(REQUEST)
    for dtype in (torch.float32, torch.bfloat16):
        assert "gguf_linear_native" in str(chosen(dtype)["chosen"])
    assert "gguf_linear_by_rows" in str(chosen(torch.float16)["chosen"])


def test_without_the_library_the_native_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "path", lambda: None)
    assert REASON in native_library.check_library(REQUEST).reason
    choice = chosen(torch.float32)
    assert "gguf_linear_by_rows" in str(choice["chosen"])
    assert REASON in str(choice)
    with pytest.raises(OSError, match=re.escape(REASON)):
        native_library.library.__wrapped__()


def build(folder: Path, **variables: str) -> Path:
    """Return the folder with the contents of the plugin's wheel."""
    project = folder / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    library = project / "src" / "interposer_gguf" / "_native" / "libinterposer_gguf.so"
    library.parent.mkdir(exist_ok=True)
    library.write_bytes(b"of an earlier, editable installation")
    command = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, *map(str, command), str(project)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment | variables,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    contents = folder / wheel.stem
    zipfile.ZipFile(wheel).extractall(contents)
    return contents


def judged(contents: Path) -> str:
    """Return the reason of the plugin in a folder, or the answer of the loaded library."""
    script = (
        "from interposer_gguf import _native_library as n\n"
        "import os; assert os.path.dirname(n.__file__).startswith(os.getcwd()), n.__file__\n"
        "print(n.check_library(None).reason or n.library().level)"
    )
    # Without site, so that no editable installation comes before the folder.
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=contents,
        env={"PYTHONPATH": ":".join([str(contents), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


needs_build = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("scikit_build_core") is None, reason="needs scikit-build-core"),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake"),
]


class TestWheel:
    pytestmark = needs_build

    def test_without_a_compiler_the_package_has_no_library(self, tmp_path: Path) -> None:
        contents = build(tmp_path, CC="/bin/false", CXX="/bin/false")
        assert contents.name.endswith("-py3-none-any")
        assert (contents / "interposer_gguf" / "py.typed").is_file()
        assert not list(contents.rglob("*.so"))
        assert REASON in judged(contents)

    @pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
    def test_with_a_compiler_the_package_has_the_library(self, tmp_path: Path) -> None:
        contents = build(tmp_path)
        assert "-py3-none-" in contents.name
        assert not contents.name.endswith("-any")
        assert judged(contents) in "0123"
