"""Writes the choices and their reasons for the shipped model, on every described GPU.

    python tests/golden_choices.py interposer-rocm platforms/rocm/tests/golden

The model is taken as it is and quantized in three ways. No other platform takes part, and nothing
that was installed besides.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from interposer import Config, current_registry, explain
from interposer.records import DeviceEntry
from interposer_engine import quantize

MODEL = Path(__file__).parents[1] / "examples/models/stdlib-lm"
STANDARD = ("interposer-models", "interposer-ops", "interposer-quantization")
# Groups of 32 divide the inputs of every layer but the last one of a block.
_WHOLE: dict[str, Any] = {"ignore": ["re:.*down_proj"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "int4": {"group_size": 32, **_WHOLE},
    "mxfp4": _WHOLE,
}
# It differs from machine to machine.
UNTOLD = "  cache_dir = "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("distribution")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    # Where kernels of the hub would lie differs from machine to machine as well.
    os.environ["KERNELS_CACHE"] = "/nowhere"
    os.environ.pop("LOCAL_KERNELS", None)
    write(arguments.distribution, arguments.folder)


def write(distribution: str, folder: Path) -> None:
    """Fill the folder with a file for each device and variant, and with nothing else."""
    config = Config(plugins={distribution, *STANDARD})
    records = current_registry(config).records(DeviceEntry)
    devices = sorted(record.name for _, record in records)
    folder.mkdir(parents=True, exist_ok=True)
    written = set()
    with tempfile.TemporaryDirectory() as temporary:
        for variant in ("plain", *VARIANTS):
            path = MODEL if variant == "plain" else Path(temporary, variant)
            if variant != "plain":
                quantize(MODEL, path, variant, **VARIANTS[variant])
            for device in devices:
                told = str(explain(path, device, config).all()).splitlines()
                file = folder / f"{device}-{variant}.txt"
                kept = [line for line in told if not line.startswith(UNTOLD)]
                file.write_text("\n".join(kept) + "\n", encoding="utf-8")
                written.add(file)
    for stale in {*folder.glob("*.txt")} - written:
        stale.unlink()


if __name__ == "__main__":
    main()
