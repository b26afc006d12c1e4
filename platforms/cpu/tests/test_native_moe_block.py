"""Decoder blocks with an MoE layer in one native call, compared with their parts.

Dimensions: T tokens, H hidden size.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from platforms.cpu.tests import test_native_latent_block as latent
from platforms.cpu.tests.block_checks import assert_same, counted
from platforms.cpu.tests.test_native_decoder_block import EPS, HIDDEN, KERNELS, Form, Steps
from torch import nn

from interposer import Config, PluggableLayer, Resolver, Site, current_registry, place
from interposer_cpu import native
from interposer_cpu._kernels.decoder_block import NativeDecoderBlock
from interposer_cpu._kernels.decoder_run import DecoderRun
from interposer_models.decoder import choose_family
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.self_attention import SelfAttention

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 2048,
    "num_experts_per_tok": 2,
}
# An architecture for each kind of MoE layer, with the fields of its config.
MOES: dict[str, dict[str, Any]] = {
    "softmax": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6},
    "renormalized": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "norm_topk_prob": True,
    },
    "gated shared expert": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 6,
        "shared_expert_intermediate_size": 64,
    },
    "groups": {
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
    },
    "shared expert": {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "num_experts": 6,
        "moe_topk": 2,
    },
    "biases": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 6},
}
GATED = "gated shared expert"
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"quant_method": "online_int8"},
    "int4": {"quant_method": "online_int4", "group_size": 32},
    "w4a8": {"quant_method": "online_w4a8", "group_size": 32},
}
STEPS = {"decode": ((40, 1),), "batch": ((40, 1), (3, 1), (600, 1)), "mixed": ((17, 1), (0, 33))}


def built(
    kind: str | None,
    dtype: torch.dtype = torch.bfloat16,
    name: str = "native",
    *,
    settings: dict[str, Any] | None = None,
    layers: dict[str, str] | None = None,
    kernels: dict[str, str] | None = None,
    seed: int = 1,
    attention: Callable[[Site], SelfAttention] | None = None,
) -> Any:
    """Build a block, with an MLP if ``kind`` is None; weights do not depend on ``name``."""
    choices = {"rms_norm": "standard", "decoder_block": name, "self_attention": "native"}
    config = Config(
        layers={**choices, "gated_mlp": "native", "experts": "native", **(layers or {})},
        kernels={**KERNELS, **(kernels or {})},
        attention={} if attention else {"decoder": "native"},
        canary="off",
        tables=False,
    )
    resolver = Resolver(current_registry(), place().device, config)
    if settings is not None:
        resolver.choose_scheme(settings)
    site = Site(resolver, "model.layers.0", dtype)
    dense = {"architectures": ["LlamaForCausalLM"]}
    family: Any = choose_family(resolver, {**SIZES, **(MOES[kind] if kind else dense)}, "config")
    block = DecoderBlock(
        site,
        HIDDEN,
        EPS,
        attention or (lambda at: SelfAttention(at, Form(dtype).spec, HIDDEN, 32, EPS)),
        lambda _: family.mlp(site, 0),
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in block.parameters():
        numbers = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(0.2 * numbers if parameter.ndim > 1 else 1 + 0.2 * numbers)
    for part in block.modules():
        if isinstance(part, PluggableLayer):
            part.finalize()
    return block


def both(kind: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> tuple[Any, Any]:
    """Build the block in one call, and one that calls its parts."""
    fused = built(kind, dtype, **changes)
    parts = built(kind, dtype, "standard", **changes)
    assert type(fused) is NativeDecoderBlock
    assert type(parts) is DecoderBlock
    return fused, parts


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the calls of MoE layers from Python."""
    recorded: list[int] = []
    call = nn.Module.__call__

    def counting(module: Any, *inputs: Any, **options: Any) -> Any:
        if hasattr(module, "moe_parts"):
            recorded.append(1)
        return call(module, *inputs, **options)

    monkeypatch.setattr(nn.Module, "__call__", counting)
    return recorded


@pytest.mark.landing(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MOES)
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_a_block_with_an_moe_layer_in_one_call_equals_its_parts(
    lengths: tuple[tuple[int, int], ...], kind: str, dtype: torch.dtype, calls: list[int]
) -> None:
    fused, parts = both(kind, dtype)
    steps = Steps(Form(dtype), lengths)
    actual = steps.run(fused)
    assert bool(calls) == (kind == GATED and dtype == torch.float32)
    assert_same(actual, steps.run(parts))


@pytest.mark.landing(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["softmax", GATED, "groups", "shared expert"])
def test_quantized_experts_are_computed_in_the_call(
    kind: str, form: str, dtype: torch.dtype, calls: list[int]
) -> None:
    fused, parts = both(kind, dtype, settings=FORMATS[form])
    steps = Steps(Form(dtype), STEPS["mixed"])
    rows = torch.tensor([0, 33])
    actual, chosen = steps.run(fused), steps.run(fused, rows)
    assert calls == []
    assert_same(actual, steps.run(parts))
    assert_same(chosen, steps.run(parts, rows))


@pytest.mark.parametrize("rows", [[0, 5, 33], []])
def test_a_block_with_an_moe_layer_returns_only_the_requested_rows(
    rows: list[int], calls: list[int]
) -> None:
    fused, parts = both(GATED)
    steps, chosen = Steps(Form(), STEPS["mixed"]), torch.tensor(rows, dtype=torch.int64)
    actual = steps.run(fused, chosen, first=True)
    assert calls == []
    assert_same(actual, steps.run(parts, chosen, first=True))


@pytest.mark.parametrize("kind", [GATED, "groups"])
def test_a_latent_block_with_an_moe_layer_is_one_call(kind: str, calls: list[int]) -> None:
    form = latent.Form(torch.bfloat16, query_latent=40)
    fused, parts = both(kind, attention=lambda at: latent.attention_of(at, form))
    steps = latent.Steps(form, latent.STEPS["mixed"])
    actual = steps.run(fused)
    assert calls == []
    assert_same(actual, steps.run(parts))


PARTS = ["", ".router", ".experts", ".shared_expert", ".shared_expert_gate"]
PROJECTIONS = [".shared_expert.down_proj", ".shared_expert.activation", ".experts.0.0"]


@pytest.mark.landing(4)
@pytest.mark.parametrize(
    ("part", "way"),
    [*[(p, "forward") for p in PARTS], *[(p, "hook") for p in (*PARTS, *PROJECTIONS)]],
)
def test_watched_parts_of_an_moe_layer_are_called(part: str, way: str) -> None:
    block, steps = built(GATED, settings=FORMATS["int8"]), Steps(Form(), STEPS["mixed"])
    unwatched, watched = steps.run(block), block.get_submodule(f"mlp{part}")
    recorded: list[int] = []
    if way == "hook":
        handle = watched.register_forward_hook(lambda *_: recorded.append(1))
    else:
        recorded = counted(watched)
    steps.run(block)
    assert recorded == [1]
    if way == "hook":
        handle.remove()
    else:
        del watched.forward
    assert_same(steps.run(block), unwatched)
    assert recorded == [1]


@pytest.mark.parametrize(
    "changes",
    [
        {"kernels": {"linear": "reference"}},
        {"kernels": {"topk_softmax": "reference"}},
        {"kernels": {"fused_experts": "reference"}},
        {"layers": {"experts": "standard"}},
        {"layers": {"gated_mlp": "standard"}},
    ],
    ids=str,
)
def test_other_kernels_and_layers_are_called(changes: dict[str, Any], calls: list[int]) -> None:
    fused, parts = both(GATED, **changes)
    steps = Steps(Form(), STEPS["decode"])
    actual, expected = steps.run(fused), steps.run(parts)
    assert len(calls) == 2
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("settings", [None, FORMATS["int8"]], ids=["plain", "int8"])
def test_exchanged_weights_of_an_moe_layer_are_used(
    settings: dict[str, Any] | None, calls: list[int]
) -> None:
    fused, parts = both(GATED, settings=settings)
    source = built(GATED, settings=settings, seed=2)
    steps = Steps(Form(), STEPS["batch"])
    before = steps.run(fused)
    names = ["router", "shared_expert.gate_up_proj", "shared_expert_gate"]
    for name in [*names, "experts.2.0" if settings else "experts"]:
        for block in (fused, parts):
            block.mlp.get_submodule(name).operands = source.mlp.get_submodule(name).operands
        actual = steps.run(fused)
        assert not actual[0].equal(before[0])
        assert calls == []
        assert_same(actual, steps.run(parts))
        calls.clear()
        before = actual


@pytest.mark.parametrize("settings", [None, FORMATS["int8"]], ids=["plain", "int8"])
def test_a_copied_block_with_an_moe_layer_uses_its_own_weights(
    settings: dict[str, Any] | None,
) -> None:
    block, steps = built(GATED, settings=settings), Steps(Form(), STEPS["decode"])
    expected = steps.run(block)
    other = copy.deepcopy(block)
    for tensor in _operand_tensors(block.mlp.experts):
        tensor.zero_()  # the copy still refers to weights of its own
    assert_same(steps.run(other), expected)
    recorded: list[int] = []
    other.mlp.router.register_forward_hook(lambda *_: recorded.append(1))
    steps.run(built(GATED, settings=settings))
    assert recorded == []
    steps.run(other)
    assert recorded == [1]


def _operand_tensors(layer: Any) -> list[torch.Tensor]:
    """List the packed weights of a layer of experts."""
    pairs = layer.operands[0]
    if isinstance(pairs, torch.Tensor):
        return [pairs]
    return [projection.operands[0][0] for pair in pairs for projection in pair]


def test_moe_weights_of_other_sizes_are_refused() -> None:
    block, steps = built("softmax"), Steps(Form(), STEPS["decode"])
    other = built("groups")
    block.mlp.router.operands = other.self_attn.o_proj.operands
    with pytest.raises(RuntimeError, match="block failed with code 4"):
        steps.run(block)


def joined(blocks: list[Any], steps: Any, rows: torch.Tensor | None) -> Any:
    """Run consecutive blocks in one call; None if they must be called one by one."""
    run = NativeDecoderBlock.joined(blocks)
    if run is None:
        return None
    backend = blocks[0].self_attn.attn.backend
    caches = [backend.kv_layout().allocate(1, steps.num_pages, "cpu")[0] for _ in blocks]
    for cache in caches:
        cache.zero_()
    plans = [backend.plan(steps.batch)] * len(blocks)
    with torch.inference_mode():
        return run(steps.x.clone(), [steps.tables] * len(blocks), caches, plans, rows)


def one_by_one(blocks: list[Any], steps: Any, rows: torch.Tensor | None) -> Any:
    """Run consecutive blocks in a call each."""
    x, residual = steps.x.clone(), None
    for index, block in enumerate(blocks):
        backend = block.self_attn.attn.backend
        (cache,) = backend.kv_layout().allocate(1, steps.num_pages, "cpu")
        cache.zero_()
        last = rows if index == len(blocks) - 1 else None
        with torch.inference_mode():
            plan = backend.plan(steps.batch)
            x, residual = block(x, residual, *steps.tables, cache, plan, last)
    return x, residual


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 33])], ids=["all", "some"])
def test_blocks_with_moe_layers_and_mlps_are_one_call(
    rows: torch.Tensor | None, calls: list[int]
) -> None:
    settings = FORMATS["w4a8"]
    blocks = [built(kind, settings=settings) for kind in (None, GATED, "softmax")]
    steps = Steps(Form(), ((0, 1), (0, 33)))
    actual = joined(blocks, steps, rows)
    assert calls == []
    assert_same(actual, one_by_one(blocks, steps, rows))


def test_latent_blocks_are_one_call(calls: list[int]) -> None:
    form = latent.Form(torch.bfloat16, query_latent=40)
    layers = [None, "groups", GATED]
    blocks = [built(kind, attention=lambda at: latent.attention_of(at, form)) for kind in layers]
    steps, rows = latent.Steps(form, ((0, 1), (0, 33))), torch.tensor([33])
    actual = joined(blocks, steps, rows)
    assert calls == []
    assert_same(actual, one_by_one(blocks, steps, rows))
    assert joined(blocks, latent.Steps(form, ((0, 65),)), None) is None


def test_blocks_are_called_one_by_one_while_an_moe_layer_is_watched() -> None:
    blocks = [built("softmax") for _ in range(2)]
    steps = Steps(Form(), STEPS["decode"])
    assert type(NativeDecoderBlock.joined(blocks)) is DecoderRun
    handle = blocks[1].mlp.router.register_forward_hook(lambda *_: None)
    assert joined(blocks, steps, None) is None
    handle.remove()
    assert joined(blocks, steps, None) is not None
    unfused = built("softmax", layers={"experts": "standard"})
    assert NativeDecoderBlock.joined([*blocks, unfused]) is None
