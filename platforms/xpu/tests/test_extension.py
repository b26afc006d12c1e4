"""IPEX is checked by its metadata, and imported in a child process only if the metadata matches."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tests.forks import forks

pytestmark = pytest.mark.process

MINOR = ".".join(torch.__version__.split(".")[:2])
PROGRAM = """
import json, sys
import torch
from interposer import Capability, Request
from interposer_xpu._packages import extension
verdict = extension.judge(Request("kernel", "rms_norm", "xpu", Capability("pvc"), "float32", {}))
said = {"reason": verdict.reason, "here": "intel_extension_for_pytorch" in sys.modules}
if verdict:
    x, weight = torch.randn(3, 8), torch.randn(8)
    out = extension.rms_norm(x, weight, 1e-6)
    said["equal"] = torch.equal(out, torch.rms_norm(x, (8,), weight, 1e-6))
print(json.dumps(said))
"""
WORKS = """
from types import SimpleNamespace
import torch
def rms_norm(hidden_states, weight, eps):
    return torch.rms_norm(hidden_states, weight.shape, weight, eps)
llm = SimpleNamespace(functional=SimpleNamespace(rms_norm=rms_norm))
"""


def asked(folder: Path, version: str, source: str) -> dict[str, object]:
    """Return the verdict on a distribution in ``folder``."""
    package = folder / "intel_extension_for_pytorch"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    metadata = folder / f"intel_extension_for_pytorch-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: intel-extension-for-pytorch\nVersion: {version}\n"
    )
    done = forks().run("-c", PROGRAM, env={**os.environ, "PYTHONPATH": str(folder)})
    assert done.returncode == 0, done.stderr
    said: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (
            "2.8.10+xpu",
            "intel-extension-for-pytorch 2.8.10+xpu is for torch 2.8, installed is "
            f"{torch.__version__}; it is not imported, for it would end the process",
        ),
        (f"{MINOR}.0", f"intel-extension-for-pytorch {MINOR}.0 is a build for processors"),
    ],
)
def test_a_package_with_unsuitable_metadata_is_not_imported(
    tmp_path: Path, version: str, expected: str
) -> None:
    said = asked(tmp_path, version, "import os; os.abort()")
    assert said == {"reason": expected, "here": False}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "import sys; print('ERROR! needs another torch'); sys.exit(127)",
            "ends the process that imports it (exit status 127): ERROR! needs another torch",
        ),
        ("import os; os.abort()", "ends the process that imports it (signal 6): "),
        ("import libsycl_of_another_release", "cannot be imported: No module named 'libsycl_of"),
        ("", "has no llm.functional.rms_norm"),
    ],
)
def test_the_end_of_the_child_process_is_reported(
    tmp_path: Path, source: str, expected: str
) -> None:
    version = f"{MINOR}.10+xpu"
    said = asked(tmp_path, version, source)
    assert str(said["reason"]).startswith(f"intel-extension-for-pytorch {version} {expected}")
    assert not said["here"]


def test_a_matching_release_is_used(tmp_path: Path) -> None:
    assert asked(tmp_path, f"{MINOR}.10+xpu", WORKS) == {
        "reason": "",
        "here": False,
        "equal": True,
    }


def test_a_missing_package_is_reported(tmp_path: Path) -> None:
    done = forks().run("-c", PROGRAM, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["reason"] == "needs the package intel-extension-for-pytorch, which is not installed"
