"""A GPU is accepted only if the torch build has kernels for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from interposer_cuda._hardware.torch_build import TorchBuild


@pytest.mark.parametrize(
    ("targets", "version", "runs"),
    [
        ((), (5, 0), True),
        (("sm_80",), (8, 0), True),
        (("sm_80",), (8, 6), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("compute_80",), (9, 0), True),
        (("compute_90",), (8, 9), False),
        (("sm_90a",), (9, 0), True),
        (("sm_90a",), (10, 0), False),
        (("compute_90a",), (12, 0), False),
        (("sm_100f",), (10, 3), True),
        (("compute_100f",), (12, 0), False),
        (("sm_75", "sm_120"), (12, 1), True),
        (("nonsense",), (9, 0), False),
    ],
)
def test_a_build_runs_on_the_architectures_of_its_targets(
    targets: tuple[str, ...], version: tuple[int, int], runs: bool
) -> None:
    build = TorchBuild("2.13.0", "13.0", targets=targets)
    verdict = build.judge_architecture("A GPU", *version)
    assert verdict.accepted is runs
    if not runs:
        assert f"is an sm_{version[0]}{version[1]}" in verdict.reason


def test_targets_are_read_from_the_header_of_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that torch has for them start CUDA or forbid it to forks, and are not made."""
    import torch

    flags = (
        "-gencode;arch=compute_80,code=sm_80;-gencode;arch=compute_90,code=sm_90;"
        "-gencode;arch=compute_90,code=compute_90;-gencode;arch=compute_103a,code=sm_103a"
    )
    header = tmp_path / "include" / "ATen" / "cuda" / "CUDAConfig.h"
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(torch.__config__, "show", pytest.fail)
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", pytest.fail, raising=False)
    assert TorchBuild.installed().targets == ()
    header.parent.mkdir(parents=True)
    header.write_text(f'#define AT_CUDNN_ENABLED() 1\n#define NVCC_FLAGS_EXTRA "{flags}"\n')
    assert TorchBuild.installed().targets == ("sm_80", "sm_90", "compute_90", "sm_103a")


def test_the_installed_build_is_read() -> None:
    import torch

    build = TorchBuild.installed()
    assert build.version == torch.__version__
    assert build.cuda == (torch.version.cuda or "")
    assert build.hip == (torch.version.hip or "")
