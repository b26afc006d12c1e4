"""The subcommand ``interposer quantize``.

What is heavy is imported inside the command, so that ``--help`` answers at once.
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
    from interposer_models._quantizing.quantizer import Quantized
    from interposer_models._quantizing.rounded_layers import Progress


def quantize(
    model_dir: Annotated[Path, typer.Argument(help="A Hugging Face model directory, or a name.")],
    out_dir: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    scheme: Annotated[str, typer.Option(help="fp8, int8, int4, w4a8, mxfp8, mxfp4 or nvfp4.")],
    group_size: Annotated[
        int | None, typer.Option(help="Inputs that share a scale: of int4, w4a8; by default 128.")
    ] = None,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="int4, w4a8 with a zero point for each group.")
    ] = False,
    activations: Annotated[
        str | None,
        typer.Option(
            metavar="int8|none", help="Of int8 and int4: whether inputs are rounded, too."
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Leave linear layers plain: a full name, or re:PATTERN. May be repeated.",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Round by GPTQ, on a text such as the model is used for."
        ),
    ] = None,
    act_order: Annotated[
        bool, typer.Option(help="With --calibrate, round the columns of large inputs first.")
    ] = True,
    restart: Annotated[
        bool, typer.Option("--restart", help="Drop what an interrupted run has done.")
    ] = False,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
    as_json: AsJson = False,
) -> None:
    """Write a quantized copy of a model, as the compressed-tensors library stores it."""
    from interposer_models._quantizing.quantizer import quantize as write

    with _progress() as progress:
        done = write(
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
    print(json.dumps(_facts(done), indent=2) if as_json else _summary(done))


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show a bar on a terminal for each activity."""
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

        def advance(activity: str, done: int, total: int) -> None:
            if activity not in tasks:
                tasks[activity] = bar.add_task(activity, total=total)
            bar.update(tasks[activity], completed=done, total=total)

        yield advance


def _facts(done: Quantized) -> dict[str, object]:
    return {
        "version": 1,
        "path": str(done.path),
        "scheme": done.scheme,
        "layers": done.num_layers,
        "plain_layers": done.num_plain,
        "bytes_before": done.bytes_before,
        "bytes_after": done.bytes_after,
        "seconds": done.seconds,
        "resumed": done.resumed,
    }


def _summary(done: Quantized) -> str:
    plain = f", {done.num_plain} left plain" if done.num_plain else ""
    resumed = ", going on from an interrupted run" if done.resumed else ""
    return (
        f"{done.path}: {done.num_layers} linear layers in {done.scheme}{plain}, "
        f"{done.bytes_before / 1e6:.1f} MB to {done.bytes_after / 1e6:.1f} MB "
        f"in {done.seconds:.1f} s{resumed}"
    )
