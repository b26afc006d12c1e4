"""A build of torch for another toolkit cannot use a vendor's GPUs."""

from __future__ import annotations

import pytest

from interposer_ops.devices import torch_build


class TorchBuild(torch_build.TorchBuild):
    toolkit = "XPU"
    wheels = "xpu"


TRY = ". Try: pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/xpu"


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (TorchBuild("2.13.0", xpu="20250301"), ""),
        (TorchBuild("2.13.0"), f"a GPU, but torch 2.13.0 is built without XPU{TRY}"),
        (
            TorchBuild("2.13.0", cuda="12.8"),
            f"a GPU, but torch 2.13.0 is built for CUDA 12.8{TRY}",
        ),
    ],
)
def test_a_build_without_the_toolkit_is_refused(build: TorchBuild, reason: str) -> None:
    verdict = build.judge("a GPU")
    assert (verdict.accepted, verdict.reason) == (not reason, reason)


def test_the_installed_build_is_read() -> None:
    import torch

    build = TorchBuild.installed()
    assert (build.version, build.cuda) == (torch.__version__, torch.version.cuda or "")
    assert isinstance(build, TorchBuild)
