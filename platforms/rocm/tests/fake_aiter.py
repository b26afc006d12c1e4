"""A stand-in wheel for AITER, which computes on the CPU.

Its functions make the same checks and read the same layouts as AITER: shuffled weights are
unshuffled, so weights that were not shuffled give wrong results.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

__all__ = ["WORKING", "install"]

_FLASH = """
import torch

class ActivationType:
    Silu = "silu"

class QuantType:
    No = "no"
    per_Token = "per_Token"
    per_128x128 = "per_128x128"

# No value of a tensor is read on the host, as on a GPU.
def mha_batch_prefill_func(
    q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1), alibi_slopes=None,
    deterministic=False, return_lse=False, return_attn_probs=False, out=None,
):
    assert q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype == v.dtype
    for t in (cu_seqlens_q, kv_indptr, kv_page_indices):
        assert t.dtype == torch.int32 and t.is_contiguous()
    # Every token is a page, and what it is given is the cache itself.
    assert k.dim() == v.dim() == 3 and k.is_contiguous() and v.is_contiguous()
    assert len(kv_page_indices) >= 128 and q.stride(-1) == 1
    length, count = kv_indptr.diff()[:, None], cu_seqlens_q.diff()[:, None]
    place, step = torch.arange(max_seqlen_k), torch.arange(max_seqlen_q)
    taken = (kv_indptr[:-1, None] + place).clamp(max=len(kv_page_indices) - 1)
    written = (place < length)[..., None, None]
    group = q.shape[1] // k.shape[1]
    keys, values = (
        torch.where(written, t[kv_page_indices[taken.long()].long()].float(), 0.0)
        .repeat_interleave(group, 2) for t in (k, v)
    )
    rows = cu_seqlens_q[:-1, None] + step
    queries = q[rows.clamp(max=len(q) - 1).long()].float()
    scores = torch.einsum("bqnd,blnd->bnql", queries, keys) * softmax_scale
    if logits_soft_cap > 0:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    distance = (length - count + step)[..., None] - place
    seen = (place < length)[:, None] & (distance >= 0 if causal else distance == distance)
    if window_size[0] >= 0:
        seen = seen & (distance <= window_size[0])
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    found = torch.einsum("bnql,blnd->bqnd", weights, values).to(q.dtype)
    # Rows that no query has go to one behind the last.
    result = torch.zeros(len(q) + 1, *q.shape[1:], dtype=q.dtype)
    result[torch.where(step < count, rows, len(q)).long()] = found
    return result[:-1]
"""

_MLA = """
import torch

# Sequences of each call.
CALLS = []

def mla_decode_fwd(
    q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q,
    page_size=1, nhead_kv=1, sm_scale=None, logit_cap=0.0, num_kv_splits=None, q_scale=None,
    kv_scale=None,
):
    assert max_seqlen_q == 1 and kv_buffer.shape[1:3] == (1, 1)
    assert q.dtype == o.dtype == torch.bfloat16 and o.is_contiguous() and q.is_contiguous()
    CALLS.append(len(kv_last_page_lens))
    for t in (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens):
        assert t.dtype == torch.int32
    assert (kv_last_page_lens == 1).all()
    starts = kv_indptr.tolist()
    assert qo_indptr.tolist() == [*range(len(q) + 1)] and starts[-1] == len(kv_indices)
    for t in range(len(q)):
        keys = kv_buffer[kv_indices[starts[t]:starts[t + 1]].long(), 0, 0].float()
        if kv_scale is not None:
            keys = keys * kv_scale
        weights = (q[t].float() @ keys.t() * sm_scale).softmax(-1)
        o[t] = (weights @ keys[:, : o.shape[-1]]).to(o.dtype)
    return None, None
"""

_MOE = """
import torch
import aiter
from aiter.ops.shuffle import unshuffled

def fused_moe(
    hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None,
    activation=aiter.ActivationType.Silu, quant_type=aiter.QuantType.No, doweight_stage1=False,
    w1_scale=None, w2_scale=None, a1_scale=None, a2_scale=None,
):
    assert w1.is_shuffled and w2.is_shuffled
    assert topk_ids.dtype == torch.int32 and topk_weight.dtype == torch.float32
    assert activation == "silu"
    assert (quant_type == "no") == (w1_scale is None) == (w1.element_size() > 1)
    assert topk_ids.min() >= 0 and topk_ids.max() < len(w1)
    first, second = scaled(w1, w1_scale, quant_type), scaled(w2, w2_scale, quant_type)
    out = torch.zeros(hidden_states.shape)
    for t, x in enumerate(hidden_states.float()):
        x = rounded(x, w1.dtype, quant_type)
        for weight, expert in zip(topk_weight[t], topk_ids[t].long()):
            gate, up = (first[expert] @ x).chunk(2)
            inner = (torch.nn.functional.silu(gate) * up).to(hidden_states.dtype).float()
            out[t] += weight * (second[expert] @ rounded(inner, w1.dtype, quant_type))
    return out.to(hidden_states.dtype)

def scaled(weight, scale, quant_type):
    plain = unshuffled(weight).float()
    if quant_type == "no":
        return plain
    experts, rows, columns = weight.shape
    if quant_type == "per_Token":
        assert scale.shape == (experts, rows, 1) and scale.dtype == torch.float32
        return plain * scale
    assert scale.shape == (experts, rows // 128, columns // 128)
    return plain * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)

def rounded(x, dtype, quant_type):
    if quant_type == "no":
        return x
    parts = x.view(-1, 128) if quant_type == "per_128x128" else x[None]
    scale = (parts.abs().amax(-1, keepdim=True) / torch.finfo(dtype).max).clamp(min=1e-30)
    return ((parts / scale).to(dtype).float() * scale).flatten()
"""

_SHUFFLE = """
import torch

def _tiles(x, layout):
    rows, columns = layout[0], layout[1] * 2
    piece = 16 // x.element_size()
    assert x.shape[-2] % rows == 0 and x.shape[-1] % columns == 0
    return (-1, x.shape[-2] // rows, rows, x.shape[-1] // columns, columns // piece, piece)

def shuffle_weight(x, layout=(16, 16), use_int4=False):
    tiled = x.view(_tiles(x, layout)).permute(0, 1, 3, 4, 2, 5).contiguous().view(x.shape)
    tiled.is_shuffled = True
    return tiled

def unshuffled(x, layout=(16, 16)):
    a, b, c, d, e, f = _tiles(x, layout)
    return x.view(-1, b, d, e, c, f).permute(0, 1, 4, 2, 3, 5).reshape(x.shape)
"""

WORKING = {
    "aiter/__init__.py": _FLASH,
    "aiter/mla.py": _MLA,
    "aiter/fused_moe.py": _MOE,
    "aiter/ops/__init__.py": "",
    "aiter/ops/shuffle.py": _SHUFFLE,
}


def install(
    folder: Path, files: dict[str, str], name: str = "amd-aiter", version: str = "0.1.9"
) -> Path:
    """Build a wheel of the files, install it below ``folder``, and return where."""
    stem = f"{name.replace('-', '_')}-{version}"
    wheel = folder / f"{stem}-py3-none-any.whl"
    metadata = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents = {**files, **{f"{stem}.dist-info/{key}": text for key, text in metadata.items()}}
    contents[f"{stem}.dist-info/RECORD"] = "".join(f"{path},,\n" for path in contents)
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
    target = folder / f"site-{name}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True, timeout=300)
    return target
