"""The records of the CUDA platform. Neither this module nor what it imports needs torch."""

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

# GPUs that are described for planning, each in its file of ``devices``.
_DESCRIBED = ("a100", "b200", "h100", "h200", "rtx4090", "rtx5090", "t4")

# What changes with the driver: verdicts and measurements are kept per driver.
_DRIVER_FILES = ("/proc/driver/nvidia/version",)

_NARROW = ("bfloat16", "float16")
_FLOATS = ("float32", *_NARROW)
# Flash attention and latent attention are compiled for Ampere and newer, which have it.
_ASYNC = frozenset({"cp_async"})
# Nobody has run these on a GPU: what is proven goes before them, unless they are wished for or were
# measured on the host.
_NOWHERE: frozenset[str] = frozenset()
# Verified on an H100 or an H200.
_HOPPER = frozenset({"sm_90"})


# Each element is added up in the order of the ranks, whatever stands beside it.
_IN_ORDER = ("graph_safe", "deterministic", "batch_invariant")


@hookimpl
def interposer_records() -> list[Record]:
    """Return the platform, what it brings besides portable kernels, and the described GPUs."""
    # On others torch multiplies group by group, for which the host has to know their sizes.
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
    # Before the experts in turn, which wait for the device; behind those of Triton.
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
        proven_on=_NOWHERE,
    )
    # The sizes that its kernels are tested for.
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
        # Right on an H100. Graphs cannot hold it, and so it stays behind what they can.
        proven_on=_NOWHERE,
        properties=frozenset({"opaque"}),
    )
    # Its kernels for Blackwell took other numbers of heads in their first version.
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
        proven_on=_NOWHERE,
        properties=frozenset({"graph_safe", "opaque"}),
        confirm="interposer_cuda._flash_mla.sparse:confirm",
    )
    return [
        *_attention(),
        *_communicators(),
        grouped,
        experts,
        *_of_flashinfer(),
        *_of_the_hub(),
        latent,
        sparse,
        PlatformEntry("cuda", "interposer_cuda._platform:CUDAPlatform", driver_files=_DRIVER_FILES),
        *(DeviceEntry(name, "cuda", f"interposer_cuda:devices/{name}.json") for name in _DESCRIBED),
        *shipped_tables(),
    ]


def _communicators() -> list[Record]:
    """Return sums in memory that GPUs share, by size and dtype, and NCCL, which graphs may hold."""
    sums = "interposer_cuda._symmetric_memory.sums"
    # Sizes from which a rank should not read all that the others have; nobody measured them.
    by_size = (
        ("one_shot", "OneShot", 256 << 10, 30.0, frozenset({"sm_80", "sm_90", "sm_100"})),
        ("multimem", "Multimem", 8 << 20, 25.0, frozenset({"sm_90", "sm_100"})),
        ("two_shot", "TwoShot", 8 << 20, 20.0, frozenset({"sm_80", "sm_90", "sm_100"})),
    )
    shared: list[Record] = [
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
                    "bytes": Dim(at_most=most_bytes),
                },
            ),
            f"{sums}:judge",
            f"{sums}:confirm_multimem" if name == "multimem" else f"{sums}:confirm",
            score=score,
            properties=frozenset({"graph_safe"} if name == "multimem" else _IN_ORDER),
            proven_on=_NOWHERE,
        )
        for name, target, most_bytes, score, architectures in by_size
    ]
    flashinfer = "interposer_cuda._flashinfer.communicator"
    # A norm that is fused adds up its row in an order that depends on the number of rows.
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
    shared += [
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
            proven_on=_NOWHERE,
        )
        for name, target, dtypes, fused, properties in by_dtype
    ]
    nccl = CommunicatorEntry(
        "nccl",
        "interposer_ops.communicators:TorchCommunicator",
        platform="cuda",
        requires=Requires(dims={"platforms": Dim(at_most=1)}),
        properties=frozenset({"graph_safe"}),
        proven_on=_NOWHERE,
    )
    return [*shared, nccl]


def _of_flashinfer() -> list[Record]:
    products = "interposer_cuda._flashinfer.products"
    blackwell = frozenset({"sm_100", "sm_103", "sm_120", "sm_121"})
    sizes = {name: Dim(multiple_of=32) for name in ("in_features", "out_features")}
    large = {name: Dim(at_least=128, multiple_of=32) for name in sizes}
    whole = {name: Dim(multiple_of=128) for name in sizes}
    squares = {name: Dim(one_of=(128,)) for name in ("block_rows", "block_columns")}
    formats = {name: Dim(one_of=("float8_e4m3fn",)) for name in ("x_dtype", "weight_dtype")}
    rows = [
        ("nvfp4_linear", blackwell, sizes, "prepare_nvfp4"),
        ("mxfp8_linear", blackwell, large, "prepare_mxfp8"),
        ("fp8_block_linear", blackwell - {"sm_103"}, {**whole, **squares, **formats}, ""),
    ]
    return [
        Kernel(
            op,
            f"{op}_flashinfer",
            f"{products}:{op}",
            "cuda",
            Requires(architectures=architectures, dtypes=("bfloat16", "float16"), dims=dims),
            f"{products}:judge",
            f"{products}:{prepare}" if prepare else "",
            proven_on=_NOWHERE,
            properties=frozenset({"opaque"}),
            confirm=f"{products}:confirm",
        )
        for op, architectures, dims, prepare in rows
    ]


def _of_the_hub() -> list[Record]:
    activations = ("silu_and_mul", "gelu_and_mul", "gelu", "quick_gelu")
    wide = {"hidden_size": Dim(at_least=8, at_most=8192, multiple_of=8)}
    rows = [
        *((op, "activation", {}) for op in activations),
        *((op, "layer_norm", wide) for op in ("rms_norm", "layer_norm")),
    ]
    return [
        Kernel(
            op,
            f"{op}_hub",
            f"interposer_cuda._hub.kernels:{op}",
            "cuda",
            Requires(dtypes=_FLOATS, dims=dims),
            f"interposer_cuda._hub.cache:judge_{repository}",
            proven_on=_NOWHERE,
            properties=frozenset({"opaque"}),
            confirm=f"interposer_cuda._hub.kernels:confirm_{repository}",
        )
        for op, repository, dims in rows
    ]


def _attention() -> list[Record]:
    """Return the attention backends besides ``paged``."""
    # What the gathered ones read of the cache they copy first: kernels that need not go before.
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
            proven_on=_NOWHERE,
        ),
        AttentionEntry(
            "flash_attention_2_gathered",
            "interposer_cuda._flash_attention.version_2:FlashAttention2GatheredBackend",
            "cuda",
            Requires(_ASYNC, dtypes=_NARROW),
            score=-0.8,
            proven_on=_NOWHERE,
        ),
        AttentionEntry(
            "flash_attention_3",
            "interposer_cuda._flash_attention.version_3:FlashAttention3Backend",
            "cuda",
            Requires(architectures=frozenset({"sm_90"}), dtypes=_NARROW),
            properties=safe,
            proven_on=_NOWHERE,
        ),
        AttentionEntry(
            "flashinfer",
            "interposer_cuda._flashinfer.attention:FlashInferBackend",
            "cuda",
            Requires(frozenset({"tensor_cores_2"}), dtypes=_NARROW),
            properties=safe,
            proven_on=_NOWHERE,
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
            proven_on=_NOWHERE,
        ),
    ]
