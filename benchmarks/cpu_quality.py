"""Measure the quality cost of the CPU platform's formats, in bits per byte of held-out text.

python benchmarks/cpu_quality.py [--every N] [--only LABEL ...]

Prints a Markdown table, row by row: the model as it is loaded and run on a CPU, with the kernels
selected there, compared with the same weights in float32. In contrast, `quality.py` measures the
loss of stored schemes when everything else is float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quality import MODEL, arguments_and_files, measured


@dataclass(frozen=True)
class Row:
    """A way to run the model, and its largest acceptable cost in percent."""

    label: str
    goal: float
    options: dict[str, Any] = field(default_factory=dict)


def quantized(method: str, **options: Any) -> dict[str, Any]:
    return {"quantization": {"quant_method": method, **options}}


# down_proj has 688 inputs, which are not divisible by groups of 32 or 128.
DOWN_PLAIN = ["model.layers.*.mlp.down_proj"]

# As by default, the lm_head has 8 bits and inputs are unquantized, unless stated otherwise.
ROWS = (
    Row("bfloat16", 0.1),
    Row("int8", 0.3, quantized("int8")),
    Row("int8, inputs of the head too", 0.3, quantized("int8", head_activations="int8")),
    Row("int8, head plain", 0.3, quantized("int8", head="plain")),
    Row("int4 in groups of 16", 2.5, quantized("int4", group_size=16)),
    Row("int4 in groups of 16, head too", 2.5, quantized("int4", group_size=16, head="int4")),
    Row(
        "int4 in groups of 32, down_proj plain",
        2.5,
        quantized("int4", group_size=32, modules_to_not_convert=DOWN_PLAIN),
    ),
    Row(
        "int4 in groups of 128 with zero points, down_proj plain",
        2.5,
        quantized("int4", group_size=128, asymmetric=True, modules_to_not_convert=DOWN_PLAIN),
    ),
    Row("w4a8 in groups of 16", 2.5, quantized("w4a8", group_size=16)),
    Row(
        "w4a8 in groups of 16, head and its inputs too",
        2.5,
        quantized("w4a8", group_size=16, head="int4", head_activations="int8"),
    ),
    Row(
        "w4a8 in groups of 32, down_proj plain",
        2.5,
        quantized("w4a8", group_size=32, modules_to_not_convert=DOWN_PLAIN),
    ),
    Row(
        "w4a8 in groups of 32, down_proj plain, head and its inputs too",
        2.5,
        quantized(
            "w4a8",
            group_size=32,
            modules_to_not_convert=DOWN_PLAIN,
            head="int4",
            head_activations="int8",
        ),
    ),
)


def main() -> None:
    arguments, files = arguments_and_files(__doc__)
    size = sum(path.stat().st_size for path in files)
    exact = measured(MODEL, files)
    print(f"{len(files)} held-out files, {size} bytes; in float32: {exact:.4f} bits per byte\n")
    print("| bfloat16 with | bits per byte | loss | goal |")
    print("|---|---|---|---|", flush=True)
    for row in ROWS:
        if arguments.only and row.label not in arguments.only:
            continue
        bits = measured(MODEL, files, "bfloat16", **row.options)
        print(f"| {row.label} | {bits:.4f} | {bits / exact - 1:+.3%} | {row.goal} % |", flush=True)


if __name__ == "__main__":
    main()
