"""The subcommand ``interposer explain``, which shows the choices for a model with reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from interposer.errors import ConfigError
from interposer_tools.options import (
    AsJson,
    Dtype,
    ExpertParallel,
    Kernels,
    Locked,
    PlatformName,
    Quantization,
    TensorParallel,
    policy,
    print_facts,
)


def explain(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="Model directory, or name on the hub. Without a model, explain lists everything "
            "that a model can request.",
        ),
    ] = None,
    why: Annotated[
        str | None,
        typer.Option(
            "--why",
            metavar="NAME",
            help="Show one op, layer id, attention type, scheme or architecture in full.",
        ),
    ] = None,
    all_candidates: Annotated[
        bool, typer.Option("--all", help="List also the candidates that are not used, and why.")
    ] = False,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="NAME_OR_FILE",
            help="Explain for a described device, such as h100, instead of this machine.",
        ),
    ] = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    tensor_parallel: TensorParallel = 1,
    expert_parallel: ExpertParallel = False,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
    as_json: AsJson = False,
) -> None:
    """Show the kernel, layer or backend that each part of a model would use, and the reason."""
    if on is not None and platform is not None:
        raise ConfigError("--on and --platform both choose the device. Try: only one of the two")
    import interposer
    from interposer_tools._explanation_tables import explanation_tables

    explanation = interposer.explain(
        model,
        on,
        policy(kernel, platform, locked),
        dtype,
        quantization,
        # None for the defaults: planners that do not know a set argument are skipped.
        tensor_parallel if tensor_parallel > 1 else None,
        expert_parallel or None,
    )
    if all_candidates:
        explanation = explanation.all()
    if why is not None:
        explanation = explanation.why(why)
    print_facts(explanation, as_json, explanation_tables if why is None else None)
