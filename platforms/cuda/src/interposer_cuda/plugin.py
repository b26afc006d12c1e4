"""The records of the CUDA platform. Neither this module nor what it imports needs torch."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import AttentionEntry, DeviceEntry, Kernel, PlatformEntry, Record
from interposer.requires import Dim, Requires

INTERPOSER_API = ">=1.0,<2"

# GPUs that are described for planning, each in its file of ``devices``.
_DESCRIBED = ("a100", "b200", "h100", "h200", "rtx4090", "rtx5090", "t4")

# What changes with the driver: verdicts and measurements are kept per driver.
_DRIVER_FILES = ("/proc/driver/nvidia/version",)

_NARROW = ("bfloat16", "float16")
# Flash attention and latent attention are compiled for Ampere and newer, which have it.
_ASYNC = frozenset({"cp_async"})


@hookimpl
def interposer_records() -> list[Record]:
    """Return the platform, what it brings besides portable kernels, and the described GPUs."""
    # On others torch multiplies group by group, for which the host has to know their sizes.
    grouped = Kernel(
        "grouped_linear",
        "grouped_linear_grouped_mm",
        "interposer_cuda.grouped_linear:grouped_linear",
        "cuda",
        Requires(
            architectures=frozenset({"sm_90", "sm_100"}),
            dtypes=("bfloat16",),
            dims={"in_features": Dim(multiple_of=8), "out_features": Dim(multiple_of=8)},
        ),
        score=5.0,
        properties=frozenset({"graph_safe", "opaque"}),
    )
    # The sizes that its kernels are tested for.
    latent = Kernel(
        "latent_attention_decode",
        "latent_attention_decode_flashinfer",
        "interposer_cuda.flashinfer_latent:latent_attention_decode",
        "cuda",
        Requires(
            _ASYNC,
            dtypes=_NARROW,
            dims={"latent_size": Dim(one_of=(512,)), "rotary_size": Dim(one_of=(64,))},
        ),
        "interposer_cuda.flashinfer_latent:judge",
        score=-1.0,
        properties=frozenset({"opaque"}),
    )
    return [
        *_attention(),
        grouped,
        latent,
        PlatformEntry("cuda", "interposer_cuda.platform:CUDAPlatform", driver_files=_DRIVER_FILES),
        *(DeviceEntry(name, "cuda", f"interposer_cuda:devices/{name}.json") for name in _DESCRIBED),
    ]


def _attention() -> list[Record]:
    """Return what attends besides ``paged``, none of which promises to be graph-safe."""
    # Nothing here was measured: portable kernels, which read pages where they lie, go before it.
    return [
        AttentionEntry(
            "sdpa_gathered",
            "interposer_ops.sdpa:SdpaBackend",
            "cuda",
            Requires(dtypes=("float32", *_NARROW)),
            score=-1.0,
        ),
        AttentionEntry(
            "flex_gathered",
            "interposer_ops.flex_attention:FlexBackend",
            "cuda",
            Requires(frozenset({"triton"}), dtypes=("float32", *_NARROW)),
            score=-1.5,
        ),
        AttentionEntry(
            "flash_attention_2",
            "interposer_cuda.flash_attention_2:FlashAttention2Backend",
            "cuda",
            Requires(_ASYNC, dtypes=_NARROW),
            score=-0.5,
        ),
        AttentionEntry(
            "flash_attention_2_gathered",
            "interposer_cuda.flash_attention_2:FlashAttention2GatheredBackend",
            "cuda",
            Requires(_ASYNC, dtypes=_NARROW),
            score=-0.8,
        ),
        AttentionEntry(
            "flash_attention_3",
            "interposer_cuda.flash_attention_3:FlashAttention3Backend",
            "cuda",
            Requires(architectures=frozenset({"sm_90"}), dtypes=_NARROW),
            score=-0.5,
        ),
        AttentionEntry(
            "flashinfer",
            "interposer_cuda.flashinfer_attention:FlashInferBackend",
            "cuda",
            Requires(frozenset({"tensor_cores_2"}), dtypes=_NARROW),
            score=-0.5,
        ),
    ]
