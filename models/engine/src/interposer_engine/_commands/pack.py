"""The subcommand ``interposer pack``, which writes packed weights of a model.

Heavy modules are imported inside the command, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from interposer_engine.options import Values, load_options, takes
from interposer_tools.options import AsJson, Kernels, Locked, PlatformName, policy


@takes(options=load_options(only=("dtype", "quantization")))
def pack(
    model_dir: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Model directory, name on the hub, or file of a plugin's format, such as GGUF.",
        ),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the packed file; the default is next to the model."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Verify existing packed files; write nothing.")
    ] = False,
    options: Values,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
    as_json: AsJson = False,
) -> None:
    """Write a model's weights in the packed form of this machine's kernels, for fast loading."""
    from interposer_engine._packed.packing import check_packed
    from interposer_engine._packed.packing import pack as write

    config = policy(kernel, platform, locked)
    if check:
        faults_by_path = check_packed(model_dir, output, config)
        if as_json:
            files = {str(path): fault for path, fault in faults_by_path.items()}
            print(json.dumps({"version": 1, "files": files}, indent=2))
        elif faults_by_path:
            print(
                "\n".join(f"{path}: {fault or 'sound'}" for path, fault in faults_by_path.items())
            )
        else:
            print(f"{model_dir} has no packed file{f' in {output}' if output else ''}.")
        # A script must notice damaged files.
        if any(faults_by_path.values()):
            raise typer.Exit(1)
        return
    packed = write(model_dir, output, config=config, **options)
    if as_json:
        facts = {"version": 1, "path": str(packed.path), "bytes": packed.num_bytes}
        print(json.dumps({**facts, "seconds": packed.seconds}, indent=2))
    else:
        print(f"{packed.path}: {packed.num_bytes / 1e6:.1f} MB in {packed.seconds:.1f} s")
