"""Records of the XPU platform; importing this module does not import torch."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import AttentionEntry, DeviceEntry, Kernel, PlatformEntry, Record
from interposer.requires import Dim, Requires

INTERPOSER_API = ">=1.0,<2"

# GPUs that can be planned for without the hardware; each has a file in the folder ``devices``.
_DESCRIBED = ("arc140v", "b580", "max1550")

# Files that change with the driver: cached verdicts and measurements are valid for one driver.
_DRIVER_FILES = ("/sys/module/i915/srcversion", "/sys/module/xe/srcversion")

_JUDGES = "interposer_xpu._packages.package_judges"
_DPAS = frozenset({"dpas"})
_NARROW = ("bfloat16", "float16")
_MULTIPLE = Dim(multiple_of=32)
# No GPU has run these calls, so nothing is declared about graph capture or determinism.
_OPAQUE = frozenset({"opaque"})
# Kernels that no GPU has run yet. Verified kernels rank first, unless a preference of the user or a
# measurement on this machine decides otherwise.
_UNPROVEN: frozenset[str] = frozenset()


@hookimpl
def interposer_records() -> list[Record]:
    """Return the records of the platform, kernels of an optional package, and described GPUs."""
    # oneDNN multiplies 8 inputs by 8 weights at a time. vLLM checks the multiples of 32.
    int4 = Kernel(
        "w4a16_linear",
        "w4a16_linear_int4_gemm",
        "interposer_xpu._weight_only_linear:w4a16_linear",
        "xpu",
        Requires(
            _DPAS,
            dtypes=_NARROW,
            dims=dict.fromkeys(("in_features", "out_features", "group_size"), _MULTIPLE),
        ),
        predicate=f"{_JUDGES}:judge_int4",
        prepare="interposer_xpu._weight_only_linear:prepare",
        score=20.0,
        properties=_OPAQUE,
        proven_on=_UNPROVEN,
    )
    fp8 = Kernel(
        "fp8_linear",
        "fp8_linear_fp8_gemm",
        "interposer_xpu._fp8_linear:fp8_linear",
        "xpu",
        Requires(_DPAS, dtypes=_NARROW),
        predicate=f"{_JUDGES}:judge_fp8",
        score=20.0,
        properties=_OPAQUE,
        proven_on=_UNPROVEN,
    )
    # Preferred where possible, because it converts one operand instead of two.
    fp8_weights = Kernel(
        "fp8_linear",
        "fp8_linear_fp8_gemm_w8a16",
        "interposer_xpu._fp8_linear:fp8_linear_weights",
        "xpu",
        Requires(_DPAS, dtypes=_NARROW),
        predicate=f"{_JUDGES}:judge_fp8_weights",
        score=21.0,
        properties=_OPAQUE,
        proven_on=_UNPROVEN,
    )
    # top_k lists the values that the package's routing is compiled for in all known versions.
    # Unlike the op, the grouped GEMM rounds gate g and up projection u to the dtype of x. Kernels
    # without these roundings therefore rank before this kernel.
    #
    # Error of h = act(g) u, where C is the error of the output from rounding h itself:
    # - Rounding u costs C. In swiglu_oai, where h uses u + 1, the mean is not larger unless all u
    #   are close to -1.
    # - Rounding g costs at most 2 C. For g > 0, act(g) of silu, gelu or g sigmoid(1.702 g) changes
    #   by at most 1.3 times the relative change of g; below -2 by more, but act(g) is small there.
    # The errors are independent: sqrt(1 + 1 + 4) C = 2.45 C. The output's own half step is Y.
    # Y + 2.45 C is covered by 5 roundings of (Y + C) / 2 each, as the op's cases count: 3 more than
    # the op's two.
    experts = Kernel(
        "fused_experts_mxfp4",
        "fused_experts_mxfp4_grouped_gemm",
        "interposer_xpu._experts:fused_experts_mxfp4",
        "xpu",
        Requires(
            frozenset({"block_2d_io"}),
            dtypes=_NARROW,
            dims={
                "hidden_size": _MULTIPLE,
                "intermediate_size": _MULTIPLE,
                "top_k": Dim(one_of=(1, 2, 4, 6, 8)),
            },
        ),
        predicate=f"{_JUDGES}:judge_experts",
        prepare="interposer_xpu._experts:prepare",
        score=5.0,
        properties=_OPAQUE,
        proven_on=_UNPROVEN,
        extra_roundings=3,
    )
    routing = Kernel(
        "topk_softmax",
        "topk_softmax_moe",
        "interposer_xpu._routing:topk_softmax",
        "xpu",
        Requires(dtypes=("float32", *_NARROW)),
        predicate=f"{_JUDGES}:judge_routing",
        score=20.0,
        properties=_OPAQUE,
        proven_on=_UNPROVEN,
    )
    # Gathered backends copy the cache first, and so score below backends that read the cache in
    # place.
    sdpa = AttentionEntry(
        "sdpa_gathered",
        "interposer_ops.attention:SdpaBackend",
        "xpu",
        Requires(dtypes=("float32", *_NARROW)),
        score=-1.0,
        proven_on=_UNPROVEN,
    )
    flex = AttentionEntry(
        "flex_gathered",
        "interposer_ops.attention:FlexBackend",
        "xpu",
        Requires(frozenset({"triton"}), dtypes=("float32", *_NARROW)),
        score=-1.5,
        proven_on=_UNPROVEN,
    )
    return [
        sdpa,
        flex,
        PlatformEntry("xpu", "interposer_xpu._platform:XPUPlatform", driver_files=_DRIVER_FILES),
        *(int4, fp8, fp8_weights, experts, routing),
        *(DeviceEntry(name, "xpu", f"interposer_xpu:devices/{name}.json") for name in _DESCRIBED),
    ]
