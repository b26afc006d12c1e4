"""Decoder blocks in one call of the compiled library, compared with the calls of their parts.

Dimensions: T tokens, H hidden size, I intermediate size, O output features, F input features.
"""

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from platforms.cpu.tests.block_checks import assert_same, counted
from torch import nn

import interposer_cpu
from interposer import (
    AttentionBatch,
    AttentionSpec,
    Config,
    PluggableLayer,
    Resolver,
    Site,
    current_registry,
    place,
)
from interposer_cpu import native
from interposer_cpu._kernels import linear as native_linear
from interposer_cpu._kernels import lora, quantizers
from interposer_cpu._kernels.attention import NativeBackend
from interposer_cpu._kernels.decoder_block import NativeDecoderBlock
from interposer_cpu._kernels.fusion import is_fused, quantization_fields
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.quantized_linear import CodedProduct, StaticProduct

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

HIDDEN, INNER, EPS = 64, 96, 1e-6
SPEC = AttentionSpec(
    num_heads=6,
    num_kv_heads=2,
    head_size=32,
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    page_size=16,
    scale=0.2,
)
# What other distributions may replace too, and the layers that are not under test.
KERNELS = {"rms_norm": "rms_norm_native", "fused_add_rms_norm": "fused_add_rms_norm_native"}
LAYERS = {"rms_norm": "standard"}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@dataclass(frozen=True)
class Form:
    """The parts of a block."""

    dtype: torch.dtype = torch.bfloat16
    qk_norm: bool = True
    bias: bool = False
    rotary_size: int = 32
    cache_dtype: torch.dtype | None = None
    sinks: bool = False
    window: int | None = None
    activation: str = "silu"

    @property
    def spec(self) -> AttentionSpec:
        stored = self.cache_dtype or self.dtype
        return replace(
            SPEC,
            dtype=self.dtype,
            cache_dtype=stored,
            sinks=self.sinks,
            window_tokens=self.window,
        )


class Doubling(nn.Module):
    """A stand-in for an MoE layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def built(
    form: Form,
    name: str = "native",
    kernels: dict[str, str] | None = None,
    mlp: Callable[[Site], nn.Module] | None = None,
) -> Any:
    """Build a block; its weights are the same for every implementation."""
    layers = {**LAYERS, "decoder_block": name}
    if name == "standard":
        layers |= {"self_attention": "native", "gated_mlp": "native"}
    config = Config(
        layers=layers,
        kernels={**KERNELS, **(kernels or {})},
        attention={"decoder": "native"},
    )
    site = Site(Resolver(current_registry(), place().device, config), "block", form.dtype)
    block = DecoderBlock(
        site,
        HIDDEN,
        EPS,
        lambda at: SelfAttention(
            at,
            form.spec,
            HIDDEN,
            form.rotary_size,
            EPS if form.qk_norm else None,
            form.bias,
            form.bias,
        ),
        mlp or (lambda at: GatedMLP(at, HIDDEN, INNER, form.activation, form.bias)),
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in block.parameters():
        numbers = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(0.2 * numbers if parameter.ndim > 1 else 1 + 0.2 * numbers)
    for part in block.modules():
        if isinstance(part, PluggableLayer):
            part.finalize()
    return block


class Steps:
    """Runs a block on steps of sequences whose caches begin as the same numbers.

    Args:
        lengths: of each sequence, how many tokens there were before and how many come.
    """

    def __init__(self, form: Form, lengths: tuple[tuple[int, int], ...]) -> None:
        generator = torch.Generator().manual_seed(2)
        pages = [-(-(before + count) // 16) for before, count in lengths]
        table = torch.zeros(len(lengths), max(pages), dtype=torch.int64)
        slots, positions, first = [], [], 1
        for row, (before, count) in enumerate(lengths):
            own = torch.arange(first, first + pages[row])
            table[row, : pages[row]] = own
            first += pages[row]
            at = torch.arange(before, before + count)
            positions.append(at)
            slots.append(own[at // 16] * 16 + at % 16)
        counts = torch.tensor([count for _, count in lengths])
        self.form, self.num_pages = form, first
        self.batch = AttentionBatch(
            query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
            seq_lens=torch.tensor([before + count for before, count in lengths]),
            page_table=table,
            slots=torch.cat(slots),
            max_query_tokens=int(counts.max()),
            max_seq_tokens=max(before + count for before, count in lengths),
        )
        num_tokens = int(counts.sum())
        self.x = torch.randn(num_tokens, HIDDEN, generator=generator).to(form.dtype)
        self.residual = torch.randn(num_tokens, HIDDEN, generator=generator)
        frequencies = 0.5 ** torch.arange(form.rotary_size // 2)
        angles = torch.cat(positions).unsqueeze(1) * frequencies
        self.tables = angles.cos(), angles.sin()

    def run(
        self, block: Any, rows: torch.Tensor | None = None, *, first: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the block's output, the residual and the cache; the arguments are any test's."""
        backend = block.self_attn.attn.backend
        (cache,) = backend.kv_layout().allocate(1, self.num_pages, "cpu")
        generator = torch.Generator().manual_seed(3)
        cache.copy_(torch.randn(cache.shape, generator=generator).to(cache.dtype))
        plan = backend.plan(self.batch)
        residual = None if first else self.residual.clone()
        with torch.inference_mode():
            out, total = block(self.x.clone(), residual, *self.tables, cache, plan, rows)
        return out, total, cache.float()


def both(form: Form) -> tuple[Any, Any]:
    """Build the block in one call, and one that calls the native halves."""
    fused, parts = built(form), built(form, "standard")
    assert type(fused) is NativeDecoderBlock
    assert fused.is_fusable
    assert fused.takes_mlp
    assert type(parts) is DecoderBlock
    assert type(parts.self_attn.attn.backend) is NativeBackend
    return fused, parts


@contextmanager
def undivided(block: Any) -> Iterator[None]:
    """Check that no part of the block computes anything by itself."""
    calls = [counted(block.self_attn), counted(block.mlp), counted(block.input_layernorm)]
    yield
    assert calls == [[], [], []]


STEPS = {
    "decode": ((40, 1),),
    "batch": ((40, 1), (3, 1), (600, 1), (15, 1)),
    "prefill": ((0, 70),),
    "mixed": ((17, 1), (0, 33), (5, 9)),
    "many": ((0, 300),),
}


@pytest.mark.landing(3)
@DTYPES
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("first", [False, True])
def test_a_block_in_one_call_equals_its_parts(
    dtype: torch.dtype, lengths: tuple[tuple[int, int], ...], first: bool
) -> None:
    form = Form(dtype)
    fused, parts = both(form)
    steps = Steps(form, lengths)
    expected = steps.run(parts, first=first)
    with undivided(fused):
        assert_same(steps.run(fused, first=first), expected)


@pytest.mark.landing(2)
@DTYPES
@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": False},
        {"bias": True},
        {"rotary_size": 16},
        {"activation": "gelu_pytorch_tanh"},
        {"sinks": True},
        {"window": 20},
        {"cache_dtype": torch.float8_e4m3fn},
        {"cache_dtype": torch.int8},
    ],
    ids=lambda changes: " ".join(map(str, next(iter(changes.items())))),
)
def test_fused_blocks_support_optional_parts(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    form = replace(Form(dtype), **changes)
    fused, parts = both(form)
    steps = Steps(form, ((40, 1), (0, 25)))
    expected = steps.run(parts)
    with undivided(fused):
        assert_same(steps.run(fused), expected)


@pytest.mark.landing(4)
@DTYPES
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("rows", [[0, 34], [34], [5, 5, 1], list(range(35)), []])
def test_a_fused_block_returns_only_the_requested_rows(
    dtype: torch.dtype, first: bool, rows: list[int]
) -> None:
    form = Form(dtype)
    fused, parts = both(form)
    steps, chosen = Steps(form, ((17, 1), (0, 34))), torch.tensor(rows, dtype=torch.int64)
    expected = steps.run(parts, chosen, first=first)
    with undivided(fused):
        actual = steps.run(fused, chosen, first=first)
    assert actual[0].shape == actual[1].shape == (len(rows), HIDDEN)
    assert_same(actual, expected)


def test_a_fused_block_does_not_change_its_arguments() -> None:
    form = Form(torch.float32)
    block, steps = built(form), Steps(form, ((17, 1), (0, 4)))
    before = steps.x.clone(), steps.residual.clone(), *(table.clone() for table in steps.tables)
    backend = block.self_attn.attn.backend
    (cache,) = backend.kv_layout().allocate(1, steps.num_pages, "cpu")
    plan = backend.plan(steps.batch)
    for residual in (steps.residual, None):
        block(steps.x, residual, *steps.tables, cache, plan, None)
    assert_same((steps.x, steps.residual, *steps.tables), before)


def test_a_fused_block_accepts_an_empty_batch() -> None:
    form = Form()
    fused, parts = both(form)
    steps = Steps(form, ((5, 0),))
    assert_same(steps.run(fused), steps.run(parts))


def hold(linear: Linear, op: str) -> None:
    """Let a layer hold random weights as ``op`` multiplies by them."""
    inputs, outputs = linear.in_features, sum(linear.parts.values())
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    integers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    scales = 0.02 * torch.rand(outputs, inputs // 32)
    exponents = torch.randint(118, 122, (outputs, inputs // 32), dtype=torch.uint8)
    if op in CODED:
        hold_coded(linear, op, codes, integers, scales, exponents)
        return
    if op == "linear":
        packed = native_linear.pack(0.1 * torch.randn(outputs, inputs), None)
    elif op == "w4a16_linear":
        packed = native_linear.pack_w4a16(codes, scales, None)
    elif op == "w8a16_linear":
        packed = native_linear.pack_w8a16(integers, scales / 16, None)
    else:
        packed = native_linear.pack_mxfp4(codes, exponents, None)
    linear.kernel = getattr(native_linear, op)
    linear.operands = (packed["weight"], None) + (() if op == "linear" else (None,))


def hold_coded(
    linear: Linear,
    form: str,
    codes: torch.Tensor,
    integers: torch.Tensor,
    scales: torch.Tensor,
    exponents: torch.Tensor,
) -> None:
    """Give a layer quantized weights and the quantization of its inputs."""
    dtype, outputs = torch.bfloat16, len(integers)
    scale = 0.002 * torch.rand(outputs)
    name, _, kind = form.partition(" ")
    packed: Any
    function: Any
    if name == "w4a8_linear":
        packed = native_linear.pack_w4a8(codes, scales, None, None)["weight"]
    elif name == "int8_linear":
        packed = native_linear.pack_int8(integers, scale, None)["weight"]
    elif name == "fp8_block_linear":
        weight = (integers / 16).to(torch.float8_e4m3fn)
        blocks = 0.03 * torch.rand(outputs // 32, integers.shape[1] // 32)
        packed = native_linear.pack_fp8_blocks(weight, blocks, None)["weight"]
    elif name == "mxfp8_linear":
        weight = (integers / 16).to(torch.float8_e4m3fn)
        packed = native_linear.pack_mxfp8(weight, exponents + 2, None)["weight"]
    else:
        weight = (integers / 16).to(torch.float8_e4m3fn)
        packed = native_linear.pack_fp8(weight, 16 * scale, None)["weight"]

    def multiply(codes: torch.Tensor, scale: torch.Tensor, weight: Any) -> torch.Tensor:
        if name == "w4a8_linear":
            return native_linear.w4a8_linear(codes, weight, scale, None, None, None, None, dtype)
        if name == "int8_linear":
            return native_linear.int8_linear(codes, weight, scale, None, None, None, dtype)
        if name == "fp8_block_linear":
            return native_linear.fp8_block_linear(codes, weight, scale, None, 32, 32, None, dtype)
        if name == "mxfp8_linear":
            if kind == "powers":  # whose scales are floats
                scale = (scale.view(torch.int32) >> 23).to(torch.uint8)
            return native_linear.mxfp8_linear(codes, scale, weight, None, None, dtype)
        return native_linear.fp8_linear(codes, weight, scale, None, None, dtype)

    product = getattr(native_linear, name)
    is_fp8 = name == "fp8_linear"
    if kind == "static":
        # Small enough for some numbers to saturate.
        largest = 3.0 / (448 if is_fp8 else 127)
        quantize = "quantize_fp8_static" if is_fp8 else "quantize_int8_static"
        fixed: tuple[Any, ...] = (torch.float8_e4m3fn,) if is_fp8 else (None,)
        linear.kernel = StaticProduct(getattr(quantizers, quantize), product, multiply, fixed)
        linear.operands = (packed, torch.tensor([largest]))
        return
    options: tuple[Any, ...] = ()
    if form == "mxfp8_linear":
        function = quantizers.quantize_mxfp8
    elif name in ("fp8_block_linear", "mxfp8_linear"):
        function = quantizers.quantize_fp8_blocks
        options = 32, torch.float8_e4m3fn, kind == "powers"
    elif is_fp8:
        limit = 2.0 / 448 if kind == "limited" else None
        function = quantizers.quantize_fp8_per_token
        options = torch.float8_e4m3fn, limit
    else:
        function = quantizers.quantize_int8_per_token
    linear.kernel = CodedProduct(function, product, multiply, options)
    linear.operands = (packed,)


FLOATS = ["linear", "w4a16_linear", "w8a16_linear", "mxfp4_linear"]
CODED = [
    "int8_linear",
    "int8_linear static",
    "w4a8_linear",
    "fp8_linear",
    "fp8_linear limited",
    "fp8_linear static",
    "fp8_block_linear",
    "fp8_block_linear powers",
    "mxfp8_linear",
    "mxfp8_linear powers",
]
OPS = [*FLOATS, *CODED]


@pytest.mark.landing(6)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("lengths", [((40, 1),), ((3, 1), (0, 25))])
def test_fused_blocks_are_correct_in_every_format_at_every_level(
    op: str, level: str, lengths: tuple[tuple[int, int], ...]
) -> None:
    takes_codes = op in CODED
    form = Form(qk_norm=not takes_codes)  # whose rotated heads parts round twice
    fused, parts = both(form)
    torch.manual_seed(4)
    for mine, theirs in zip(fused.modules(), parts.modules(), strict=True):
        if isinstance(mine, Linear):
            hold(mine, op)
            theirs.kernel, theirs.operands = mine.kernel, mine.operands
    # The halves take codes as the block does, so the layers below them are what it is compared to.
    if takes_codes:
        parts.self_attn.is_fusable = parts.mlp.is_fusable = False
    steps = Steps(form, lengths)
    native.force_level(level)
    try:
        expected = steps.run(parts)
        with undivided(fused):
            actual = steps.run(fused)
    finally:
        native.force_level(None)
    assert_same(actual[1:], expected[1:])
    if takes_codes:
        # Gate and up are float32 in one call and bfloat16 between two, which moves some codes of
        # the last product's inputs by one. In int8 that is 1/127 of the largest. In 8-bit floats it
        # is at most 1/8 of the number, and 1/16 of the 96 are as close to a tie as bfloat16 rounds:
        # together a fortieth of what the product's terms add up to, and that a third of the
        # largest of its outputs. So six deviations are a twentieth.
        step = 0.06 if op.startswith(("fp8", "mxfp8")) else 0.02
        largest = float(expected[0].abs().max())
        torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=step * largest)
    else:
        assert_same(actual[:1], expected[:1])


def test_projections_of_one_block_can_have_different_formats() -> None:
    form = Form()
    fused, parts = both(form)
    torch.manual_seed(4)
    linears = [
        pair
        for pair in zip(fused.modules(), parts.modules(), strict=True)
        if isinstance(pair[0], Linear)
    ]
    assert len(linears) == 4
    steps = Steps(form, ((40, 1), (0, 9)))
    for turn in range(4):
        for index, (mine, theirs) in enumerate(linears):
            hold(mine, FLOATS[(index + turn) % 4])
            theirs.kernel, theirs.operands = mine.kernel, mine.operands
        expected = steps.run(parts)
        assert_same(steps.run(fused), expected)


@pytest.mark.landing(4)
@pytest.mark.parametrize("turn", range(len(CODED)))
def test_fused_mlp_and_attention_support_quantized_inputs(turn: int) -> None:
    """The halves alone give the bits of the block, as both keep float32 between the matmuls."""
    form = Form()
    fused, parts = both(form)
    torch.manual_seed(4)
    linears = [
        pair
        for pair in zip(fused.modules(), parts.modules(), strict=True)
        if isinstance(pair[0], Linear)
    ]
    for index, (mine, theirs) in enumerate(linears):
        hold(mine, CODED[(index + turn) % len(CODED)])
        theirs.kernel, theirs.operands = mine.kernel, mine.operands
    steps = Steps(form, ((40, 1), (0, 9)))
    expected = steps.run(parts)
    with undivided(fused):
        assert_same(steps.run(fused), expected)
    assert_same(steps.run(fused), expected)


def test_unsupported_quantized_inputs_call_the_parts() -> None:
    form = Form()
    fused, parts = both(form)
    torch.manual_seed(4)
    for part in (fused, parts):
        for linear in part.modules():
            if isinstance(linear, Linear):
                torch.manual_seed(linear.in_features)
                hold(linear, "fp8_linear")
    quantize = fused.self_attn.o_proj.kernel.quantize

    def doubled(x: torch.Tensor, *options: Any) -> Any:
        codes, scales = quantize(x, *options)
        return codes, 2 * scales

    for part in (fused, parts):
        kernel = part.self_attn.o_proj.kernel
        part.self_attn.o_proj.kernel = CodedProduct(
            doubled, kernel.product, kernel.multiply, kernel.options
        )
    steps = Steps(form, ((40, 1),))
    calls = counted(fused.self_attn)
    assert_same(steps.run(fused), steps.run(parts))
    assert calls == [1]


def wrapped(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a kernel, as if from another distribution."""

    @functools.wraps(kernel)
    def call(*given: Any) -> Any:
        return kernel(*given)

    return call


@pytest.mark.parametrize("declared", [False, True])
def test_a_declared_foreign_matmul_is_fused(declared: bool) -> None:
    form = Form(torch.float32)
    block, parts = both(form)
    steps = Steps(form, ((17, 1),))
    expected = steps.run(parts)
    kernel = wrapped(block.self_attn.o_proj.kernel)
    block.self_attn.o_proj.kernel = interposer_cpu.fused("linear")(kernel) if declared else kernel
    calls = counted(block.self_attn)
    assert_same(steps.run(block), expected)
    assert calls == ([] if declared else [1])


@pytest.mark.parametrize("declared", [False, True])
def test_a_declared_foreign_quantizer_is_fused(declared: bool) -> None:
    form = Form()
    block, parts = both(form)
    torch.manual_seed(4)
    for mine, theirs in zip(block.modules(), parts.modules(), strict=True):
        if isinstance(mine, Linear):
            hold(mine, "int8_linear")
            theirs.kernel, theirs.operands = mine.kernel, mine.operands
    quantize = wrapped(quantizers.quantize_int8_per_token)
    if declared:
        declare = interposer_cpu.fused(
            "quantizer", "int8", read=lambda: quantization_fields(torch.int8)
        )
        quantize = declare(quantize)
    block.self_attn.o_proj.kernel = replace(block.self_attn.o_proj.kernel, quantize=quantize)
    steps = Steps(form, ((40, 1),))
    expected = steps.run(parts)
    calls = counted(block.self_attn)
    assert_same(steps.run(block), expected)
    assert calls == ([] if declared else [1])


@pytest.mark.parametrize("declared", [False, True])
def test_a_declared_foreign_norm_is_fused(declared: bool) -> None:
    norm = built(Form(torch.float32)).input_layernorm
    kernel = wrapped(norm.norm)
    norm.norm = interposer_cpu.fused("rms_norm")(kernel) if declared else kernel
    assert is_fused(norm, type(norm), norm.norm, "rms_norm") is declared
    assert not is_fused(norm, type(norm), norm.norm, "fused_add_rms_norm")


@pytest.mark.slow
def test_fused_blocks_do_not_depend_on_the_number_of_threads() -> None:
    form = Form()
    block, steps = built(form), Steps(form, STEPS["many"])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = steps.run(block)
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            for _ in range(20):
                assert_same(steps.run(block), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.landing(6)
@pytest.mark.parametrize(
    "part",
    [
        "input_layernorm",
        "self_attn",
        "self_attn.qkv_proj",
        "self_attn.q_norm",
        "self_attn.k_norm",
        "self_attn.rotary",
        "self_attn.attn",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp",
        "mlp.gate_up_proj",
        "mlp.activation",
        "mlp.down_proj",
    ],
)
def test_hooks_of_parts_are_called(part: str) -> None:
    form = Form(torch.float32)
    block, steps = built(form), Steps(form, ((17, 1),))
    unwatched = steps.run(block)
    calls: list[str] = []
    hook = block.get_submodule(part).register_forward_hook(lambda *_: calls.append(part))
    # Norms of streams are called as methods, which no hook sees; it makes no difference that they
    # are called at all.
    watched = steps.run(block)
    hook.remove()
    for mine, theirs in zip(watched, unwatched, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert_same(steps.run(block), unwatched)
    assert calls == ([] if "layernorm" in part else [part])


def test_hooks_of_all_modules_are_called() -> None:
    form = Form(torch.float32)
    block, steps = built(form), Steps(form, ((17, 1),))
    called: set[nn.Module] = set()
    hook = nn.modules.module.register_module_forward_pre_hook(lambda m, _: called.add(m))
    steps.run(block)
    hook.remove()
    assert {block.self_attn.qkv_proj, block.mlp.down_proj, block.mlp.activation} < called


def test_an_mlp_of_another_kind_follows_the_fused_attention() -> None:
    form = Form(torch.float32)
    fused, parts = (built(form, name, mlp=lambda _: Doubling()) for name in ("native", "standard"))
    steps = Steps(form, ((17, 1), (0, 4)))
    assert isinstance(fused, NativeDecoderBlock)
    assert fused.is_fusable
    assert not fused.takes_mlp
    calls = counted(fused.self_attn)
    for rows in (None, torch.tensor([1, 4])):
        assert_same(steps.run(fused, rows), steps.run(parts, rows))
    assert calls == []


def test_an_mlp_with_another_kernel_follows_the_fused_attention() -> None:
    form = Form(torch.float32)
    fused, parts = both(form)
    steps = Steps(form, ((17, 1),))
    expected = steps.run(parts)
    plain = nn.functional.linear
    fused.mlp.down_proj.kernel = lambda x, weight: plain(x, weight)
    fused.mlp.down_proj.operands = (torch.zeros(HIDDEN, INNER),)
    calls, others = counted(fused.self_attn), counted(fused.mlp)
    out, total, cache = steps.run(fused)
    assert (calls, others) == ([], [1])
    assert not out.any()
    assert_same((total, cache), expected[1:])


@pytest.mark.parametrize("op", ["rms_norm", "fused_add_rms_norm", "rotary_embedding", "linear"])
def test_a_block_with_another_kernel_calls_its_parts(op: str) -> None:
    form = Form(torch.float32)
    block, steps = built(form, kernels={op: "reference"}), Steps(form, ((17, 1),))
    plain = steps.run(built(form, "standard"))
    calls = counted(block.self_attn)
    for mine, theirs in zip(steps.run(block), plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
    assert calls == [1]


def test_exchanged_weights_are_used() -> None:
    form = Form(torch.float32)
    fused, parts = both(form)
    steps = Steps(form, ((17, 1),))
    before = steps.run(fused)
    for block in (fused, parts):
        generator = torch.Generator().manual_seed(6)
        for linear in (block.self_attn.o_proj, block.mlp.down_proj):
            shape = (sum(linear.parts.values()), linear.in_features)
            weight = torch.randn(shape, generator=generator)
            linear.operands = (native_linear.pack(weight, None)["weight"], None)
        for norm in (block.input_layernorm, block.self_attn.q_norm):
            norm.constants = tuple(torch.full_like(held, 0.5) for held in norm.constants)
    actual = steps.run(fused)
    assert not torch.equal(actual[0], before[0])
    assert_same(actual, steps.run(parts))


def test_a_copied_block_uses_its_own_weights() -> None:
    form = Form(torch.float32)
    block, steps = built(form), Steps(form, ((17, 1),))
    expected = steps.run(block)
    other = copy.deepcopy(block)
    with undivided(other):
        assert_same(steps.run(other), expected)
    assert other._bound.address != block._bound.address
    other = copy.deepcopy(block)
    calls: list[object] = []
    other.mlp.down_proj.register_forward_hook(lambda *_: calls.append(1))
    steps.run(block)
    assert calls == []
    steps.run(other)
    assert calls == [1]


def test_compiled_blocks_call_their_parts() -> None:
    form = Form(torch.float32)
    block, steps = built(form), Steps(form, ((17, 1),))
    expected = steps.run(block)
    graphs = []

    def seen(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(block, backend=seen)
    calls = steps.run(compiled)
    assert any("interposer_cpu.linear_out" in graph for graph in graphs)
    for mine, theirs in zip(calls, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_weights_of_other_sizes_are_refused() -> None:
    form = Form(torch.float32)
    block, steps = built(form), Steps(form, ((17, 1),))
    weight = torch.randn(HIDDEN, 8)
    block.self_attn.o_proj.operands = (native_linear.pack(weight, None)["weight"], None)
    with pytest.raises(RuntimeError, match="block failed with code 4"):
        steps.run(block)


# Adapters: hooks that state a sum.
ADAPTERS = 3
PARTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class Sum:
    shrink: Callable[..., Any]
    first: torch.Tensor
    expansions: list[tuple[Callable[..., Any], torch.Tensor, int]]


class Adds:
    """A hook as the models' are, for the parts of a projection."""

    def __init__(
        self, layer: Any, ids: dict[int, torch.Tensor], rank: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(len(layer.prefix))

        def drawn(*shape: int) -> torch.Tensor:
            return (0.1 * torch.randn(shape, generator=generator)).to(dtype)

        expansions, offset = [], 0
        for outputs in layer.parts.values():
            second = lora.prepare_expand(drawn(ADAPTERS, outputs, rank))["lora_b"]
            expansions.append((lora.lora_expand, second, offset))
            offset += outputs
        first = drawn(ADAPTERS, len(expansions) * rank, layer.in_features)
        first = lora.prepare_shrink(first)["lora_a"]
        self.low_rank: Sum | None = Sum(lora.lora_shrink, first, expansions)
        self.ids, self.rank, self.calls = ids, rank, 0

    def adapter_ids(self, num_rows: int) -> torch.Tensor:
        return self.ids[num_rows]

    def __call__(self, layer: Any, inputs: Any, y: torch.Tensor) -> None:
        assert self.low_rank is not None
        self.calls += 1
        ids = self.adapter_ids(len(y))
        shrunk = self.low_rank.shrink(inputs[0], self.low_rank.first, ids, 1.0)
        for index, (expand, second, offset) in enumerate(self.low_rank.expansions):
            expand(shrunk[:, index * self.rank : (index + 1) * self.rank], second, ids, y, offset)


def with_sums(
    block: Any,
    parts: tuple[str, ...],
    rows: torch.Tensor | None,
    count: int,
    dtype: torch.dtype = torch.float32,
) -> Any:
    ids = {count: torch.tensor([(0, -1, 2, 1, 2)[t % 5] for t in range(count)])}
    if rows is not None:
        ids[len(rows)] = ids[count][rows].contiguous()
    hooks = [Adds(block.get_submodule(part), ids, 3 + len(part) % 2, dtype) for part in parts]
    for part, hook in zip(parts, hooks, strict=True):
        block.get_submodule(part).register_forward_hook(hook)
    return hooks


def close(actual: Any, expected: Any, dtype: torch.dtype = torch.float32) -> None:
    """Compare numbers: between gates and up, the fused call rounds nothing to ``dtype``."""
    limit = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=limit * float(theirs.abs().max()))


@pytest.mark.landing(4)
@pytest.mark.parametrize("rows", [None, [1, 4, 6]])
@pytest.mark.parametrize("parts", [PARTS, PARTS[:1], PARTS[1:3], PARTS[3:]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_hooks_are_computed_in_the_fused_call(
    dtype: torch.dtype, parts: tuple[str, ...], rows: list[int] | None
) -> None:
    form = Form(dtype)
    fused, apart = both(form)
    steps = Steps(form, ((17, 1), (0, 4), (3, 2)))
    chosen = None if rows is None else torch.tensor(rows)
    plain = steps.run(fused, chosen)
    mine = with_sums(fused, parts, chosen, 7, dtype)
    theirs = with_sums(apart, parts, chosen, 7, dtype)
    actual = steps.run(fused, chosen)
    # A hook of another kind makes the layer call its parts.
    apart.self_attn.rotary.register_forward_hook(lambda *_: None)
    apart.mlp.activation.register_forward_hook(lambda *_: None)
    expected = steps.run(apart, chosen)
    assert [hook.calls for hook in mine] == [0] * len(parts)
    assert [hook.calls for hook in theirs] == [1] * len(parts)
    close(actual, expected, dtype)
    assert not torch.equal(actual[0], plain[0])


def test_a_hook_with_other_lora_kernels_is_called() -> None:
    form = Form(torch.float32)
    block, steps = built(form), Steps(form, ((17, 1),))
    (hook,) = with_sums(block, PARTS[:1], None, 1)
    known = steps.run(block)
    shrink = hook.low_rank.shrink
    (other,) = with_sums(built(form), PARTS[:1], None, 1)
    other.low_rank = Sum(
        lambda *given: shrink(*given), other.low_rank.first, hook.low_rank.expansions
    )
    block.self_attn.qkv_proj._forward_hooks.clear()
    block.self_attn.qkv_proj.register_forward_hook(other)
    calls = counted(block.self_attn.attn)
    close(steps.run(block), known)
    assert (hook.calls, other.calls, calls) == (0, 1, [1])


def test_a_block_keeps_no_removed_hook_alive() -> None:
    form = Form(torch.float32)
    block, steps = built(form), Steps(form, ((17, 1),))
    plain = steps.run(block)
    (hook,) = with_sums(block, PARTS[3:], None, 1)
    steps.run(block)
    kept = weakref.ref(hook)
    block.mlp.down_proj._forward_hooks.clear()
    del hook
    gc.collect()
    assert kept() is None
    assert all(map(torch.equal, steps.run(block), plain))


def test_fused_mlp_and_attention_layers_also_add_lora() -> None:
    form = Form(torch.float32)
    layer, parts = (built(form).mlp for _ in range(2))
    x = torch.randn(5, 64)
    mine, theirs = (
        with_sums(each, ("gate_up_proj", "down_proj"), None, 5) for each in (layer, parts)
    )
    parts.activation.register_forward_hook(lambda *_: None)
    with torch.inference_mode():
        close([layer(x)], [parts(x)])
    assert [hook.calls for hook in (*mine, *theirs)] == [0, 0, 1, 1]
