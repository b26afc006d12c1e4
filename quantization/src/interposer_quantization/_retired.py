"""Unsupported quantization methods, each listed under the supported method to use instead.

Three kinds are listed: methods of unmaintained libraries, layouts of a single kernel, and internal
names of other runtimes for a checkpoint format.
"""

from __future__ import annotations

from collections.abc import Mapping

INSTEAD_OF: Mapping[str, frozenset[str]] = {
    "auto-round": frozenset({"intel/auto-round"}),
    "awq": frozenset({"awq_bitblas", "awq_marlin"}),
    "compressed-tensors": frozenset(
        {
            "aqlm",
            "eetq",
            "experts_int8",
            "higgs",
            "hqq",
            "qqq",
            "quanto",
            "quip",
            "spqr",
            "squeezellm",
            "tpu_int8",
            "vptq",
        }
    ),
    "fbgemm_fp8": frozenset({"fbgemm"}),
    "fp8": frozenset({"deepspeedfp"}),
    "gptq": frozenset(
        {"bitblas", "gptq_bitblas", "gptq_marlin", "gptq_marlin_24", "marlin", "moe_wna16"}
    ),
    "modelopt": frozenset({"modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"}),
}
"""Unsupported method names, by the supported method with the closest format."""
