"""The subcommand ``interposer pack``.

What is heavy is imported inside the command, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from interposer_tools.options import (
    AsJson,
    Dtype,
    Kernels,
    Locked,
    PlatformName,
    Quantization,
    policy,
)


def pack(
    model_dir: Annotated[Path, typer.Argument(help="A model directory, a name, or a file.")],
    output: Annotated[
        Path | None, typer.Option(help="The folder to write to; by default beside the model.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Read the files that are there, and write none.")
    ] = False,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
    as_json: AsJson = False,
) -> None:
    """Write a model's weights as kernels here take them, to be mapped by whoever loads it."""
    from interposer_models._packed.packing import check_packed
    from interposer_models._packed.packing import pack as write

    config = policy(kernel, platform, locked)
    if check:
        found = check_packed(model_dir, output, config)
        if as_json:
            files = {str(path): fault for path, fault in found.items()}
            print(json.dumps({"version": 1, "files": files}, indent=2))
        else:
            print("\n".join(f"{path}: {fault or 'sound'}" for path, fault in found.items()))
        if any(found.values()):
            raise typer.Exit(1)
        return
    done = write(model_dir, output, dtype, config=config, quantization=quantization)
    if as_json:
        facts = {"version": 1, "path": str(done.path), "bytes": done.num_bytes}
        print(json.dumps({**facts, "seconds": done.seconds}, indent=2))
    else:
        print(f"{done.path}: {done.num_bytes / 1e6:.1f} MB in {done.seconds:.1f} s")
