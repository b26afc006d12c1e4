"""Golden results of whole decoder blocks, computed in float64, for the kernel tests without torch.

Wherever a block rounds, a sum in another order can round the other way; with quantized values, by
a whole step. The effect on the results is estimated by trial: the bound is the effect of noise of
the size of the roundings.

Dimensions: T tokens, H hidden size, N heads, K kv heads, D head size, I intermediate size, B
sequences, O outputs, F inputs, G groups, P past tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from interposer_ops.quantizers import (
    decode_e2m1,
    quantize_fp8_blocks,
    quantize_fp8_per_token,
    quantize_fp8_static,
    quantize_int8_per_token,
    quantize_int8_static,
    quantize_mxfp8,
    unpack_nibbles,
)

__all__ = ["Block", "blocks"]

HIDDEN, INNER, HEADS, KV_HEADS, SIZE, GROUP, EPS, SCALE = 64, 96, 6, 2, 32, 32, 1e-6, 0.2
E4M3 = torch.float8_e4m3fn
# Draws of noise, and how many of its deviations a result may be away: of several thousand results
# that are distributed normally, one in a billion times one is farther.
_DRAWS, _DEVIATIONS = 24, 8.0
# Sums of about a hundred terms in float32, relative to the largest numbers of a row.
_SUM_ERROR = 2.0**-22
_MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
_SIZES = {
    "heads": ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN),
    "output": (HIDDEN, HEADS * SIZE),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
# Format of weights, quantization of inputs, dtypes.
_FORMS = (
    ("float32", "none", (torch.float32,)),
    ("bfloat16", "none", (torch.bfloat16,)),
    ("int4", "none", (torch.float32, torch.bfloat16, torch.float16)),
    ("int8", "none", (torch.bfloat16,)),
    ("e2m1", "none", (torch.bfloat16,)),
    ("int8", "int8", (torch.bfloat16, torch.float16)),
    ("int8", "int8 static", (torch.bfloat16,)),
    ("int4", "int8", (torch.bfloat16,)),
    ("e4m3", "e4m3", (torch.bfloat16, torch.float16)),
    ("e4m3", "e4m3 static", (torch.bfloat16,)),
    ("e4m3", "e4m3 blocks", (torch.bfloat16,)),
    ("e4m3", "e4m3 powers", (torch.bfloat16,)),
    ("e4m3", "e4m3 microscaled", (torch.bfloat16, torch.float16)),
)
# Quantizations with scales per block of inputs, and the library's numbers of their power-of-two
# kinds.
_BLOCKWISE = {"blocks": 0, "powers": 1, "microscaled": 2}
# Tokens before and in the step, by sequence, and the rows that matter.
_STEPS: tuple[tuple[tuple[tuple[int, int], ...], list[int] | None], ...] = (
    (((40, 1),), None),
    (((3, 1), (0, 9)), [0, 4, 9]),
)


@dataclass
class Block:
    """A case: arguments as ``native/tests/blocks.cpp`` reads them, and results with bounds.

    Attributes:
        weights: float64 ``[O, F]``, by name.
    """

    label: str
    dtype: torch.dtype
    texts: dict[str, str]
    numbers: dict[str, float]
    arrays: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    results: list[tuple[torch.dtype, torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Rounding:
    """Rounding to nearest; with a generator, noise of half a unit and of sums is added first."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.generator is not None:
            unit = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1 - _MANTISSA[dtype])
            size = unit + _SUM_ERROR * x.abs().amax(-1, keepdim=True)
            noise = torch.rand(x.shape, generator=self.generator, dtype=torch.float64) - 0.5
            x = x + size * noise
        return x.to(dtype).double()


def blocks() -> Iterator[Block]:
    """Yield blocks of every format, with one token and with several sequences."""
    for number, (form, codes, dtypes) in enumerate(_FORMS):
        for dtype in dtypes:
            for lengths, chosen in _STEPS:
                block = _drawn(form, codes, dtype, lengths, chosen, number)
                nearest = _computed(block, Rounding(None))
                draws = [
                    _computed(block, Rounding(torch.Generator().manual_seed(draw)))
                    for draw in range(_DRAWS)
                ]
                for place, kept in enumerate((dtype, torch.float32)):
                    apart = torch.stack([draw[place] - nearest[place] for draw in draws])
                    deviation = apart.square().mean((0, 2), keepdim=True).squeeze(0).sqrt()
                    bound = (_DEVIATIONS * deviation).expand_as(nearest[place])
                    block.results.append((kept, nearest[place], bound))
                yield block


def _drawn(
    form: str,
    codes: str,
    dtype: torch.dtype,
    lengths: tuple[tuple[int, int], ...],
    chosen: list[int] | None,
    seed: int,
) -> Block:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    counts = torch.tensor([count for _, count in lengths])
    num_tokens, past = int(counts.sum()), sum(before for before, _ in lengths)
    positions = torch.cat([torch.arange(before, before + n) for before, n in lengths])
    angles = positions.unsqueeze(1) * 0.5 ** torch.arange(SIZE // 2)
    arrays = {
        "x": normal(num_tokens, HIDDEN).to(dtype),
        "residual": normal(num_tokens, HIDDEN),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "before": torch.tensor([before for before, _ in lengths]),
        "query_starts": torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
        "past_key": normal(past, KV_HEADS, SIZE).to(dtype),
        "past_value": normal(past, KV_HEADS, SIZE).to(dtype),
    }
    for name, size in (("input", HIDDEN), ("query", SIZE), ("key", SIZE), ("post", HIDDEN)):
        arrays[f"{name}_norm"] = (1 + 0.2 * normal(size)).to(dtype)
    if chosen is not None:
        arrays["chosen"] = torch.tensor(chosen)
    kind, _, way = codes.partition(" ")
    if way == "static":
        # Small enough for some numbers to saturate.
        arrays["input_scale"] = torch.tensor([3.0 / (127 if kind == "int8" else 448)])
    group = GROUP if way in _BLOCKWISE else 0
    weights = {}
    for name, shape in _SIZES.items():
        parts, weights[name] = _weight(form, shape, group or codes == "none", generator)
        if way == "microscaled":
            parts, weights[name] = _microscaled(parts, weights[name])
        arrays |= {name + suffix: part for suffix, part in parts.items()}
    numbers = {
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_size": SIZE,
        "scale": SCALE,
        "eps": EPS,
        "group": group,
        "powers": _BLOCKWISE.get(way, 0),
    }
    kept = str(dtype).removeprefix("torch.")
    label = f"{form} weights, {codes} inputs, {kept}, {num_tokens} tokens"
    return Block(label, dtype, {"format": form, "codes": kind}, numbers, arrays, weights)


def _weight(
    form: str, shape: tuple[int, int], in_groups: object, generator: torch.Generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Draw a packed weight as arrays by suffix of their names, and its represented numbers."""
    outputs, inputs = shape
    if form in ("float32", "bfloat16"):
        plain = 0.1 * torch.randn(shape, generator=generator)
        weight = plain.to(getattr(torch, form))
        return {"": weight}, weight.double()
    groups = inputs // GROUP if in_groups or form == "int4" else 1
    scales = 0.5 + torch.rand(outputs, groups, generator=generator)
    if form == "int8":
        weight = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
        elements, scales = weight.double(), 0.002 * scales
    elif form == "e4m3":
        weight = (4 * torch.randn(shape, generator=generator)).to(E4M3)
        elements, scales = weight.double(), 0.03 * scales
    else:
        packed = (outputs, inputs // 2)
        weight = torch.randint(0, 256, packed, generator=generator, dtype=torch.uint8)
        elements = unpack_nibbles(weight).double() - 8
        scales = 0.02 * scales
        if form == "e2m1":
            elements = decode_e2m1(unpack_nibbles(weight), torch.float64)
            exponents = torch.randint(121, 124, scales.shape, generator=generator)
            whole = elements.unflatten(1, (groups, -1)) * 2.0 ** (exponents - 127).unsqueeze(-1)
            return {"": weight, "_scales": exponents.to(torch.uint8)}, whole.flatten(1)
    whole = elements.unflatten(1, (groups, -1)) * scales.double().unsqueeze(-1)
    return {"": weight, "_scales": scales}, whole.flatten(1)


def _microscaled(
    parts: dict[str, torch.Tensor], weight: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Round the scales to powers of two, stored as exponents plus 127."""
    exponents = parts["_scales"].log2().round()
    groups = weight.unflatten(1, (exponents.shape[1], -1))
    factors = 2.0 ** exponents.double() / parts["_scales"].double()
    scaled = (groups * factors.unsqueeze(-1)).flatten(1)
    return {**parts, "_scales": (exponents + 127).to(torch.uint8)}, scaled


def _computed(block: Block, rounded: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the block's output and residual, of the requested rows."""
    held, dtype = block.arrays, block.dtype
    stream = rounded(held["x"].double() + held["residual"].double(), torch.float32)
    x = rounded(_norm(stream, held["input_norm"]), dtype)
    x = rounded(_product(block, "heads", x), dtype).unflatten(1, (-1, SIZE))
    query, key, value = x.split((HEADS, KV_HEADS, KV_HEADS), 1)
    query = rounded(_turned(_norm(query, held["query_norm"]), held), dtype)
    key = rounded(_turned(_norm(key, held["key_norm"]), held), dtype)
    x = rounded(_attended(held, query, key, value, rounded, dtype), dtype)
    if "chosen" in held:
        x, stream = x[held["chosen"]], stream[held["chosen"]]
    x = rounded(_product(block, "output", x), dtype)
    total = rounded(stream + x, torch.float32)
    x = rounded(_norm(total, held["post_norm"]), dtype)
    gate, up = rounded(_product(block, "gate_up", x), torch.float32).chunk(2, -1)
    x = rounded(functional.silu(gate) * up, dtype)
    return rounded(_product(block, "down", x), dtype), total


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def _turned(x: torch.Tensor, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
    cos, sin = (held[name].double().unsqueeze(1) for name in ("cos", "sin"))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _attended(
    held: Mapping[str, torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rounded: Rounding,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute attention ``[T, N * D]``; softmax weights can be rounded to the dtype first."""
    outputs, past = [], 0
    starts = held["query_starts"].tolist()
    for row, before in enumerate(held["before"].tolist()):
        own = slice(starts[row], starts[row + 1])
        keys = torch.cat((held["past_key"][past : past + before].double(), key[own]))
        values = torch.cat((held["past_value"][past : past + before].double(), value[own]))
        past += before
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
        scores = SCALE * torch.einsum("tnd,snd->nts", query[own], keys)
        count = own.stop - own.start
        later = torch.ones(count, before + count, dtype=torch.bool).triu(before + 1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        if rounded.generator is not None:
            weights = rounded(weights, dtype)
        outputs.append(torch.einsum("nts,snd->tnd", weights, values).flatten(1))
    return torch.cat(outputs)


def _product(block: Block, name: str, x: torch.Tensor) -> torch.Tensor:
    return _represented(block, x) @ block.weights[name].T


def _represented(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize ``x``."""
    kind, scale = block.texts["codes"], block.arrays.get("input_scale")
    given: Any = x.to(block.dtype)
    if kind == "none":
        return x
    if scale is not None:
        if kind == "int8":
            return quantize_int8_static(given, scale, None).double() * scale.double()
        return quantize_fp8_static(given, scale, E4M3).double() * scale.double()
    if block.numbers["group"]:
        if block.numbers["powers"] == _BLOCKWISE["microscaled"]:
            codes, exponents = quantize_mxfp8(given)
            return codes.double() * 2.0 ** (exponents.double() - 127).repeat_interleave(GROUP, -1)
        codes, scales = quantize_fp8_blocks(given, GROUP, E4M3, bool(block.numbers["powers"]))
        return codes.double() * scales.double().repeat_interleave(GROUP, -1)
    if kind == "int8":
        codes, scales = quantize_int8_per_token(given)
    else:
        codes, scales = quantize_fp8_per_token(given, E4M3, None)
    return codes.double() * scales.double()
