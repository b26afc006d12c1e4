"""Arguments of FlashInfer's GEMMs, checked with stand-in functions on the CPU.

Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from platforms.cuda.tests.wheels import install, wheel

from interposer import Capability, Request
from interposer.records import Kernel
from interposer_cuda._flashinfer import gemm
from interposer_cuda.plugin import interposer_records
from interposer_ops import triton as portable
from interposer_ops.quantized_linear import fp8_block_linear, mxfp8_linear, nvfp4_linear
from interposer_testing import check_kernel

pytestmark = pytest.mark.process

FLASHINFER = """
import torch


def untiled(stored, rows, columns):
    number = torch.arange(rows)[:, None], torch.arange(columns)
    row, column = number
    tiles = -(-columns // 4)
    place = (row // 128 * tiles + column // 4) * 512
    place = place + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    assert stored.numel() == -(-rows // 128) * 128 * tiles * 4
    return stored.flatten()[place]


def e2m1(packed):
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    return table[codes & 7] * (1 - 2 * (codes >> 3))


def times(codes, scales, width):
    return codes * scales.repeat_interleave(width, -1)


def mm_fp4(
    a, b, a_descale, b_descale, alpha=None, out_dtype=torch.bfloat16, out=None, block_size=16,
    use_8x4_sf_layout=False, backend="auto", use_nvfp4=True, enable_pdl=True,
):
    b, b_descale = b.T, b_descale.T
    assert (block_size, use_8x4_sf_layout, backend, use_nvfp4) == (16, False, "cutlass", True)
    assert a.dtype == b.dtype == torch.uint8 and alpha.dtype == torch.float32
    assert a_descale.dtype == b_descale.dtype == torch.float8_e4m3fn
    for tensor in (a, b, a_descale, b_descale, out):
        assert tensor.ndim == 2 and tensor.is_contiguous()
    assert 2 * a.shape[1] % 32 == len(b) % 32 == 0 and out.dtype == out_dtype
    left, right = (
        times(e2m1(m), untiled(s, len(m), m.shape[1] // 8).float(), 16)
        for m, s in ((a, a_descale), (b, b_descale))
    )
    return out.copy_(left @ right.T * alpha)


def mm_mxfp8(
    a, b, a_descale, b_descale, out=None, out_dtype=torch.bfloat16, use_8x4_sf_layout=False,
    backend="auto",
):
    b = b.T
    assert (use_8x4_sf_layout, backend) == (False, "cutlass")
    assert a.dtype == b.dtype == torch.float8_e4m3fn and out.dtype == out_dtype
    assert a_descale.dtype == b_descale.dtype == torch.uint8
    assert a_descale.ndim == b_descale.ndim == 1
    assert a.is_contiguous() and b.is_contiguous()
    assert min(b.shape) >= 128 and a.shape[1] % 32 == len(b) % 32 == 0
    left, right = (
        times(m.float(), torch.exp2(untiled(s, len(m), m.shape[1] // 32).float() - 127), 32)
        for m, s in ((a, a_descale), (b, b_descale))
    )
    return out.copy_(left @ right.T)


def gemm_fp8_nt_groupwise(
    a, b, a_scale, b_scale, scale_major_mode=None, mma_sm=1, scale_granularity_mnk=(1, 128, 128),
    out=None, out_dtype=None, backend="cutlass",
):
    assert (scale_major_mode, backend) == ("K", "cutlass")
    assert scale_granularity_mnk == (1, 128, 128)
    assert len(a) % 4 == 0 and a.shape[1] % 128 == len(b) % 128 == 0
    assert a_scale.dtype == b_scale.dtype == torch.float32
    for tensor in (a, b, a_scale, b_scale, out):
        assert tensor.ndim == 2 and tensor.is_contiguous()
    right = times(b.float(), b_scale.repeat_interleave(128, 0), 128)
    return out.copy_(times(a.float(), a_scale, 128) @ right.T)
"""
RECORDS = {
    record.op: record
    for record in interposer_records()
    if isinstance(record, Kernel) and record.name.endswith("_flashinfer")
}


SIZES: dict[str, dict[str, int | str]] = {
    "nvfp4_linear": {"in_features": 96, "out_features": 160},
    "mxfp8_linear": {"in_features": 160, "out_features": 192},
    "fp8_block_linear": {
        "in_features": 256,
        "out_features": 128,
        "block_rows": 128,
        "block_columns": 128,
        "x_dtype": "float8_e4m3fn",
        "weight_dtype": "float8_e4m3fn",
    },
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    install(
        folder, wheel(folder, "flashinfer-python", "0.7.2.post1", {"flashinfer/gemm": FLASHINFER})
    )
    return folder / "site"


@pytest.fixture
def flashinfer(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(package)
    importlib.invalidate_caches()
    # In the place of the portable kernels, which run on a GPU.
    monkeypatch.setattr(portable, "nvfp4_linear_triton", nvfp4_linear)
    monkeypatch.setattr(portable, "mxfp8_linear_triton", mxfp8_linear)
    monkeypatch.setattr(portable, "fp8_block_linear_triton", fp8_block_linear)
    gemm._function.cache_clear()
    yield
    gemm._function.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]


def request(op: str, dims: Any, architecture: str = "sm_100", dtype: str = "bfloat16") -> Request:
    capability = Capability(architecture, frozenset({"triton"}))
    return Request("kernel", op, "elsewhere", capability, dtype, dims)


@pytest.mark.parametrize("op", [nvfp4_linear, mxfp8_linear, fp8_block_linear])
def test_gemms_match_the_ops(op: Any, flashinfer: None) -> None:
    record = RECORDS[op.name]
    function = getattr(gemm, op.name)
    prepare = getattr(gemm, record.prepare.partition(":")[2]) if record.prepare else None
    cases = list(op.cases(torch.bfloat16, 0))
    cases += [op.sample(torch.float16, {**cases[0].dims, **SIZES[op.name]}, t, 0) for t in (1, 5)]
    plain, biased = 0, 0
    for case in cases:
        # What has a bias is not given to the package, whatever its sizes are.
        if case.arguments["bias"] is not None:
            biased += 1
            if biased > 3:
                continue
        elif record.requires.judge(request(op.name, case.dims)):
            plain += 1
        else:
            continue
        assert check_kernel(op, function, case, prepare=prepare) == [], case.label
    assert plain >= 2
    assert biased >= 2


def test_flashinfer_is_imported_only_if_selected(flashinfer: None) -> None:
    asked = request("nvfp4_linear", {})
    assert gemm.judge(asked)
    assert "flashinfer.gemm" not in sys.modules
    assert gemm.confirm(asked)
    assert "flashinfer.gemm" in sys.modules


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("version", "code", "judged", "confirmed"),
    [
        ("0.6.4", "", "needs flashinfer-python >=0.7.2,<0.8, found 0.6.4: pip install", ""),
        (
            "0.7.3",
            "raise ImportError('no tvm_ffi')",
            "",
            "flashinfer-python cannot be imported: ImportError: no tvm_ffi",
        ),
        ("0.7.3", "def mm_mxfp8(): ...", "", "flashinfer.gemm has no mm_fp4. Try: pip install"),
        (
            "0.7.3",
            "def mm_fp4(a, b, block_size, use_nvfp4): ...",
            "",
            "flashinfer.gemm.mm_fp4 takes no backend, use_8x4_sf_layout. Try: pip install",
        ),
    ],
)
def test_an_unusable_package_is_refused(
    version: str,
    code: str,
    judged: str,
    confirmed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, wheel(tmp_path, "flashinfer-python", version, {"flashinfer/gemm": code}))
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    asked = request("mxfp8_linear", {})
    assert gemm.judge(asked).reason.startswith(judged)
    if confirmed:
        assert gemm.confirm(asked).reason.startswith(confirmed)
        sys.modules.pop("flashinfer.gemm", None)
        sys.modules.pop("flashinfer", None)


@pytest.mark.parametrize(
    ("op", "dims", "architecture", "reason"),
    [
        ("nvfp4_linear", {"in_features": 64, "out_features": 64}, "sm_90", "needs sm_100, sm_103"),
        ("nvfp4_linear", {"in_features": 48, "out_features": 64}, "sm_120", "in_features is 48"),
        ("mxfp8_linear", {"in_features": 128, "out_features": 96}, "sm_103", "out_features is 96"),
        ("fp8_block_linear", {}, "sm_103", "needs sm_100, sm_120, sm_121"),
    ],
)
def test_unsupported_requests_are_refused(
    op: str, dims: dict[str, int], architecture: str, reason: str
) -> None:
    assert RECORDS[op].requires.judge(request(op, dims, architecture)).reason.startswith(reason)
