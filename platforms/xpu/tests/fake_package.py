"""A stand-in wheel for vllm-xpu-kernels, which computes on the CPU.

Its ops have the schemas of the real package and compute as its sources and tests define, with torch
in float32, so wrong arguments give wrong results.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from interposer_xpu._packages.kernel_package import SCHEMAS

__all__ = ["installed", "wheel"]

# What all three modules begin with.
_HEAD = "import torch\n_LIBRARY = torch.library.Library({namespace!r}, 'FRAGMENT')\n"

_BODIES = {
    "_C::get_xpu_view_from_cpu_tensor": """
def get_xpu_view_from_cpu_tensor(cpu_tensor):
    assert cpu_tensor.is_contiguous()
    return cpu_tensor.view(cpu_tensor.shape)
""",
    "_xpu_C::int4_gemm_w4a16": """
def _nibbles(packed):
    # Eight to an int32 along the last dimension, the first in the lowest bits.
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & 15).flatten(-2)

def int4_gemm_w4a16(A, B, bias, B_scale, B_zp, group_size, g_idx):
    assert A.is_contiguous() and A.dim() == 2
    assert B.dtype == torch.int32 and B.stride(-2) == 1, "the transposed layout"
    assert B_scale.is_contiguous() and B_scale.dtype == A.dtype and g_idx is None
    assert B_scale.shape == (A.shape[1] // group_size, B.shape[1])
    codes = _nibbles(B.t()).t().float()  # [K, N]
    if B_zp.dim() == 1:
        assert B_zp.dtype == torch.int8 and B_zp.numel() == 1
        zeros = B_zp.float()
    else:
        assert B_zp.dtype == torch.int32 and B_zp.is_contiguous()
        zeros = _nibbles(B_zp).float().repeat_interleave(group_size, 0)
    weight = (codes - zeros) * B_scale.float().repeat_interleave(group_size, 0)
    out = A.float() @ weight
    return (out if bias is None else out + bias.float()).to(A.dtype)
""",
    "_xpu_C::fp8_gemm": """
def fp8_gemm(A, B, out_dtype, A_scale_, B_scale_, bias_):
    assert A.is_contiguous() and A.dtype == B.dtype and B.stride(-2) == 1
    assert out_dtype in (torch.float16, torch.bfloat16)
    assert A_scale_.numel() == 1 or A_scale_.shape == (len(A), 1)
    assert B_scale_.numel() == 1 or B_scale_.shape == (B.shape[1],)
    out = A.float() @ B.float() * A_scale_.reshape(-1, 1) * B_scale_.reshape(1, -1)
    return (out if bias_ is None else out + bias_.float()).to(out_dtype)
""",
    "_xpu_C::fp8_gemm_w8a16": """
def fp8_gemm_w8a16(A, B, B_scale_, bias_):
    assert A.is_contiguous() and A.dtype in (torch.float16, torch.bfloat16)
    assert B.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and B.stride(-2) == 1
    assert B_scale_.numel() == 1 or B_scale_.shape == (B.shape[1],)
    out = A.float() @ B.float() * B_scale_.reshape(1, -1)
    return (out if bias_ is None else out + bias_.float()).to(A.dtype)
""",
    "_xpu_C::cutlass_grouped_gemm_interface": """
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

def cutlass_grouped_gemm_interface(
    ptr_A, ptr_A_scale, ptr_B, ptr_B_scale, ptr_bias, ptr_D, rows_per_expert, N, K, num_experts
):
    assert ptr_B.dtype == torch.float4_e2m1fn_x2 and ptr_B_scale.dtype == torch.uint8
    assert all(t is None or t.is_contiguous() for t in (ptr_A, ptr_B, ptr_B_scale, ptr_bias, ptr_D))
    assert ptr_bias is None or ptr_bias.dtype == ptr_A.dtype == ptr_D.dtype
    assert ptr_B.shape == (num_experts, N, K // 2) and N % 8 == 0
    assert ptr_B_scale.shape == (num_experts, N, K // 32)
    assert ptr_A.shape == (len(ptr_D), K) and rows_per_expert.dtype == torch.int32
    packed = ptr_B.view(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    weight = torch.where(codes < 8, 1.0, -1.0) * _E2M1[codes & 7]
    scale = ptr_B_scale.view(torch.float8_e8m0fnu).float()
    weight = weight * scale.repeat_interleave(32, -1)
    start = 0
    for expert, count in enumerate(rows_per_expert.tolist()):
        rows = slice(start, start + count)
        out = ptr_A[rows].float() @ weight[expert].t()
        ptr_D[rows] = (out if ptr_bias is None else out + ptr_bias[expert].float()).to(ptr_D.dtype)
        start += count
    assert start == len(ptr_A)
    return ptr_D.clone()
""",
    "_moe_C::topk_softmax": """
def topk_softmax(
    topk_weights, topk_indices, token_expert_indices, gating_output, renormalize, bias, is_padding
):
    assert gating_output.is_contiguous() and bias is None and is_padding is None
    assert topk_weights.dtype == torch.float32 and topk_indices.dtype == torch.int32
    scores = gating_output.float().softmax(-1)
    order = gating_output.sort(dim=-1, descending=True, stable=True).indices
    ids = order[:, : topk_weights.shape[1]]
    found = scores.gather(-1, ids)
    topk_weights.copy_(found / found.sum(-1, keepdim=True) if renormalize else found)
    topk_indices.copy_(ids)
""",
    "_moe_C::remap_hidden_states": """
def remap_hidden_states(
    hidden_states, hidden_states_scales, remapped_hidden_states, remapped_hidden_states_scales,
    expert_map, rows_per_expert, unpermuted_row_to_permuted_row, topk_ids,
    total_experts_num, local_experts_num,
):
    assert hidden_states.is_contiguous() and hidden_states_scales is None and expert_map is None
    assert topk_ids.min() >= 0 and topk_ids.max() < total_experts_num == local_experts_num
    assert not rows_per_expert.any()
    flat = topk_ids.flatten()
    order = flat.sort(stable=True).indices
    remapped_hidden_states.copy_(hidden_states[order // topk_ids.shape[1]])
    rows_per_expert.copy_(flat.bincount(minlength=local_experts_num))
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    unpermuted_row_to_permuted_row.copy_(places.view_as(topk_ids))
""",
    "_moe_C::moe_gather": """
def moe_gather(output, moe_output, topk_weights, unpermuted_row_to_permuted_row, num_experts):
    assert topk_weights.dtype == torch.float32
    rows = moe_output[unpermuted_row_to_permuted_row.long()].float()
    output.copy_((rows * topk_weights[..., None]).sum(1))
""",
}


def wheel(
    folder: Path,
    version: str = "0.1.16.2",
    description: str = "- **PyTorch**: 2.13.0+xpu",
    schemas: dict[str, str] | None = None,
    heads: dict[str, str] | None = None,
) -> Path:
    """Write a wheel and return its path.

    Args:
        description: what its metadata says at length.
        schemas: of ops that differ from the real ones; an empty one leaves the op out.
        heads: lines that a module begins with, by its name.
    """
    files = {"vllm_xpu_kernels/__init__.py": ""}
    for namespace in sorted({name.partition("::")[0] for name in SCHEMAS}):
        files[f"vllm_xpu_kernels/{namespace}.py"] = _module(namespace, schemas or {}, heads or {})
    name = f"vllm_xpu_kernels-{version}"
    files |= {
        f"{name}.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: vllm-xpu-kernels\nVersion: {version}\n\n{description}\n"
        ),
        f"{name}.dist-info/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    path = folder / f"{name}-py3-none-any.whl"
    record = [f"{file},sha256={_hash(text)},{len(text.encode())}" for file, text in files.items()]
    record.append(f"{name}.dist-info/RECORD,,\n")
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{name}.dist-info/RECORD": "\n".join(record)}.items():
            archive.writestr(file, text)
    return path


def installed(wheel: Path, target: Path) -> Path:
    """Return the folder into which pip has installed a wheel."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True)
    return target


def _module(namespace: str, schemas: dict[str, str], heads: dict[str, str]) -> str:
    lines = [heads.get(namespace, ""), _HEAD.format(namespace=namespace)]
    for name, known in SCHEMAS.items():
        own, _, op = name.partition("::")
        schema = schemas.get(name, known)
        if own == namespace and schema:
            lines += [_BODIES[name], f"_LIBRARY.define({op + schema!r})"]
            lines += [f"_LIBRARY.impl({op!r}, {op}, 'CompositeExplicitAutograd')"]
    return "\n".join(lines) + "\n"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
