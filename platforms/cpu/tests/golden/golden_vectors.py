"""Write golden vectors: results of the ops' references for many arguments, for tests without torch.

    python golden_vectors.py FILE

``native/tests/golden.h`` describes and reads the file. To add an op, add a line to ``OPS`` and a
runner of the same name in ``native/tests``.

Dimensions: T tokens.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from golden_blocks import Block, blocks

from interposer import Case, CustomOp
from interposer_ops.activations import gelu, gelu_and_mul, quick_gelu, silu_and_mul
from interposer_ops.attention import paged_attention, ragged_attention, ragged_attention_with_lse
from interposer_ops.embedding import embedding, w4a16_embedding, w8a16_embedding
from interposer_ops.experts import (
    fused_experts,
    fused_experts_fp8,
    fused_experts_mxfp4,
    fused_experts_w4a16,
    grouped_topk,
    topk_sigmoid,
    topk_softmax,
)
from interposer_ops.latent_attention import latent_attention_decode
from interposer_ops.linear import linear
from interposer_ops.lora import lora_expand, lora_shrink
from interposer_ops.norms import (
    fused_add_gemma_rms_norm,
    fused_add_rms_norm,
    gemma_rms_norm,
    layer_norm,
    qk_norm,
    rms_norm,
)
from interposer_ops.quantized_linear import (
    fp8_block_linear,
    fp8_linear,
    int8_linear,
    mxfp4_linear,
    mxfp8_linear,
    w4a8_linear,
    w4a16_linear,
    w8a16_linear,
)
from interposer_ops.quantizers import (
    quantize_fp8_blocks,
    quantize_fp8_per_token,
    quantize_fp8_static,
    quantize_int8_per_token,
    quantize_int8_static,
    quantize_mxfp8,
    quantize_weight_int4,
    quantize_weight_int4_asymmetric,
    quantize_weight_int8,
)
from interposer_ops.recurrence import causal_convolution, gated_delta_rule, state_space_scan
from interposer_ops.rotary import rotary_embedding
from interposer_ops.sampling import apply_penalties, gumbel_argmax, sample_tokens
from interposer_testing import Expectation, Subject, tensors_of
from interposer_testing.cases import planned_cases

_MAGIC = b"interposer golden 1\n"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SEED = 0
# Sums of a kernel are kept for a few rows at a time, so that every rest is another path; of many
# rows, sixteen or 32.
_TOKENS = (*range(1, 18), 33, 50)

Dims = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Covered:
    """Cases of an op for native kernels.

    Attributes:
        takes: predicate: whether the kernels accept a case.
        dtypes: dtypes of the cases.
        strided: arguments that are read in place if the elements of a row are adjacent; all others
            are packed or made contiguous first.
        dims: dims of the samples that are drawn for every number of tokens.
    """

    op: CustomOp[..., Any]
    takes: Callable[[Case], bool] = lambda case: True
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    strided: tuple[str, ...] = ("x",)
    dims: tuple[Dims, ...] = ()


def _sizes(*sizes: tuple[int, int], **others: object) -> tuple[Dims, ...]:
    return tuple({"in_features": i, "out_features": o, **others} for i, o in sizes)


def _groups(case: Case) -> bool:
    return case.dims["num_groups"] == 1 or int(case.dims["group_size"]) % 8 == 0


def _whole_blocks(case: Case) -> bool:
    names = ("out_features", "block_rows", "in_features", "block_columns")
    outputs, rows, inputs, columns = (int(case.dims[name]) for name in names)
    whole = outputs % rows == 0 and inputs % columns == 0 and columns % 8 == 0
    return whole and case.dims["weight_dtype"] == "float8_e4m3fn"


def _to_e4m3(case: Case) -> bool:
    return case.dims["out_dtype"] == "float8_e4m3fn"


def _attends(case: Case) -> bool:
    """Check whether the backend supports a case: no slopes, causal, head sizes of whole vectors."""
    given = case.arguments
    query, sinks = given["query"], given["sinks"]
    plain = given["alibi_slopes"] is None and given["prefix_lens"] is None and given["causal"]
    return bool(
        plain and query.shape[-1] % 16 == 0 and (sinks is None or sinks.dtype == query.dtype)
    )


def _experts(hidden: int, inner: int, **others: object) -> tuple[Dims, ...]:
    """Choose dims whose samples give an expert up to twelve rows."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_experts": 3, "top_k": 2}
    return ({**sizes, "activation": "swiglu_oai", **others},)


_GROUPED = {"group_size": 24, "num_groups": 7, "scale_dtype": "float32"}
# As many codes as fill half of what AMX multiplies at once.
_WIDER = {"group_size": 32, "num_groups": 6, "scale_dtype": "float32"}
_BY_ROW = {"x_scales": "token", "asymmetric": False, "asymmetric_inputs": False}
_WIDE = (torch.float32, torch.bfloat16)
_LOGITS = ("logits",)

OPS = (
    Covered(linear, dtypes=_WIDE, dims=_sizes((173, 83), (64, 200))),
    Covered(
        w4a16_linear,
        _groups,
        dims=(
            *_sizes((168, 83), **_GROUPED, asymmetric=False),
            *_sizes((168, 83), **_GROUPED, asymmetric=True),
        ),
    ),
    Covered(w8a16_linear, _groups, dims=_sizes((168, 83), **_GROUPED, asymmetric=True)),
    Covered(mxfp4_linear, dims=_sizes((160, 83))),
    Covered(mxfp8_linear, dims=_sizes((160, 83))),
    Covered(
        int8_linear,
        lambda case: not case.dims["asymmetric"],
        dims=_sizes((173, 83), **_BY_ROW, weight_scales="channel"),
    ),
    Covered(
        w4a8_linear,
        lambda case: not case.dims["asymmetric_inputs"] and _groups(case),
        dims=(
            *_sizes((168, 83), **_GROUPED, **_BY_ROW, asymmetric_weights=False),
            *_sizes((168, 83), **_GROUPED, **_BY_ROW, asymmetric_weights=True),
            *_sizes((192, 83), **_WIDER, **_BY_ROW, asymmetric_weights=False),
            *_sizes((192, 83), **_WIDER, **_BY_ROW, asymmetric_weights=True),
        ),
    ),
    Covered(
        fp8_linear,
        lambda case: case.dims["weight_dtype"] == "float8_e4m3fn",
        dims=_sizes(
            (173, 83),
            x_scales="token",
            weight_scales="channel",
            x_dtype="float8_e4m3fn",
            weight_dtype="float8_e4m3fn",
        ),
    ),
    Covered(
        fp8_block_linear,
        _whole_blocks,
        dims=_sizes(
            (160, 96),
            block_rows=48,
            block_columns=32,
            x_dtype="float8_e4m3fn",
            weight_dtype="float8_e4m3fn",
        ),
    ),
    Covered(fused_experts, dtypes=_WIDE, dims=_experts(83, 70, biased=True)),
    Covered(fused_experts_w4a16, dims=_experts(96, 72, group_size=24)),
    Covered(fused_experts_mxfp4, dims=_experts(96, 160, biased=True)),
    Covered(fused_experts_fp8, dims=_experts(80, 96, granularity="block")),
    Covered(rms_norm),
    Covered(fused_add_rms_norm),
    Covered(gemma_rms_norm),
    Covered(fused_add_gemma_rms_norm),
    Covered(layer_norm),
    Covered(qk_norm),
    Covered(rotary_embedding),
    Covered(silu_and_mul),
    Covered(gelu_and_mul),
    Covered(gelu),
    Covered(quick_gelu),
    Covered(quantize_int8_per_token),
    Covered(quantize_int8_static, lambda case: not case.dims["asymmetric"]),
    Covered(quantize_fp8_per_token, _to_e4m3),
    Covered(quantize_fp8_static, _to_e4m3),
    Covered(
        quantize_fp8_blocks,
        lambda case: (
            _to_e4m3(case) and int(case.dims["hidden_size"]) % int(case.dims["block_size"]) == 0
        ),
    ),
    Covered(quantize_mxfp8),
    Covered(quantize_weight_int8, strided=("weight",)),
    Covered(quantize_weight_int4, strided=("weight",)),
    Covered(quantize_weight_int4_asymmetric, strided=("weight",)),
    Covered(sample_tokens, strided=_LOGITS),
    Covered(gumbel_argmax, strided=_LOGITS),
    Covered(apply_penalties, strided=(*_LOGITS, "prompt_mask", "output_counts")),
    Covered(topk_softmax, strided=_LOGITS),
    Covered(topk_sigmoid, strided=_LOGITS),
    Covered(grouped_topk, strided=_LOGITS),
    Covered(paged_attention, _attends, strided=()),
    Covered(ragged_attention, strided=()),
    Covered(ragged_attention_with_lse, strided=()),
    Covered(latent_attention_decode, strided=()),
    Covered(lora_shrink),
    Covered(lora_expand, strided=("shrunk", "y")),
    Covered(causal_convolution),
    Covered(state_space_scan, strided=()),
    Covered(gated_delta_rule, strided=()),
    Covered(embedding, dtypes=_WIDE, strided=("token_ids",)),
    Covered(w4a16_embedding, _groups, strided=("token_ids",)),
    Covered(w8a16_embedding, _groups, strided=("token_ids",)),
)


def write(path: Path) -> int:
    """Write all cases to ``path``, and return their number."""
    cases = [_block(block) for block in blocks()]
    cases += [_case(covered, case) for covered in OPS for case in _cases(covered)]
    path.write_bytes(_MAGIC + _count(len(cases)) + b"".join(cases))
    return len(cases)


def _cases(covered: Covered) -> Iterator[Case]:
    """Yield few cases among which every value of every axis occurs, and every number of tokens."""
    for planned in planned_cases(covered.op, _SEED, quick=True):
        if planned.dtype in covered.dtypes:
            case = planned.build()
            if covered.takes(case):
                yield replace(case, label=f"{case.label}, {_name(planned.dtype)}")
    sample = covered.op.sample
    for dims in covered.dims:
        assert sample is not None, f"{covered.op.name} draws no samples"
        for dtype in covered.dtypes:
            for num_tokens in _TOKENS:
                case = sample(dtype, dims, num_tokens, _SEED)
                of = ", ".join(f"{name} {value}" for name, value in dims.items())
                yield replace(case, label=f"{case.label}, {_name(dtype)}, {of}")


def _case(covered: Covered, case: Case) -> bytes:
    """Serialize a case in the format of golden.h."""
    op = covered.op
    exact = op.tolerance.roundings == 0 and case.reduction == 0
    texts, numbers, arrays = list[bytes](), list[bytes](), list[bytes]()
    for name, value in case.arguments.items():
        if isinstance(value, torch.Tensor):
            kept = value if name in covered.strided and _has_rows(value) else value.contiguous()
            arrays.append(_text(name) + _array(kept))
        elif isinstance(value, str | torch.dtype):
            texts.append(_text(name) + _text(_name(value)))
        elif value is not None:
            numbers.append(_text(name) + struct.pack("<d", value))
    parts = _text(op.name), _text(case.label), _count(exact)
    results = [_result(op, case, *result) for result in _expected(op, case)]
    return b"".join((*parts, *map(_list, (texts, numbers, arrays, results))))


def _block(block: Block) -> bytes:
    """Serialize a whole decoder block in the format of golden.h."""
    texts = [_text(name) + _text(value) for name, value in block.texts.items()]
    numbers = [_text(name) + struct.pack("<d", value) for name, value in block.numbers.items()]
    arrays = [_text(name) + _array(value.contiguous()) for name, value in block.arrays.items()]
    results = [_numbers(*result) for result in block.results]
    parts = _text("decoder_block"), _text(block.label), _count(0)
    return b"".join((*parts, *map(_list, (texts, numbers, arrays, results))))


def _expected(op: CustomOp[..., Any], case: Case) -> Iterator[tuple[torch.dtype, torch.Tensor]]:
    """Yield the dtype of each result, and the values of float results in float64."""
    given = Subject(op, op.reference).given(case)
    expectation = Expectation.of(op, case, given)
    forms = _forms(op, expectation.fake, case.arguments)
    yield from zip(forms, expectation.values.values(), strict=True)


def _forms(op: CustomOp[..., Any], fake: Any, arguments: Mapping[str, Any]) -> list[torch.dtype]:
    outputs = [tensor.dtype for tensor in tensors_of(fake)]
    return outputs + [cast(torch.Tensor, arguments[name]).dtype for name in op.mutates]


def _result(
    op: CustomOp[..., Any], case: Case, dtype: torch.dtype, expected: torch.Tensor
) -> bytes:
    return _numbers(dtype, expected, op.tolerance.bound(expected, dtype, case))


def _numbers(dtype: torch.dtype, expected: torch.Tensor, bound: torch.Tensor) -> bytes:
    """Serialize a result with the largest allowed errors."""
    head = _text(_name(dtype)) + struct.pack("<q", expected.numel())
    return head + _bytes(expected.double()) + _bytes(bound.double())


def _has_rows(tensor: torch.Tensor) -> bool:
    """Say whether the rows of ``tensor`` are at even distances, and whole."""
    sizes = tensor.shape
    if tensor.numel() == 0 or tensor.ndim == 0:
        return False
    if tensor.ndim == 1:
        return tensor.stride(0) >= 1
    even = all(
        tensor.stride(i) == tensor.stride(i + 1) * sizes[i + 1] for i in range(tensor.ndim - 2)
    )
    return even and tensor.stride(-1) == 1 and tensor.stride(-2) >= sizes[-1]


def _array(tensor: torch.Tensor) -> bytes:
    """Serialize dtype, sizes, strides and all elements between the first and the last."""
    sizes, strides = tensor.shape, tensor.stride()
    steps = zip(sizes, strides, strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    memory = torch.full((extent,), -1, dtype=_BITS[tensor.dtype.itemsize])
    memory.as_strided(sizes, strides).copy_(tensor.view(memory.dtype))
    form = struct.pack(f"<I{2 * len(sizes) + 1}q", len(sizes), *sizes, *strides, extent)
    return _text(_name(tensor.dtype)) + form + _bytes(memory)


def _bytes(tensor: torch.Tensor) -> bytes:
    assert sys.byteorder == "little", "files are written on little-endian machines"
    return tensor.contiguous().numpy().tobytes()


def _list(parts: Sequence[bytes]) -> bytes:
    return _count(len(parts)) + b"".join(parts)


def _text(text: str) -> bytes:
    return _count(len(text.encode())) + text.encode()


def _count(count: int) -> bytes:
    return struct.pack("<I", count)


def _name(value: str | torch.dtype) -> str:
    return str(value).removeprefix("torch.")


if __name__ == "__main__":
    print(f"{write(Path(sys.argv[1]))} cases")
