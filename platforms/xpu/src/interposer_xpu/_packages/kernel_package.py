"""Ops of the package vllm-xpu-kernels, and checks that each op can be used.

The package registers the ops with torch, so the registered schemas can be compared with the schemas
that this plugin was written for: another version may have an op of the same name with other
arguments. The package's modules are imported when an op is first called.

Source: vllm-project/vllm-xpu-kernels: ``csrc/torch_bindings.cpp``, ``csrc/moe/torch_bindings.cpp``
and ``csrc/xpu/torch_bindings.cpp``; the published wheels 0.1.3.1, 0.1.12.1 and 0.1.16.2
have the schemas that are listed here. A wheel states its torch version in the long description
only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from interposer import Verdict
from interposer_xpu._packages import kernel_package_inquiry
from interposer_xpu._packages.optional_packages import Package, torch_version, version_numbers

PACKAGE = Package("vllm-xpu-kernels", str(Path(kernel_package_inquiry.__file__)))
# Schemas were compared with releases of version 0.1 only.
_FIRST_UNSUPPORTED = (0, 2)

SCHEMAS = {
    "_C::get_xpu_view_from_cpu_tensor": "(Tensor cpu_tensor) -> Tensor",
    "_xpu_C::int4_gemm_w4a16": "(Tensor A, Tensor B, Tensor? bias, Tensor B_scale, Tensor B_zp, "
    "int group_size, Tensor? g_idx) -> Tensor",
    "_xpu_C::fp8_gemm": "(Tensor A, Tensor B, ScalarType? out_dtype, Tensor? A_scale_, "
    "Tensor? B_scale_, Tensor? bias_) -> Tensor",
    "_xpu_C::fp8_gemm_w8a16": "(Tensor A, Tensor B, Tensor? B_scale_, Tensor? bias_) -> Tensor",
    "_xpu_C::cutlass_grouped_gemm_interface": "(Tensor ptr_A, Tensor? ptr_A_scale, Tensor ptr_B, "
    "Tensor? ptr_B_scale, Tensor? ptr_bias, Tensor ptr_D, Tensor rows_per_expert, int N, int K, "
    "int num_experts) -> Tensor",
    "_moe_C::topk_softmax": "(Tensor! topk_weights, Tensor! topk_indices, "
    "Tensor! token_expert_indices, Tensor gating_output, bool renormalize, Tensor? bias, "
    "Tensor? is_padding) -> ()",
    "_moe_C::remap_hidden_states": "(Tensor hidden_states, Tensor? hidden_states_scales, "
    "Tensor remapped_hidden_states, Tensor? remapped_hidden_states_scales, Tensor? expert_map, "
    "Tensor rows_per_expert, Tensor unpermuted_row_to_permuted_row, Tensor topk_ids, "
    "int total_experts_num, int local_experts_num) -> ()",
    "_moe_C::moe_gather": "(Tensor! output, Tensor moe_output, Tensor topk_weights, "
    "Tensor unpermuted_row_to_permuted_row, int num_experts) -> ()",
}
"""Expected schema of every op that this plugin calls, in torch's notation."""

USES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "view_of_host": ((0, 1, 3), ("_C::get_xpu_view_from_cpu_tensor",)),
    "int4": ((0, 1, 3), ("_xpu_C::int4_gemm_w4a16",)),
    "fp8": ((0, 1, 3), ("_xpu_C::fp8_gemm",)),
    "fp8_weights": ((0, 1, 3), ("_xpu_C::fp8_gemm_w8a16",)),
    "routing": ((0, 1, 12), ("_moe_C::topk_softmax",)),
    "experts": (
        (0, 1, 12),
        (
            "_moe_C::remap_hidden_states",
            "_moe_C::moe_gather",
            "_xpu_C::cutlass_grouped_gemm_interface",
        ),
    ),
}
"""By use: the first package version with these schemas, and the ops that the use needs."""

_TORCH_IN_DESCRIPTION = re.compile(r"PyTorch\W{0,6}(\d+)\.(\d+)")


def judge_installed() -> Verdict:
    """Accept a supported version that was built for the installed torch, from metadata alone."""
    installed = PACKAGE.version
    if not installed:
        return Verdict.refuse(
            "needs the package vllm-xpu-kernels, which is not installed: "
            "pip install vllm-xpu-kernels"
        )
    if version_numbers(installed) >= _FIRST_UNSUPPORTED:
        limit = ".".join(map(str, _FIRST_UNSUPPORTED))
        return Verdict.refuse(f"was written for vllm-xpu-kernels below {limit}, found {installed}")
    # A wheel that states no torch version passes: ``judge_ops`` compares the schemas anyway.
    torch_match = _TORCH_IN_DESCRIPTION.search(PACKAGE.description)
    if (
        torch_match
        and tuple(map(int, torch_match.groups())) != version_numbers(torch_version())[:2]
    ):
        return Verdict.refuse(
            f"vllm-xpu-kernels {installed} is built for torch {torch_match[1]}.{torch_match[2]}, "
            f"installed is {torch_version()}. Install the version that fits"
        )
    return Verdict.accept()


def judge_ops(use: str) -> Verdict:
    """Accept if the package has every op that ``use`` needs, with the expected schema."""
    verdict = judge_installed()
    if not verdict:
        return verdict
    first, names = USES[use]
    installed = PACKAGE.version
    if version_numbers(installed) < first:
        first_text = ".".join(map(str, first))
        return Verdict.refuse(f"needs vllm-xpu-kernels {first_text} or newer, found {installed}")
    facts, verdict = _run_inquiry()
    if not verdict:
        return verdict
    for name in names:
        fault = facts.get(name, "was not checked by the inquiry")
        if fault:
            return Verdict.refuse(f"{name} of vllm-xpu-kernels {installed} {fault}")
    return Verdict.accept()


@cache
def op(namespace: str, name: str) -> Callable[..., Any]:
    """Import the package's module ``namespace`` if necessary, and return its op ``name``."""
    import torch  # imported here, because checks of metadata need no torch

    import_module(f"vllm_xpu_kernels.{namespace}")
    op_overload: Callable[..., Any] = getattr(getattr(torch.ops, namespace), name).default
    return op_overload


@cache
def _run_inquiry() -> tuple[dict[str, Any], Verdict]:
    return PACKAGE.ask(json.dumps(SCHEMAS))
