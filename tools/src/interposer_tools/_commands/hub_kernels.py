"""The subcommand ``interposer hub-kernels``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# What others have loaded may be called for years, so this is a list: an op is published on purpose.
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
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the repository is written.")],
    op: Annotated[
        list[str] | None, typer.Option("--op", help="Only these ops, each by --op NAME.")
    ] = None,
    provider: Annotated[
        str, typer.Option("--from", metavar="DIST", help="Whose ops and Triton kernels are taken.")
    ] = "interposer-ops",
    name: Annotated[str, typer.Option(help="The name of the repository.")] = "interposer-kernels",
) -> None:
    """Write kernels as a repository of Hugging Face's hub of kernels."""
    from interposer import current_registry
    from interposer_tools._hub.repository import HubRepository

    repository = HubRepository(current_registry(), provider, op or _PUBLISHED, name)
    builds = repository.write(folder)
    print(f"{folder}: {len(repository.functions)} functions, {len(builds)} builds")
    print(f"Try: kernels.get_local_kernel(pathlib.Path({str(folder)!r}))")
