"""The records of the XPU platform. Neither this module nor what it imports needs torch."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import AttentionEntry, DeviceEntry, Kernel, PlatformEntry, Record
from interposer.requires import Dim, Requires

INTERPOSER_API = ">=1.0,<2"

# GPUs that are described for planning, each in its file of ``devices``.
_DESCRIBED = ("arc140v", "b580", "max1550")

# What changes with the driver: verdicts and measurements are kept per driver.
_DRIVER_FILES = ("/sys/module/i915/srcversion", "/sys/module/xe/srcversion")

_JUDGES = "interposer_xpu._packages.package_judges"
_DPAS = frozenset({"dpas"})
_NARROW = ("bfloat16", "float16")
_MULTIPLE = Dim(multiple_of=32)
# No call was ever watched: nothing is promised of what it does to memory or to graphs.
_OPAQUE = frozenset({"opaque"})
# Nobody has run these on a GPU: what is proven goes before them, unless they are wished for or were
# measured on the host.
_NOWHERE: frozenset[str] = frozenset()


@hookimpl
def interposer_records() -> list[Record]:
    """Return the platform, kernels of packages that may be there, and the described GPUs."""
    # oneDNN multiplies eight inputs by eight of the weight at a time; sizes as vLLM checks them.
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
        proven_on=_NOWHERE,
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
        proven_on=_NOWHERE,
    )
    # Half the conversions, where it can be had.
    fp8_weights = Kernel(
        "fp8_linear",
        "fp8_linear_fp8_gemm_w8a16",
        "interposer_xpu._fp8_linear:fp8_linear_weights",
        "xpu",
        Requires(_DPAS, dtypes=_NARROW),
        predicate=f"{_JUDGES}:judge_fp8_weights",
        score=21.0,
        properties=_OPAQUE,
        proven_on=_NOWHERE,
    )
    # The numbers of chosen experts are those that its routing was compiled for, in every version
    # known. The grouped product stores gates g and what they act on, u, in the dtype of x, which
    # the op does not: kernels that do not either go before it.
    #
    # How far h = act(g) u is off, in lengths C of what the rounding of h itself makes of a result:
    # - u is one such rounding; in swiglu_oai, where h has u + 1, it is no more in the mean unless
    #   all u lie about -1.
    # - g is at most two: for g > 0 an act(g) of silu, gelu or g sigmoid(1.702 g) changes by at most
    #   1.3 times the relative change of g; below -2 by more, of numbers that are small.
    # They are independent, so that all three have the length sqrt(1 + 1 + 4) C = 2.45 C. With the
    # result's own half step Y, Y + 2.45 C is allowed by 5 roundings, of (Y + C) / 2 each as the
    # op's cases count: three more than the op's two.
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
        proven_on=_NOWHERE,
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
        proven_on=_NOWHERE,
    )
    norm = Kernel(
        "rms_norm",
        "rms_norm_ipex",
        "interposer_xpu._packages.extension:rms_norm",
        "xpu",
        Requires(dtypes=("float32", *_NARROW)),
        predicate="interposer_xpu._packages.extension:judge",
        score=5.0,
        properties=_OPAQUE,
        proven_on=_NOWHERE,
    )
    # What these read of the cache they copy first: kernels that need not go before.
    sdpa = AttentionEntry(
        "sdpa_gathered",
        "interposer_ops.attention:SdpaBackend",
        "xpu",
        Requires(dtypes=("float32", *_NARROW)),
        score=-1.0,
        proven_on=_NOWHERE,
    )
    flex = AttentionEntry(
        "flex_gathered",
        "interposer_ops.attention:FlexBackend",
        "xpu",
        Requires(frozenset({"triton"}), dtypes=("float32", *_NARROW)),
        score=-1.5,
        proven_on=_NOWHERE,
    )
    return [
        sdpa,
        flex,
        PlatformEntry("xpu", "interposer_xpu._platform:XPUPlatform", driver_files=_DRIVER_FILES),
        *(int4, fp8, fp8_weights, experts, routing, norm),
        *(DeviceEntry(name, "xpu", f"interposer_xpu:devices/{name}.json") for name in _DESCRIBED),
    ]
