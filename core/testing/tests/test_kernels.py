"""A kernel in a process of its own runs as its platform makes kernels run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from interposer import Candidate, Kernel, Verdict
from interposer_ops.activations import relu2
from interposer_testing._trials.kernels import SeparateKernels

pytestmark = pytest.mark.process

# The kernel is right only after the platform was created, as in Triton's interpreter.
MODULE = """
import torch

factor = 0


class AcmePlatform:
    def __init__(self):
        global factor
        factor = 1


def relu2_acme(x):
    return x.relu().square() * factor
"""


def test_the_platform_is_created_in_the_process_of_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_lenses.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    platform = importlib.import_module("acme_lenses").AcmePlatform
    record = Kernel("relu2", "relu2_acme", "acme_lenses:relu2_acme")
    candidate = Candidate("relu2_acme", "acme", "1.0", 10.0, record, lambda _: Verdict.accept())
    (case,) = [c for c in relu2.cases(torch.float32, seed=0) if c.label == "a few elements"]
    with (
        SeparateKernels(platform) as kernels,
        kernels.subject(relu2, candidate, "cpu") as subject,
    ):
        output = subject.call(subject.given(case)).outputs[0]
    torch.testing.assert_close(output, case.arguments["x"].relu().square())
