"""Measure the cost of quantization, in bits per byte of held-out text.

python benchmarks/quality.py [--every N] [--only SCHEME ...]

Prints a Markdown table, row by row. Every model computes in float32, so that what differs is what
the scheme loses. The calibration text is of files that the model was trained on, never of those
that it is measured on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from interposer_engine import load, quantize

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "models" / "stdlib-lm"

sys.path.insert(0, str(ROOT / "examples"))
import stdlib_corpus as corpus  # noqa: E402

# 688 inputs: neither 32 nor 128 divides them.
DOWN_PLAIN = ("re:.*down_proj",)


@dataclass(frozen=True)
class Row:
    """One way to quantize, and what it may cost in percent."""

    label: str
    goal: float
    options: dict[str, Any] = field(default_factory=dict)
    calibrated: bool = False

    @property
    def layers(self) -> str:
        return "all but down_proj" if "ignore" in self.options else "all"


ROWS = (
    Row("fp8", 0.5, {"scheme": "fp8"}),
    Row("int8", 0.5, {"scheme": "int8"}),
    Row("int8, weights only", 0.5, {"scheme": "int8", "activations": "none"}),
    Row("mxfp8", 1.0, {"scheme": "mxfp8", "ignore": DOWN_PLAIN}),
    Row("int4, groups of 128", 2.0, {"scheme": "int4", "ignore": DOWN_PLAIN}),
    Row("int4, groups of 128", 2.0, {"scheme": "int4", "ignore": DOWN_PLAIN}, calibrated=True),
    Row("int4, groups of 16", 2.0, {"scheme": "int4", "group_size": 16}),
    Row("int4, groups of 16", 2.0, {"scheme": "int4", "group_size": 16}, calibrated=True),
    Row("w4a8, groups of 128", 2.5, {"scheme": "w4a8", "ignore": DOWN_PLAIN}, calibrated=True),
    Row("w4a8, groups of 32", 2.5, {"scheme": "w4a8", "group_size": 32, "ignore": DOWN_PLAIN}),
    Row(
        "w4a8, groups of 32",
        2.5,
        {"scheme": "w4a8", "group_size": 32, "ignore": DOWN_PLAIN},
        calibrated=True,
    ),
    Row("nvfp4", 3.0, {"scheme": "nvfp4"}),
    Row("nvfp4", 3.0, {"scheme": "nvfp4"}, calibrated=True),
    Row("mxfp4", 6.0, {"scheme": "mxfp4", "ignore": DOWN_PLAIN}),
    Row("mxfp4", 6.0, {"scheme": "mxfp4", "ignore": DOWN_PLAIN}, calibrated=True),
)


def measured(path: Path, files: list[Path], dtype: str = "float32", **options: Any) -> float:
    """Return the bits per byte that a model needs for the files, loaded with ``options``."""
    lm = load(path, dtype=dtype, max_sequences=1, **options)

    def encode(text: str) -> list[int]:
        # The tokenizer puts the end-of-text token in front, which the measure adds itself.
        return lm.tokenizer.encode(text)[1:]

    return corpus.bits_per_byte(lm.logits, encode, 0, files)


def arguments_and_files(description: str | None) -> tuple[argparse.Namespace, list[Path]]:
    """Return the arguments of the command line and the files to measure; set the thread count."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--every", type=int, default=1, help="take every Nth held-out file")
    parser.add_argument("--only", nargs="*", help="rows by name; all by default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return arguments, corpus.held_out_files()[:: arguments.every]


def main() -> None:
    arguments, files = arguments_and_files(__doc__)
    size = sum(path.stat().st_size for path in files)
    plain = measured(MODEL, files)
    print(f"{len(files)} held-out files, {size} bytes; as shipped: {plain:.4f} bits per byte\n")
    print("| scheme | layers | rounded | MB | bits per byte | loss | goal |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "calibration.txt")
        trained_on = corpus.training_files()[::64]
        text.write_text("".join(map(corpus.read_text, trained_on)), encoding="utf-8")
        for number, row in enumerate(ROWS):
            if arguments.only and row.options["scheme"] not in arguments.only:
                continue
            target = Path(folder, str(number))
            calibrate = text if row.calibrated else None
            done = quantize(MODEL, target, calibrate=calibrate, **row.options)
            bits = measured(target, files)
            how = "by calibration" if row.calibrated else "to nearest"
            print(
                f"| {row.label} | {row.layers} | {how} | {done.bytes_after / 1e6:.1f} "
                f"| {bits:.4f} | {bits / plain - 1:+.2%} | {row.goal:.1f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()
