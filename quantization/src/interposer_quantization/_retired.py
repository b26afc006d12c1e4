"""Methods of checkpoints that are not read, by the method to take instead.

Some are gone with the library that wrote them, some hold what only one kernel reads, and some are
names that other runtimes use inside for what checkpoints call otherwise.
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
"""Retired names by the method that reads the nearest format."""
