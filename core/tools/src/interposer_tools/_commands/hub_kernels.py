"""The subcommand ``interposer hub-kernels``, which exports Triton kernels for the kernel hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# An explicit list, because published functions must stay callable for years.
_PUBLISHED = (
    *("rms_norm", "fused_add_rms_norm", "gemma_rms_norm", "fused_add_gemma_rms_norm"),
    *("layer_norm", "gated_rms_norm", "l2_norm", "qk_norm"),
    *("gelu", "quick_gelu", "relu2", "silu_and_mul", "gelu_and_mul", "swiglu_oai_and_mul"),
    *("rotary_embedding", "rotary_embedding_interleaved"),
    *("topk_softmax", "topk_sigmoid", "grouped_topk"),
    *("quantize_int8_per_token", "quantize_int8_static"),
    *("apply_temperature", "logits_softcap", "mask_top_k_top_p", "mask_min_p"),
)


def hub_kernels(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the repository.")],
    op: Annotated[
        list[str] | None, typer.Option("--op", help="Publish only this op. Repeatable.")
    ] = None,
    provider: Annotated[
        str,
        typer.Option("--from", metavar="DIST", help="Distribution of the ops and Triton kernels."),
    ] = "interposer-ops",
    name: Annotated[str, typer.Option(help="Name of the repository.")] = "interposer-kernels",
) -> None:
    """Write Triton kernels as a repository for Hugging Face's kernel hub."""
    from interposer import current_registry
    from interposer_tools._hub.repository import HubRepository

    repository = HubRepository(current_registry(), provider, op or _PUBLISHED, name)
    builds = repository.write(folder)
    print(f"{folder}: {len(repository.functions)} functions, {len(builds)} builds")
    print(f"Try: kernels.get_local_kernel(pathlib.Path({str(folder)!r}))")
