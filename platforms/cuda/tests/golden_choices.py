"""Writes what is chosen for the shipped model on every described GPU, and why.

    python platforms/cuda/tests/golden_choices.py platforms/cuda/tests/golden

The model is taken as it is and quantized in three ways. Only the plugins of this repository that
every user of a GPU has take part, so that what else is installed changes nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from interposer import Config, explain
from interposer.records import DeviceEntry
from interposer_cuda.plugin import interposer_records
from interposer_models.quantizing.quantizer import quantize

MODEL = Path(__file__).parents[3] / "examples/models/stdlib-lm"
# Groups of 16 divide the inputs of every layer, those of 32 not of the last one of a block.
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": {},
    "int4": {"group_size": 16},
    "mxfp4": {"ignore": ["re:.*down_proj"]},
}
PARTS = ("cuda", "models", "ops", "quantization")
CONFIG = Config(plugins={f"interposer-{part}" for part in PARTS})
DEVICES = sorted(record.name for record in interposer_records() if isinstance(record, DeviceEntry))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)


def write(folder: Path) -> None:
    """Write a file for each device and variant, and remove what else is in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.txt"):
        stale.unlink()
    with tempfile.TemporaryDirectory() as temporary:
        variants = {"plain": MODEL}
        for scheme, options in SCHEMES.items():
            variants[scheme] = Path(temporary, scheme)
            quantize(MODEL, variants[scheme], scheme, **options)
        for device in DEVICES:
            for variant, path in variants.items():
                # Where verdicts are kept is told as well, and differs from machine to machine.
                lines = str(explain(path, device, CONFIG)).splitlines(keepends=True)
                kept = [line for line in lines if not line.startswith("  cache_dir = ")]
                text = "".join(kept) + "\n"
                (folder / f"{device}-{variant}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
