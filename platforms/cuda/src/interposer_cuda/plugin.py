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


@hookimpl
def interposer_records() -> list[Record]:
    """Return the platform, what it brings besides portable kernels, and the described GPUs."""
    # Nothing here was measured: portable kernels, which read pages where they lie, go before it.
    sdpa = AttentionEntry(
        "sdpa_gathered",
        "interposer_ops.sdpa:SdpaBackend",
        "cuda",
        Requires(dtypes=("float32", "bfloat16", "float16")),
        score=-1.0,
    )
    flash_3 = AttentionEntry(
        "flash_attention_3",
        "interposer_cuda.flash_attention_3:FlashAttention3Backend",
        "cuda",
        Requires(architectures=frozenset({"sm_90"}), dtypes=("bfloat16", "float16")),
        score=-0.5,
    )
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
    return [
        sdpa,
        flash_3,
        grouped,
        PlatformEntry("cuda", "interposer_cuda.platform:CUDAPlatform", driver_files=_DRIVER_FILES),
        *(DeviceEntry(name, "cuda", f"interposer_cuda:devices/{name}.json") for name in _DESCRIBED),
    ]
