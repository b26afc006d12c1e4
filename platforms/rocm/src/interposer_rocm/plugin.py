"""The records of the ROCm platform. Neither this module nor what it imports needs torch."""

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

# GPUs that are described for planning, each in its file of ``devices``.
_DESCRIBED = ("mi250x", "mi300x", "mi355x", "rx7900xtx", "rx9070xt")

# What changes with the driver: verdicts and measurements are kept per driver.
_DRIVER_FILES = ("/sys/module/amdgpu/version", "/sys/module/amdgpu/srcversion", "/proc/version")

_FLOATS = ("float32", "bfloat16", "float16")
_OF_16_BITS = ("bfloat16", "float16")
# Nobody has run these on a GPU: what is proven goes before them, unless they are wished for or were
# measured on the host.
_NOWHERE: frozenset[str] = frozenset()
# Activations that are rounded to three bits after the point, not seven, in roundings to bfloat16,
# 16 times finer. In lengths C of what the rounding of h to bfloat16 makes of a result: that of h
# is 16 C. Rounding x moves gates and what they act on by what rounding themselves would, whose
# terms have random signs: 16 C times 1 and, for the slope of silu, 2. They are independent, hence
# 16 sqrt(1 + 1 + 4) C = 39.2 C. With the result's own half step Y, Y + 39.2 C is allowed by 80
# roundings of (Y + C) / 2 each: 78 more than the op's two.
_OF_ACTIVATIONS = 78


@hookimpl
def interposer_records() -> list[Record]:
    """Return the platform, what it brings besides portable kernels, and the described GPUs."""
    return [
        PlatformEntry("rocm", "interposer_rocm._platform:ROCmPlatform", driver_files=_DRIVER_FILES),
        # What these read of the cache they copy first: kernels that need not go before.
        AttentionEntry(
            "sdpa_gathered",
            "interposer_ops.attention:SdpaBackend",
            "rocm",
            Requires(dtypes=_FLOATS),
            score=-1.0,
            proven_on=_NOWHERE,
        ),
        AttentionEntry(
            "flex_gathered",
            "interposer_ops.attention:FlexBackend",
            "rocm",
            Requires(frozenset({"triton"}), dtypes=_FLOATS),
            score=-1.5,
            proven_on=_NOWHERE,
        ),
        *_communicators(),
        *_products(),
        *_of_libraries(),
        *(DeviceEntry(name, "rocm", f"interposer_rocm:devices/{name}.json") for name in _DESCRIBED),
    ]


def _communicators() -> list[Record]:
    """Return RCCL, which graphs may hold, and both sums of AITER."""
    sums = "interposer_rocm._aiter.sums"
    return [
        CommunicatorEntry(
            "rccl",
            "interposer_ops.communicators:TorchCommunicator",
            platform="rocm",
            requires=Requires(dims={"platforms": Dim(at_most=1)}),
            properties=frozenset({"graph_safe"}),
            proven_on=_NOWHERE,
        ),
        # Behind RCCL, as all that is AITER's is behind what torch has.
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
            proven_on=_NOWHERE,
        ),
        # For large sums; its judge knows from which size on.
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
            proven_on=_NOWHERE,
        ),
    ]


def _products() -> list[Record]:
    """Return what multiplies 8-bit floats: as the hardware has them, and of few rows otherwise."""
    products = "interposer_rocm._scaled_products"
    fnuz = Requires(frozenset({"fp8_fnuz"}), frozenset({"gfx942"}), _FLOATS)
    ocp = Requires(frozenset({"fp8_ocp"}), dtypes=_FLOATS)
    plain = ("interposer_ops.quantized_linear:fp8_linear", f"{products}:fp8_linear_of_halves")
    split = "interposer_rocm._split_products"
    of_few = (f"{split}:fp8_linear", f"{split}:fp8_linear_of_halves")
    return [
        Kernel(
            "fp8_linear",
            f"fp8_linear_hipblaslt{format_}{technique}",
            target,
            "rocm",
            needs,
            f"interposer_rocm._scaled_products_judge:judge{technique}",
            f"{products}:prepare_halves" if format_ else "",
            score=score,
            properties=frozenset({"deterministic", "graph_safe", traced}),
            proven_on=_NOWHERE,
        )
        for technique, targets, score, traced in (
            ("", plain, 11.0, "traceable"),
            ("_split", of_few, 12.0, "opaque"),
        )
        for format_, needs, target in (("", ocp, targets[0]), ("_fnuz", fnuz, targets[1]))
    ]


def _of_libraries() -> list[Record]:
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
            proven_on=_NOWHERE,
        ),
        AttentionEntry(
            "aiter_latent",
            "interposer_rocm._aiter.latent_backend:AiterLatentBackend",
            "rocm",
            Requires(dtypes=("bfloat16",)),
            proven_on=_NOWHERE,
        ),
        AttentionEntry(
            "flash_attention",
            "interposer_rocm._flash_attention:FlashAttentionBackend",
            "rocm",
            Requires(dtypes=_OF_16_BITS),
            "interposer_rocm._flash_attention_judge:judge",
            proven_on=_NOWHERE,
        ),
        Kernel(
            "latent_attention_decode",
            "latent_attention_decode_aiter",
            "interposer_rocm._aiter.latent:latent_attention_decode",
            "rocm",
            Requires(dtypes=("bfloat16",)),
            f"{package}:judge_latent",
            proven_on=_NOWHERE,
            properties=frozenset({"opaque"}),
            confirm=f"{library}:confirm_latent",
        ),
        Kernel(
            "fused_experts",
            "fused_experts_aiter",
            "interposer_rocm._aiter.experts:fused_experts",
            "rocm",
            # Sizes of the tiles that are read at once.
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
            proven_on=_NOWHERE,
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
                    # float16 is eight times finer, and as many times more roundings would be lost.
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
                proven_on=_NOWHERE,
                properties=frozenset({"opaque"}),
                confirm=f"{scaled}:confirm",
                extra_roundings=_OF_ACTIVATIONS,
            )
            for format_, feature, prepare in (
                ("", "fp8_ocp", "prepare"),
                ("_fnuz", "fp8_fnuz", "prepare_halves"),
            )
        ),
    ]
