"""Writes what is chosen for the shipped model on every described GPU of Intel, and why.

    python platforms/xpu/tests/golden_choices.py platforms/xpu/tests/golden

Triton counts as there, vllm-xpu-kernels does not: neither is asked what it can do on a machine
without such a GPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from interposer import Config, explain
from interposer.records import DeviceEntry
from interposer_models.quantizing.quantizer import quantize
from interposer_xpu.plugin import interposer_records

MODEL = Path(__file__).parents[3] / "examples/models/stdlib-lm"
# Of the last layer of a block only groups of 16 divide the inputs, for which neither oneDNN nor
# blocks of 32 serve: it stays as it is.
LAST: dict[str, Any] = {"ignore": ["re:.*down_proj"]}
SCHEMES: dict[str, dict[str, Any]] = {"fp8": {}, "int4": {"group_size": 32, **LAST}, "mxfp4": LAST}
CONFIG = Config(plugins={f"interposer-{part}" for part in ("models", "ops", "quantization", "xpu")})


@contextmanager
def variants() -> Iterator[dict[str, Path]]:
    """Yield the model by what was done to it."""
    with tempfile.TemporaryDirectory() as folder:
        for scheme, options in SCHEMES.items():
            quantize(MODEL, Path(folder, scheme), scheme, **options)
        yield {"plain": MODEL, **{scheme: Path(folder, scheme) for scheme in SCHEMES}}


def choices(model: Path, device: str) -> str:
    """Return the explanation, without where this machine keeps its verdicts."""
    lines = str(explain(model, device, CONFIG)).splitlines()
    return "\n".join(line for line in lines if not line.startswith("  cache_dir = ")) + "\n"


def main(target: Path) -> None:
    """Write a file for each device and variant; other texts in the folder go."""
    names = sorted(r.name for r in interposer_records() if isinstance(r, DeviceEntry))
    with variants() as models:
        texts = {
            f"{n}-{kind}.txt": choices(path, n) for n in names for kind, path in models.items()
        }
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.txt"):
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        target.joinpath(name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
