"""The subcommand ``interposer quantize``, which writes a quantized copy of a model.

Heavy modules are imported inside the command, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interposer_tools.options import AsJson, Kernels, Locked, PlatformName, policy

if TYPE_CHECKING:
    from interposer_engine._quantize.quantizer import Quantized
    from interposer_engine._quantize.rounding import Progress


def quantize(
    model_dir: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Model directory, or name on the hub.")
    ],
    out_dir: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to create for the quantized model.")
    ],
    scheme: Annotated[str, typer.Option(help="fp8, int8, int4, w4a8, mxfp8, mxfp4 or nvfp4.")],
    group_size: Annotated[
        int | None,
        typer.Option(
            help="int4, w4a8: inputs that share a scale; default: the first of 128, 64, 32 and 16 "
            "that divides the inputs of all layers."
        ),
    ] = None,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="int4, w4a8: store a zero point per group.")
    ] = False,
    activations: Annotated[
        str | None,
        typer.Option(metavar="int8|none", help="int8, int4: whether to quantize inputs, too."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Do not quantize these linear layers: a full name, or re:PATTERN. Repeatable.",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Round by GPTQ, calibrated on this text; use a typical input."
        ),
    ] = None,
    act_order: Annotated[
        bool, typer.Option(help="With --calibrate: round columns with the largest inputs first.")
    ] = True,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard the work of an interrupted run.")
    ] = False,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
    as_json: AsJson = False,
) -> None:
    """Write a quantized copy of a model in the format of the compressed-tensors library."""
    from interposer_engine._quantize.quantizer import quantize as write

    with _progress() as progress:
        result = write(
            model_dir,
            out_dir,
            scheme,
            group_size=group_size,
            asymmetric=asymmetric,
            activations=activations,
            ignore=ignore or (),
            calibrate=calibrate,
            act_order=act_order,
            restart=restart,
            config=policy(kernel, platform, locked),
            progress=progress,
        )
    print(json.dumps(_facts(result), indent=2) if as_json else _summary(result))


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show a progress bar per activity, if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        tasks = {}

        def advance(activity: str, num_done: int, total: int) -> None:
            if activity not in tasks:
                tasks[activity] = bar.add_task(activity, total=total)
            bar.update(tasks[activity], completed=num_done, total=total)

        yield advance


def _facts(result: Quantized) -> dict[str, object]:
    groups = {} if result.group_size is None else {"group_size": result.group_size}
    return {
        "version": 1,
        "path": str(result.path),
        "scheme": result.scheme,
        **groups,
        "layers": result.num_layers,
        "plain_layers": result.num_plain,
        "bytes_before": result.bytes_before,
        "bytes_after": result.bytes_after,
        "seconds": result.seconds,
        "resumed": result.resumed,
    }


def _summary(result: Quantized) -> str:
    groups = "" if result.group_size is None else f" with groups of {result.group_size}"
    plain = f", {result.num_plain} left plain" if result.num_plain else ""
    resumed = ", going on from an interrupted run" if result.resumed else ""
    return (
        f"{result.path}: {result.num_layers} linear layers in {result.scheme}{groups}{plain}, "
        f"{result.bytes_before / 1e6:.1f} MB to {result.bytes_after / 1e6:.1f} MB "
        f"in {result.seconds:.1f} s{resumed}"
    )
