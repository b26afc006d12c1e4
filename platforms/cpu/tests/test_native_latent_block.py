"""Decoder blocks with latent attention (MLA) in one native call, compared with their parts.

Dimensions: T tokens, H hidden size, N heads, D size of a query and key head without its rotary
part, R rotary size, C latent size, V size of a value head.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from platforms.cpu.tests.block_checks import assert_same, counted
from torch import nn

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
from interposer_cpu._kernels.decoder_block import NativeDecoderBlock
from interposer_models.decoder import LatentAttention, LatentSizes
from interposer_ops.layers.attention import LatentBackend
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.quantized_linear import CodedProduct

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

HIDDEN, INNER, EPS, PAGE = 64, 96, 1e-6, 16
HEADS, LATENT, ROTARY, PLAIN, VALUE = 4, 32, 16, 24, 20
# Kernels that other distributions may replace too.
KERNELS = {"rms_norm": "rms_norm_native", "fused_add_rms_norm": "fused_add_rms_norm_native"}


@dataclass(frozen=True)
class Form:
    """The parts of a block."""

    dtype: torch.dtype = torch.float32
    query_latent: int | None = None
    interleaved: bool = True
    bias: bool = False


def attention_of(
    site: Site, form: Form, kind: type[LatentAttention] = LatentAttention
) -> LatentAttention:
    """Build the attention of a block."""
    spec = AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=1,
        head_size=LATENT + ROTARY,
        dtype=form.dtype,
        cache_dtype=form.dtype,
        page_size=PAGE,
        scale=0.2,
        latent=True,
        latent_size=LATENT,
    )
    sizes = LatentSizes(HIDDEN, form.query_latent, PLAIN, VALUE)
    return kind(site, spec, sizes, form.interleaved, form.bias)


def built(
    form: Form,
    name: str = "native",
    kernels: dict[str, str] | None = None,
    mlp: Callable[[Site], nn.Module] | None = None,
    attention: type[LatentAttention] = LatentAttention,
) -> Any:
    """Build a block; its weights are the same for every implementation."""
    layers = {"rms_norm": "standard", "decoder_block": name, "gated_mlp": "native"}
    config = Config(layers=layers, kernels={**KERNELS, **(kernels or {})})
    site = Site(Resolver(current_registry(), place().device, config), "block", form.dtype)
    block = DecoderBlock(
        site,
        HIDDEN,
        EPS,
        lambda at: attention_of(at, form, attention),
        mlp or (lambda at: GatedMLP(at, HIDDEN, INNER, "silu")),
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
        lengths: tokens before the step and in the step, of each sequence.
    """

    def __init__(self, form: Form, lengths: tuple[tuple[int, int], ...]) -> None:
        generator = torch.Generator().manual_seed(2)
        pages = [-(-(before + count) // PAGE) for before, count in lengths]
        table = torch.zeros(len(lengths), max(pages), dtype=torch.int64)
        slots, positions, first = [], [], 1
        for row, (before, count) in enumerate(lengths):
            own_pages = torch.arange(first, first + pages[row])
            table[row, : pages[row]] = own_pages
            first += pages[row]
            new = torch.arange(before, before + count)
            positions.append(new)
            slots.append(own_pages[new // PAGE] * PAGE + new % PAGE)
        counts = torch.tensor([count for _, count in lengths])
        self.num_pages = first
        self.batch = AttentionBatch(
            query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
            seq_lens=torch.tensor([before + count for before, count in lengths]),
            page_table=table,
            slots=torch.cat(slots),
            max_query_tokens=int(counts.max()),
            max_seq_tokens=max(before + count for before, count in lengths),
        )
        self.num_tokens = int(counts.sum())
        self.x = torch.randn(self.num_tokens, HIDDEN, generator=generator).to(form.dtype)
        self.residual = torch.randn(self.num_tokens, HIDDEN, generator=generator)
        angles = torch.cat(positions).unsqueeze(1) * 0.5 ** torch.arange(ROTARY // 2)
        self.tables = angles.cos(), angles.sin()

    def run(
        self, block: Any, rows: torch.Tensor | None = None, *, first: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the block's output, the residual and the cache."""
        backend = block.self_attn.attn.backend
        (cache,) = backend.kv_layout().allocate(1, self.num_pages, "cpu")
        generator = torch.Generator().manual_seed(3)
        cache.copy_(torch.randn(cache.shape, generator=generator).to(cache.dtype))
        plan = backend.plan(self.batch)
        residual = None if first else self.residual.clone()
        with torch.inference_mode():
            out, total = block(self.x.clone(), residual, *self.tables, cache, plan, rows)
        return out, total, cache.float()


def both(form: Form, **changes: Any) -> tuple[Any, Any]:
    """Build the block in one call, and one that calls its parts."""
    fused, parts = built(form, **changes), built(form, "standard", **changes)
    assert type(fused) is NativeDecoderBlock
    assert fused.is_fusable
    assert type(parts) is DecoderBlock
    assert type(parts.self_attn.attn.backend) is LatentBackend
    return fused, parts


def assert_close(
    actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], limit: float = 1e-5
) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=limit * float(theirs.abs().max()))


STEPS = {
    "decode": ((40, 1),),
    "batch": ((40, 1), (3, 1), (600, 1), (15, 1)),
    "prefill": ((0, 50),),
    "mixed": ((17, 1), (0, 33), (5, 9)),
}


@pytest.mark.landing(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("query_latent", [None, 40])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", STEPS)
def test_a_latent_block_in_one_call_equals_its_parts(
    kind: str, first: bool, query_latent: int | None, dtype: torch.dtype
) -> None:
    form = Form(dtype, query_latent)
    fused, parts = both(form)
    steps = Steps(form, STEPS[kind])
    calls = [counted(fused.self_attn), counted(fused.mlp), counted(fused.input_layernorm)]
    actual = steps.run(fused, first=first)
    assert calls == [[], [], []]
    assert_same(actual, steps.run(parts, first=first))


@pytest.mark.parametrize("changes", [{"interleaved": False}, {"bias": True, "query_latent": 40}])
def test_latent_blocks_support_optional_parts(changes: dict[str, Any]) -> None:
    form = Form(torch.bfloat16, **changes)
    fused, parts = both(form)
    steps = Steps(form, STEPS["mixed"])
    calls = counted(fused.self_attn)
    assert_same(steps.run(fused), steps.run(parts))
    assert calls == []


@pytest.mark.parametrize("rows", [[0, 5, 42], [3], []])
def test_a_latent_block_returns_only_the_requested_rows(rows: list[int]) -> None:
    form = Form(torch.bfloat16)
    fused, parts = both(form)
    steps, chosen = Steps(form, STEPS["mixed"]), torch.tensor(rows, dtype=torch.int64)
    actual = steps.run(fused, chosen)
    assert len(actual[0]) == len(rows)
    assert_same(actual, steps.run(parts, chosen))


def test_long_prompts_call_the_parts() -> None:
    form = Form()
    fused, parts = both(form)
    steps = Steps(form, ((0, 300),))
    calls = counted(fused.self_attn)
    assert_same(steps.run(fused), steps.run(parts))
    assert calls == [1]


def test_an_mlp_of_another_kind_follows_fused_latent_attention() -> None:
    class Doubling(nn.Module):
        def __init__(self, site: Site) -> None:
            super().__init__()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    form = Form()
    fused, parts = both(form, mlp=Doubling)
    steps = Steps(form, STEPS["batch"])
    calls = counted(fused.self_attn)
    assert_same(steps.run(fused), steps.run(parts))
    assert calls == []


def test_a_subclass_of_latent_attention_computes_itself() -> None:
    class Negated(LatentAttention):
        def forward(self, *inputs: Any) -> torch.Tensor:
            return -super().forward(*inputs)

    form = Form()
    block = built(form, attention=Negated)
    parts = built(form, "standard", attention=Negated)
    steps = Steps(form, STEPS["decode"])
    calls = counted(block.self_attn)
    assert_same(steps.run(block), steps.run(parts))
    assert calls == [1]


@pytest.mark.landing(4)
@pytest.mark.parametrize(
    "part",
    [
        "self_attn",
        "self_attn.q_a_proj",
        "self_attn.q_a_layernorm",
        "self_attn.q_b_proj",
        "self_attn.kv_a_proj_with_mqa",
        "self_attn.kv_a_layernorm",
        "self_attn.rotary",
        "self_attn.attn",
        "self_attn.o_proj",
        "mlp.down_proj",
    ],
)
def test_hooks_of_latent_parts_are_called(part: str) -> None:
    form = Form(query_latent=40)
    block, steps = built(form), Steps(form, STEPS["decode"])
    unwatched = steps.run(block)
    calls: list[str] = []
    hook = block.get_submodule(part).register_forward_hook(lambda *_: calls.append(part))
    watched = steps.run(block)
    hook.remove()
    assert_close(watched, unwatched)
    assert_same(steps.run(block), unwatched)
    assert calls == [part]


@pytest.mark.parametrize(
    "op", ["batched_linear", "latent_attention_decode", "rotary_embedding_interleaved", "linear"]
)
def test_a_latent_block_with_another_kernel_calls_its_parts(op: str) -> None:
    form = Form()
    block, steps = built(form, kernels={op: "reference"}), Steps(form, STEPS["decode"])
    calls = counted(block.self_attn)
    assert_close(steps.run(block), steps.run(built(form, "standard")), 1e-4)
    assert calls == [1]


def int8_product(x: torch.Tensor, scales: torch.Tensor, packed: Any) -> torch.Tensor:
    return native_linear.int8_linear(x, packed, scales, None, None, None, torch.bfloat16)


def test_projections_with_quantized_inputs_are_fused() -> None:
    form = Form(torch.bfloat16, query_latent=40)
    fused, parts = both(form)
    generator = torch.Generator().manual_seed(4)
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"):
        layer = fused.self_attn.get_submodule(name)
        shape = sum(layer.parts.values()), layer.in_features
        weight = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
        scale = torch.rand(shape[0], 1, generator=generator) * 0.002
        packed = native_linear.pack_int8(weight, scale, None)["weight"]
        for block in (fused, parts):
            other = block.self_attn.get_submodule(name)
            other.kernel = CodedProduct(
                quantizers.quantize_int8_per_token, native_linear.int8_linear, int8_product
            )
            other.operands = (packed,)
    steps = Steps(form, STEPS["mixed"])
    calls = counted(fused.self_attn)
    assert_same(steps.run(fused), steps.run(parts))
    assert calls == []


def test_exchanged_latent_weights_are_used() -> None:
    form = Form()
    fused, parts = both(form)
    steps = Steps(form, STEPS["batch"])
    before = steps.run(fused)
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(HEADS * (PLAIN + VALUE), LATENT, generator=generator)
    for block in (fused, parts):
        projection = block.self_attn.kv_b_proj
        projection.register_parameter("weight", nn.Parameter(weight.clone(), requires_grad=False))
        projection.finalize()
    actual = steps.run(fused)
    assert not torch.equal(actual[0], before[0])
    assert_same(actual, steps.run(parts))


def test_a_copied_latent_block_uses_its_own_weights() -> None:
    form = Form()
    block, steps = built(form), Steps(form, STEPS["decode"])
    expected = steps.run(block)
    other = copy.deepcopy(block)
    assert_same(steps.run(other), expected)
    calls: list[object] = []
    other.self_attn.kv_a_layernorm.register_forward_hook(lambda *_: calls.append(1))
    steps.run(block)
    assert calls == []
    steps.run(other)
    assert calls == [1]


def test_latent_weights_of_other_sizes_are_refused() -> None:
    form = Form()
    block, steps = built(form), Steps(form, STEPS["decode"])
    weight = torch.randn(LATENT, HIDDEN)
    projection = block.self_attn.kv_a_proj_with_mqa
    projection.operands = (native_linear.pack(weight, None)["weight"], None)
    with pytest.raises(RuntimeError, match="block failed with code 4"):
        steps.run(block)


class Adapter:
    """A LoRA hook as models have them, for one projection."""

    def __init__(self, layer: Any, ids: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(len(layer.prefix))
        outputs, rank = sum(layer.parts.values()), 3
        second = 0.1 * torch.randn(2, outputs, rank, generator=generator)
        first = 0.1 * torch.randn(2, rank, layer.in_features, generator=generator)
        self.first = lora.prepare_shrink(first)["lora_a"]
        self.shrink = lora.lora_shrink
        self.expansions = [(lora.lora_expand, lora.prepare_expand(second)["lora_b"], 0)]
        self.low_rank, self.ids, self.calls = self, ids, 0

    def adapter_ids(self, num_rows: int) -> torch.Tensor:
        return self.ids[:num_rows]

    def __call__(self, layer: Any, inputs: Any, y: torch.Tensor) -> None:
        self.calls += 1
        ids = self.adapter_ids(len(y))
        expand, second, offset = self.expansions[0]
        expand(self.shrink(inputs[0], self.first, ids, 1.0), second, ids, y, offset)


@pytest.mark.parametrize("query_latent", [None, 40])
def test_lora_of_latent_attention_is_computed_in_the_fused_call(query_latent: int | None) -> None:
    form = Form(query_latent=query_latent)
    fused, parts = both(form)
    steps = Steps(form, STEPS["batch"])
    plain = steps.run(fused)
    names = ["q_a_proj", "q_b_proj"] if query_latent else ["q_proj"]
    names += ["kv_a_proj_with_mqa", "o_proj"]
    ids = torch.tensor([0, -1, 1, 1])
    hooks: dict[str, list[Adapter]] = {"fused": [], "parts": []}
    for kind, block in (("fused", fused), ("parts", parts)):
        for name in names:
            layer = block.self_attn.get_submodule(name)
            hooks[kind].append(Adapter(layer, ids))
            layer.register_forward_hook(hooks[kind][-1])
    actual, expected = steps.run(fused), steps.run(parts)
    assert [hook.calls for hook in hooks["fused"]] == [0] * len(names)
    assert [hook.calls for hook in hooks["parts"]] == [1] * len(names)
    assert_close(actual, expected)
    assert not torch.equal(actual[0], plain[0])
