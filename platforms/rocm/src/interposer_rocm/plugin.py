"""Records of the ROCm platform; importing this module does not import torch."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import (
    AttentionEntry,
    CommunicatorEntry,
    DeviceEntry,
    Kernel,
    PlatformEntry,
    Record,
)
from interposer.requires import Dim, Requires

INTERPOSER_API = ">=1.0,<2"

# GPUs that can be planned for without the hardware; each has a file in the folder ``devices``.
_DESCRIBED = ("mi250x", "mi300x", "mi355x", "rx7900xtx", "rx9070xt")

# Files that change with the driver: cached verdicts and measurements are valid for one driver.
_DRIVER_FILES = ("/sys/module/amdgpu/version", "/sys/module/amdgpu/srcversion", "/proc/version")

_FLOATS = ("float32", "bfloat16", "float16")
_OF_16_BITS = ("bfloat16", "float16")
# Kernels that no GPU has run yet. Verified kernels rank first, unless a preference of the user or a
# measurement on this machine decides otherwise.
_UNPROVEN: frozenset[str] = frozenset()
# Extra roundings that FP8 activations cost, counted as roundings to bfloat16. FP8 has 3 mantissa
# bits and bfloat16 has 7, so one FP8 rounding is 16 times coarser. Let C be the error of the output
# from rounding the intermediate h to bfloat16. The FP8 rounding of h costs 16 C. The FP8 rounding
# of x moves up and gate as much as rounding up and gate themselves would: 16 C for up, and 2 * 16 C
# for gate (slope of silu). The three errors are independent: 16 sqrt(1 + 1 + 4) C = 39.2 C. The
# output's own half step is Y. Y + 39.2 C is covered by 80 roundings of (Y + C) / 2 each, which are
# 78 more than the op's two.
_ROUNDINGS_OF_ACTIVATIONS = 78


@hookimpl
def interposer_records() -> list[Record]:
    """Return the records of the platform, its kernels and backends, and the described GPUs."""
    return [
        PlatformEntry("rocm", "interposer_rocm._platform:ROCmPlatform", driver_files=_DRIVER_FILES),
        # Gathered backends copy the cache first, and so score below backends that read the cache in
        # place.
        AttentionEntry(
            "sdpa_gathered",
            "interposer_ops.attention:SdpaBackend",
            "rocm",
            Requires(dtypes=_FLOATS),
            score=-1.0,
            proven_on=_UNPROVEN,
        ),
        AttentionEntry(
            "flex_gathered",
            "interposer_ops.attention:FlexBackend",
            "rocm",
            Requires(frozenset({"triton"}), dtypes=_FLOATS),
            score=-1.5,
            proven_on=_UNPROVEN,
        ),
        *_communicators(),
        *_fp8_gemms(),
        *_library_kernels(),
        *(DeviceEntry(name, "rocm", f"interposer_rocm:devices/{name}.json") for name in _DESCRIBED),
    ]


def _communicators() -> list[Record]:
    """Return the communicators: RCCL and AITER's custom and quick all-reduce."""
    sums = "interposer_rocm._aiter.sums"
    return [
        CommunicatorEntry(
            "rccl",
            "interposer_ops.communicators:TorchCommunicator",
            platform="rocm",
            requires=Requires(dims={"platforms": Dim(at_most=1)}),
            properties=frozenset({"graph_safe"}),
            proven_on=_UNPROVEN,
        ),
        # Ranks after RCCL, as all AITER kernels rank after torch's.
        CommunicatorEntry(
            "aiter",
            f"{sums}:AiterCommunicator",
            ("all_reduce",),
            "rocm",
            Requires(
                architectures=frozenset({"gfx942", "gfx950"}),
                dtypes=_OF_16_BITS,
                dims={
                    "ranks": Dim(one_of=(2, 4, 6, 8)),
                    "hosts": Dim(at_most=1),
                    "platforms": Dim(at_most=1),
                    "bytes": Dim(at_least=16, at_most=64 << 20, multiple_of=16),
                },
            ),
            f"{sums}:judge",
            score=-1.0,
            proven_on=_UNPROVEN,
        ),
        # For large tensors only; the predicate knows the smallest size.
        CommunicatorEntry(
            "aiter_quick",
            f"{sums}:AiterQuickCommunicator",
            ("all_reduce",),
            "rocm",
            Requires(
                architectures=frozenset({"gfx942", "gfx950"}),
                dtypes=_OF_16_BITS,
                dims={
                    "ranks": Dim(one_of=(2, 4, 8)),
                    "hosts": Dim(at_most=1),
                    "platforms": Dim(at_most=1),
                    "bytes": Dim(multiple_of=16),
                },
            ),
            f"{sums}:judge_quick",
            score=-1.5,
            proven_on=_UNPROVEN,
        ),
    ]


def _fp8_gemms() -> list[Record]:
    """Return the FP8 GEMM kernels: hipBLASLt alone and with split-K, each for OCP and fnuz."""
    gemm_module = "interposer_rocm._scaled_gemm"
    fnuz = Requires(frozenset({"fp8_fnuz"}), frozenset({"gfx942"}), _FLOATS)
    ocp = Requires(frozenset({"fp8_ocp"}), dtypes=_FLOATS)
    plain_targets = (
        "interposer_ops.quantized_linear:fp8_linear",
        f"{gemm_module}:fp8_linear_of_halves",
    )
    split_module = "interposer_rocm._split_gemm"
    split_targets = (f"{split_module}:fp8_linear", f"{split_module}:fp8_linear_of_halves")
    return [
        Kernel(
            "fp8_linear",
            f"fp8_linear_hipblaslt{format_}{technique}",
            target,
            "rocm",
            needs,
            f"interposer_rocm._scaled_gemm_judge:judge{technique}",
            f"{gemm_module}:prepare_halves" if format_ else "",
            score=score,
            properties=frozenset({"deterministic", "graph_safe", traced}),
            proven_on=_UNPROVEN,
        )
        for technique, targets, score, traced in (
            ("", plain_targets, 11.0, "traceable"),
            ("_split", split_targets, 12.0, "opaque"),
        )
        for format_, needs, target in (("", ocp, targets[0]), ("_fnuz", fnuz, targets[1]))
    ]


def _library_kernels() -> list[Record]:
    package, library = "interposer_rocm._aiter.package", "interposer_rocm._aiter.library"
    scaled = "interposer_rocm._aiter.fp8_experts"
    return [
        AttentionEntry(
            "aiter_flash",
            "interposer_rocm._aiter.flash:AiterFlashBackend",
            "rocm",
            Requires(dtypes=_OF_16_BITS),
            f"{package}:judge_flash",
            properties=frozenset({"graph_safe"}),
            proven_on=_UNPROVEN,
        ),
        AttentionEntry(
            "aiter_latent",
            "interposer_rocm._aiter.latent_backend:AiterLatentBackend",
            "rocm",
            Requires(dtypes=("bfloat16",)),
            proven_on=_UNPROVEN,
        ),
        AttentionEntry(
            "flash_attention",
            "interposer_rocm._flash_attention:FlashAttentionBackend",
            "rocm",
            Requires(dtypes=_OF_16_BITS),
            "interposer_rocm._flash_attention_judge:judge",
            proven_on=_UNPROVEN,
        ),
        Kernel(
            "latent_attention_decode",
            "latent_attention_decode_aiter",
            "interposer_rocm._aiter.latent:latent_attention_decode",
            "rocm",
            Requires(dtypes=("bfloat16",)),
            f"{package}:judge_latent",
            proven_on=_UNPROVEN,
            properties=frozenset({"opaque"}),
            confirm=f"{library}:confirm_latent",
        ),
        Kernel(
            "fused_experts",
            "fused_experts_aiter",
            "interposer_rocm._aiter.experts:fused_experts",
            "rocm",
            # AITER's kernels read tiles of 128.
            Requires(
                dtypes=_OF_16_BITS,
                dims={
                    "hidden_size": Dim(multiple_of=128),
                    "intermediate_size": Dim(multiple_of=128),
                    "activation": Dim(one_of=("silu",)),
                    "biased": Dim(one_of=(False,)),
                },
            ),
            f"{package}:judge_experts",
            "interposer_rocm._aiter.experts:prepare",
            proven_on=_UNPROVEN,
            properties=frozenset({"opaque"}),
            confirm=f"{library}:confirm_experts",
        ),
        *(
            Kernel(
                "fused_experts_fp8",
                f"fused_experts_fp8_aiter{format_}",
                f"{scaled}:fused_experts_fp8",
                "rocm",
                Requires(
                    features=frozenset({feature}),
                    # float16 is 8 times finer, so the extra roundings would be 8 times as many.
                    dtypes=("bfloat16",),
                    dims={
                        "hidden_size": Dim(multiple_of=128),
                        "intermediate_size": Dim(multiple_of=128),
                        "activation": Dim(one_of=("silu",)),
                        "weight_dtype": Dim(one_of=("float8_e4m3fn",)),
                    },
                ),
                f"{package}:judge_scaled_experts",
                f"{scaled}:{prepare}",
                proven_on=_UNPROVEN,
                properties=frozenset({"opaque"}),
                confirm=f"{scaled}:confirm",
                extra_roundings=_ROUNDINGS_OF_ACTIVATIONS,
            )
            for format_, feature, prepare in (
                ("", "fp8_ocp", "prepare"),
                ("_fnuz", "fp8_fnuz", "prepare_halves"),
            )
        ),
    ]
