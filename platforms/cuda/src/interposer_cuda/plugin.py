"""Records of the CUDA platform; importing this module does not import torch."""

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
from interposer_cuda._tables import shipped_tables

INTERPOSER_API = ">=1.0,<2"

# GPUs that can be planned for without the hardware; each has a file in the folder ``devices``.
_DESCRIBED = ("a100", "b200", "h100", "h200", "rtx4090", "rtx5090", "t4")

# Files that change with the driver: cached verdicts and measurements are valid for one driver.
_DRIVER_FILES = ("/proc/driver/nvidia/version",)

_NARROW = ("bfloat16", "float16")
_FLOATS = ("float32", *_NARROW)
# FlashAttention and latent attention are compiled for Ampere and newer, which have cp.async.
_ASYNC = frozenset({"cp_async"})
# Kernels that no GPU has run yet. Verified kernels rank first, unless a preference of the user or a
# measurement on this machine decides otherwise.
_UNPROVEN: frozenset[str] = frozenset()
# Verified on an H100 or an H200.
_HOPPER = frozenset({"sm_90"})


# Each element is added in rank order, independent of the other elements.
_IN_ORDER = ("graph_safe", "deterministic", "batch_invariant")


@hookimpl
def interposer_records() -> list[Record]:
    """Return the records of the platform, its kernels and backends, and the described GPUs."""
    # On other GPUs torch multiplies group by group, which needs the group sizes on the host.
    grouped = Kernel(
        "grouped_linear",
        "grouped_linear_grouped_mm",
        "interposer_cuda._grouped_linear:grouped_linear",
        "cuda",
        Requires(
            architectures=frozenset({"sm_90", "sm_100"}),
            dtypes=("bfloat16",),
            dims={"in_features": Dim(multiple_of=8), "out_features": Dim(multiple_of=8)},
        ),
        score=5.0,
        properties=frozenset({"graph_safe", "opaque"}),
        proven_on=_HOPPER,
    )
    # Ranks before the expert-by-expert kernel, which synchronizes, and after Triton's kernel.
    experts = Kernel(
        "fused_experts",
        "fused_experts_grouped_mm",
        "interposer_cuda._grouped_experts:fused_experts",
        "cuda",
        Requires(
            architectures=frozenset({"sm_90", "sm_100"}),
            dtypes=("bfloat16",),
            dims={"hidden_size": Dim(multiple_of=8), "intermediate_size": Dim(multiple_of=8)},
        ),
        "interposer_cuda._grouped_experts:judge",
        "interposer_cuda._grouped_experts:prepare",
        score=6.0,
        properties=frozenset({"opaque"}),
        proven_on=_UNPROVEN,
    )
    # FlashInfer tests its kernels for these sizes only.
    latent = Kernel(
        "latent_attention_decode",
        "latent_attention_decode_flashinfer",
        "interposer_cuda._flashinfer.latent:latent_attention_decode",
        "cuda",
        Requires(
            _ASYNC,
            dtypes=_NARROW,
            dims={"latent_size": Dim(one_of=(512,)), "rotary_size": Dim(one_of=(64,))},
        ),
        "interposer_cuda._flashinfer.latent:judge",
        # Correct on an H100, but declared unproven to rank after kernels that graphs can capture.
        proven_on=_UNPROVEN,
        properties=frozenset({"opaque"}),
    )
    # The first FlashMLA kernels for Blackwell took other numbers of heads, hence sm_90 only.
    sparse = Kernel(
        "sparse_latent_attention",
        "sparse_latent_attention_flash_mla",
        "interposer_cuda._flash_mla.sparse:sparse_latent_attention",
        "cuda",
        Requires(
            architectures=frozenset({"sm_90"}),
            dtypes=("bfloat16",),
            dims={
                "latent_size": Dim(one_of=(512,)),
                "rotary_size": Dim(one_of=(64,)),
                "num_heads": Dim(one_of=(64, 128)),
                "top_k": Dim(at_least=128, multiple_of=128),
                "scaled": Dim(one_of=(False,)),
            },
        ),
        "interposer_cuda._flash_mla.sparse:judge",
        proven_on=_UNPROVEN,
        properties=frozenset({"graph_safe", "opaque"}),
        confirm="interposer_cuda._flash_mla.sparse:confirm",
    )
    return [
        *_attention_backends(),
        *_communicators(),
        grouped,
        experts,
        *_flashinfer_gemms(),
        *_hub_kernels(),
        latent,
        sparse,
        PlatformEntry("cuda", "interposer_cuda._platform:CUDAPlatform", driver_files=_DRIVER_FILES),
        *(DeviceEntry(name, "cuda", f"interposer_cuda:devices/{name}.json") for name in _DESCRIBED),
        *shipped_tables(),
    ]


def _communicators() -> list[Record]:
    """Return the communicators: symmetric memory and FlashInfer on one host, and NCCL."""
    sums = "interposer_cuda._symmetric_memory.sums"
    # Above some size one shot reads more than two shots do. The limits here are not measured.
    one_host_rows = (
        ("one_shot", "OneShot", 256 << 10, 30.0, frozenset({"sm_80", "sm_90", "sm_100"})),
        ("multimem", "Multimem", 8 << 20, 25.0, frozenset({"sm_90", "sm_100"})),
        ("two_shot", "TwoShot", 8 << 20, 20.0, frozenset({"sm_80", "sm_90", "sm_100"})),
    )
    communicators: list[Record] = [
        CommunicatorEntry(
            f"symmetric_memory_{name}",
            f"{sums}:{target}",
            ("all_reduce",),
            "cuda",
            Requires(
                architectures=architectures,
                dtypes=("bfloat16", "float32"),
                dims={
                    "ranks": Dim(one_of=(2, 4, 8)),
                    "hosts": Dim(at_most=1),
                    "platforms": Dim(at_most=1),
                    "bytes": Dim(at_most=max_bytes),
                },
            ),
            f"{sums}:judge",
            f"{sums}:confirm_multimem" if name == "multimem" else f"{sums}:confirm",
            score=score,
            properties=frozenset({"graph_safe"} if name == "multimem" else _IN_ORDER),
            proven_on=_UNPROVEN,
        )
        for name, target, max_bytes, score, architectures in one_host_rows
    ]
    flashinfer = "interposer_cuda._flashinfer.communicator"
    # The fused norm is not batch invariant: the order of additions in a row depends on T.
    by_dtype = (
        ("flashinfer", "FlashInferCommunicator", _NARROW, (), _IN_ORDER),
        (
            "flashinfer_float32",
            "FlashInferFloat32Communicator",
            ("float32",),
            ("all_reduce_add_rms_norm",),
            _IN_ORDER[:2],
        ),
    )
    communicators += [
        CommunicatorEntry(
            name,
            f"{flashinfer}:{target}",
            ("all_reduce", *fused),
            "cuda",
            Requires(
                architectures=frozenset({"sm_90", "sm_100", "sm_103", "sm_120", "sm_121"}),
                dtypes=dtypes,
                dims={
                    "ranks": Dim(one_of=(2, 4, 8)),
                    "hosts": Dim(at_most=1),
                    "platforms": Dim(at_most=1),
                    "bytes": Dim(at_most=8 << 20),
                },
            ),
            f"{flashinfer}:judge",
            f"{flashinfer}:confirm",
            score=15.0,
            properties=frozenset(properties),
            proven_on=_UNPROVEN,
        )
        for name, target, dtypes, fused, properties in by_dtype
    ]
    nccl = CommunicatorEntry(
        "nccl",
        "interposer_ops.communicators:TorchCommunicator",
        platform="cuda",
        requires=Requires(dims={"platforms": Dim(at_most=1)}),
        properties=frozenset({"graph_safe"}),
        proven_on=_UNPROVEN,
    )
    return [*communicators, nccl]


def _flashinfer_gemms() -> list[Record]:
    gemm_module = "interposer_cuda._flashinfer.gemm"
    blackwell = frozenset({"sm_100", "sm_103", "sm_120", "sm_121"})
    sizes = {name: Dim(multiple_of=32) for name in ("in_features", "out_features")}
    large = {name: Dim(at_least=128, multiple_of=32) for name in sizes}
    full_blocks = {name: Dim(multiple_of=128) for name in sizes}
    square_blocks = {name: Dim(one_of=(128,)) for name in ("block_rows", "block_columns")}
    formats = {name: Dim(one_of=("float8_e4m3fn",)) for name in ("x_dtype", "weight_dtype")}
    rows = [
        ("nvfp4_linear", blackwell, sizes, "prepare_nvfp4"),
        ("mxfp8_linear", blackwell, large, "prepare_mxfp8"),
        (
            "fp8_block_linear",
            blackwell - {"sm_103"},
            {**full_blocks, **square_blocks, **formats},
            "",
        ),
    ]
    return [
        Kernel(
            op,
            f"{op}_flashinfer",
            f"{gemm_module}:{op}",
            "cuda",
            Requires(architectures=architectures, dtypes=("bfloat16", "float16"), dims=dims),
            f"{gemm_module}:judge",
            f"{gemm_module}:{prepare}" if prepare else "",
            proven_on=_UNPROVEN,
            properties=frozenset({"opaque"}),
            confirm=f"{gemm_module}:confirm",
        )
        for op, architectures, dims, prepare in rows
    ]


def _hub_kernels() -> list[Record]:
    activations = ("silu_and_mul", "gelu_and_mul", "gelu", "quick_gelu")
    norm_sizes = {"hidden_size": Dim(at_least=8, at_most=8192, multiple_of=8)}
    rows = [
        *((op, "activation", {}) for op in activations),
        *((op, "layer_norm", norm_sizes) for op in ("rms_norm", "layer_norm")),
    ]
    return [
        Kernel(
            op,
            f"{op}_hub",
            f"interposer_cuda._hub.kernels:{op}",
            "cuda",
            Requires(dtypes=_FLOATS, dims=dims),
            f"interposer_cuda._hub.cache:judge_{repository}",
            proven_on=_UNPROVEN,
            properties=frozenset({"opaque"}),
            confirm=f"interposer_cuda._hub.kernels:confirm_{repository}",
        )
        for op, repository, dims in rows
    ]


def _attention_backends() -> list[Record]:
    """Return the attention backends other than ``paged``."""
    # Gathered backends copy the cache first, and so score below backends that read the cache in
    # place.
    safe = frozenset({"graph_safe"})
    return [
        AttentionEntry(
            "sdpa_gathered",
            "interposer_ops.attention:SdpaBackend",
            "cuda",
            Requires(dtypes=_FLOATS),
            score=-1.0,
            proven_on=_HOPPER,
        ),
        AttentionEntry(
            "flex_gathered",
            "interposer_ops.attention:FlexBackend",
            "cuda",
            Requires(frozenset({"triton"}), dtypes=_FLOATS),
            score=-1.5,
            proven_on=_HOPPER,
        ),
        AttentionEntry(
            "flash_attention_2",
            "interposer_cuda._flash_attention.version_2:FlashAttention2Backend",
            "cuda",
            Requires(_ASYNC, dtypes=_NARROW),
            properties=safe,
            page_sizes=(256,),
            proven_on=_UNPROVEN,
        ),
        AttentionEntry(
            "flash_attention_2_gathered",
            "interposer_cuda._flash_attention.version_2:FlashAttention2GatheredBackend",
            "cuda",
            Requires(_ASYNC, dtypes=_NARROW),
            score=-0.8,
            proven_on=_UNPROVEN,
        ),
        AttentionEntry(
            "flash_attention_3",
            "interposer_cuda._flash_attention.version_3:FlashAttention3Backend",
            "cuda",
            Requires(architectures=frozenset({"sm_90"}), dtypes=_NARROW),
            properties=safe,
            proven_on=_UNPROVEN,
        ),
        AttentionEntry(
            "flashinfer",
            "interposer_cuda._flashinfer.attention:FlashInferBackend",
            "cuda",
            Requires(frozenset({"tensor_cores_2"}), dtypes=_NARROW),
            properties=safe,
            proven_on=_UNPROVEN,
        ),
        AttentionEntry(
            "flashinfer_latent",
            "interposer_cuda._flashinfer.latent_backend:FlashInferLatentBackend",
            "cuda",
            Requires(_ASYNC, dtypes=_NARROW),
            properties=safe,
            proven_on=_HOPPER,
        ),
        AttentionEntry(
            "flash_mla",
            "interposer_cuda._flash_mla.latent_backend:FlashMLABackend",
            "cuda",
            Requires(architectures=frozenset({"sm_90"}), dtypes=_NARROW),
            properties=safe,
            page_sizes=(64,),
            proven_on=_UNPROVEN,
        ),
    ]
