"""Attention to latent vectors: the backend, the layer, and checkpoints of its families.

Parity with transformers, and the backend's with the reference, are tested where all are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig

from interposer import (
    AttentionSpec,
    Capability,
    Config,
    Resolver,
    Site,
    current_registry,
    explain,
    hookimpl,
    place,
    register,
)
from interposer.errors import CheckpointError, InterposerError
from interposer.records import ModelEntry
from interposer_engine import load, plan, quantize
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.mla import LatentFamily
from interposer_models._families import examples
from interposer_models._families.deepseek import DeepseekV2, DeepseekV3
from interposer_ops.layers.attention import LatentBackend
from interposer_ops.layers.self_attention import SelfAttention
from interposer_testing import attention_specs, check_attention

SPEC = next(spec for _, spec in attention_specs(quick=True) if spec.latent)
FP8 = torch.float8_e4m3fn
BLOCK = 16


def site(spec: AttentionSpec) -> Site:
    return Site(Resolver(current_registry(), place().device, Config()), "attn", spec.dtype)


class Late(LatentBackend):
    """Attends before it writes."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        old_cache = cache.clone()
        super().forward(query, key, value, cache, plan)
        new_cache, cache[:] = cache.clone(), old_cache
        stale = replace(plan, slots=plan.slots[:0])
        out = super().forward(query, key[:0], value[:0], cache, stale)
        cache[:] = new_cache
        return out


class Shifted(LatentBackend):
    """Takes the last elements of a vector for its value."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        rotary_size = self.spec.head_size - self.spec.latent_size
        return super().forward(
            query.roll(rotary_size, -1), key.roll(rotary_size, -1), value, cache, plan
        )


class Narrow(LatentBackend):
    """Returns the rotary part as well."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        out = super().forward(query, key, value, cache, plan)
        return torch.cat((out, query[..., out.shape[-1] :]), -1)


@pytest.mark.parametrize("wrong", [Late, Shifted, Narrow])
def test_the_kit_detects_wrong_backends(wrong: type[LatentBackend]) -> None:
    assert check_attention(LatentBackend, SPEC, site(SPEC)) == []
    assert check_attention(wrong, SPEC, site(SPEC))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"latent": False}, "serves latent attention only"),
        ({"window_tokens": 8}, "has neither windows nor a softcap"),
        ({"softcap": 2.0}, "has neither windows nor a softcap"),
        ({"sinks": True}, "does not do sinks"),
        ({"cache_dtype": FP8}, "stores the cache as torch.float32"),
        ({"num_kv_heads": 2}, "needs one vector per token, got 2 kv heads"),
        ({"latent_size": 0}, "needs values that are a part of the vector, got 0 of 48"),
        ({"latent_size": 64}, "needs values that are a part of the vector, got 64 of 48"),
    ],
)
def test_the_backend_refuses(changes: dict[str, Any], reason: str) -> None:
    spec = replace(SPEC, **changes)
    assert LatentBackend.accepts(spec, Capability("")).reason.startswith(reason)


def test_a_spec_survives_serialization() -> None:
    spec = SPEC
    assert AttentionSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    older = {name: value for name, value in spec.to_json().items() if name != "latent_size"}
    assert AttentionSpec.from_json(older).latent_size == 0


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path, fields = tmp_path_factory.mktemp("deepseek"), dict(examples.deepseek_v3()["groups"])
    del fields["architectures"]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(DeepseekV3Config(**fields), dtype=torch.float32)
    model.save_pretrained(path)
    return path, model


def rewritten(path: Path, target: Path, change: Callable[[dict[str, Tensor], Any], None]) -> Path:
    """Write a copy of a checkpoint whose tensors and config are changed."""
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    change(tensors, config)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_a_token_takes_one_vector_of_the_cache(deepseek: tuple[Path, Any]) -> None:
    planned = plan(deepseek[0], dtype="float32")
    config = deepseek[1].config
    size = config.kv_lora_rank + config.qk_rope_head_dim
    for layer in planned.model.attention_layers:
        layout = layer.backend.kv_layout()
        assert layout.page_bytes() == planned.page_size * size * 4
    (row,) = {row.choice.chosen.name for row in explain(planned).why("decoder").rows}
    assert row == "latent"


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, fields = tmp_path_factory.mktemp("glm"), dict(examples.glm4_moe()["groups"])
    del fields["architectures"]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(Glm4MoeConfig(**fields), dtype=torch.float32)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_mtp_layers_are_not_read(
    family: str, deepseek: tuple[Path, Any], glm: Path, tmp_path: Path
) -> None:
    path, prompt = glm if family == "glm" else deepseek[0], [1, 2, 3, 4]

    def add(tensors: dict[str, Tensor], config: Any) -> None:
        count = config["num_hidden_layers"]
        tensors[f"model.layers.{count}.eh_proj.weight"] = torch.zeros(4, 8)
        config["num_nextn_predict_layers"] = 1

    def add_without_a_word(tensors: dict[str, Tensor], config: Any) -> None:
        add(tensors, config)
        config["num_nextn_predict_layers"] = 0

    with_more = load(rewritten(path, tmp_path / "more", add), dtype="float32", cache_tokens=256)
    plain = load(path, dtype="float32", cache_tokens=256)
    assert torch.equal(with_more.logits(prompt), plain.logits(prompt))
    with pytest.raises(
        CheckpointError, match=r"eh_proj\.weight', which the model has no place for"
    ):
        load(rewritten(path, tmp_path / "wrong", add_without_a_word), dtype="float32")


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8-bit floats and their scales, in blocks of which the last may be smaller."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / torch.finfo(FP8).max
    codes = (blocks / scales[:, None, :, None]).to(FP8).flatten(2).flatten(0, 1)
    return codes[:rows, :columns].contiguous(), scales


def test_the_latent_projection_of_a_quantized_checkpoint_is_dequantized(
    deepseek: tuple[Path, Any], tmp_path: Path
) -> None:
    """It alone is stored in blocks, so that nothing else rounds."""

    def quantized(tensors: dict[str, Tensor], config: Any) -> None:
        for name in [name for name in tensors if name.endswith("kv_b_proj.weight")]:
            tensors[name], tensors[f"{name}_scale_inv"] = in_blocks(tensors[name])
        unquantized = [
            name.removesuffix(".weight")
            for name, tensor in tensors.items()
            if tensor.ndim == 2 and "kv_b_proj" not in name
        ]
        unquantized += [name.partition("experts.")[0] + "experts" for name in unquantized]
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": sorted({*unquantized}),
        }

    def rounded(tensors: dict[str, Tensor], config: Any) -> None:
        for name in [name for name in tensors if name.endswith("kv_b_proj.weight")]:
            codes, scales = in_blocks(tensors[name])
            spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            rows, columns = codes.shape
            tensors[name] = codes.float() * spread[:rows, :columns]

    prompt = list(range(40))
    path = deepseek[0]
    logits, expected, plain = (
        load(folder, dtype="float32", cache_tokens=256).logits(prompt)
        for folder in (
            rewritten(path, tmp_path / "fp8", quantized),
            rewritten(path, tmp_path / "rounded", rounded),
            path,
        )
    )
    # Rounding a product of a code and a scale to float32 once more is all that may differ.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert float((logits - plain).abs().max()) > 1e-3


def test_weights_are_updated(deepseek: tuple[Path, Any], tmp_path: Path) -> None:
    path, prompt = deepseek[0], [5, 6, 7, 8, 9]

    def change(tensors: dict[str, Tensor], config: Any) -> None:
        for name in [name for name in tensors if name.endswith("kv_b_proj.weight")]:
            tensors[name] = -tensors[name]

    updated = rewritten(path, tmp_path / "other", change)
    lm = load(path, dtype="float32", cache_tokens=256)
    before = lm.logits(prompt)
    changed = load_file(updated / "model.safetensors")
    lm.update_weights({n: t for n, t in changed.items() if n.endswith("kv_b_proj.weight")})
    expected = load(updated, dtype="float32", cache_tokens=256).logits(prompt)
    assert torch.equal(lm.logits(prompt), expected)
    assert not torch.equal(before, expected)


def test_quantizing_leaves_the_latent_projection_plain(
    deepseek: tuple[Path, Any], tmp_path: Path
) -> None:
    quantize(deepseek[0], tmp_path / "fp8", "fp8")
    stored = load_file(next((tmp_path / "fp8").glob("*.safetensors")))
    name = "model.layers.0.self_attn.{}.weight"
    assert stored[name.format("kv_b_proj")].dtype == torch.float32
    assert stored[name.format("q_b_proj")].dtype == FP8
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert any("kv_b_proj" in str(pattern) for pattern in config["quantization_config"]["ignore"])
    lm = load(tmp_path / "fp8", dtype="float32", cache_tokens=256)
    assert lm.logits([1, 2, 3]).isfinite().all()


class Mixed(DeepseekV3):
    """Keys and values of every head in the first layer, latent vectors in the others."""

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        spec = super().attention_spec(site, index, page_size)
        plain: dict[str, Any] = {"num_kv_heads": spec.num_heads, "head_size": self.rotary_size}
        return replace(spec, latent=False, latent_size=0, **plain) if index == 0 else spec

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        if index == 0:
            return DecoderFamily.self_attention(self, site, index, spec)
        return super().self_attention(site, index, spec)


def test_a_model_can_mix_latent_and_plain_caches(
    deepseek: tuple[Path, Any], tmp_path: Path
) -> None:
    """Both are of the same pool of pages: tokens in a batch are those of whole prompts."""
    size = deepseek[1].config.qk_rope_head_dim * deepseek[1].config.num_attention_heads

    def mix(tensors: dict[str, Tensor], config: Any) -> None:
        at = "model.layers.0.self_attn."
        for name in [name for name in tensors if name.startswith(at)]:
            del tensors[name]
        generator = torch.Generator().manual_seed(3)
        hidden = config["hidden_size"]
        for part in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{at}{part}.weight"] = 0.1 * torch.randn(size, hidden, generator=generator)
        tensors[f"{at}o_proj.weight"] = 0.1 * torch.randn(hidden, size, generator=generator)

    path = rewritten(deepseek[0], tmp_path / "mixed", mix)
    architectures = ("DeepseekV3ForCausalLM",)
    record = ModelEntry(architectures, "mixed", f"{__name__}:Mixed", score=50.0)
    prompts = [list(range(n)) for n in (1, 17, 40)]
    with register(SimpleNamespace(interposer_records=hookimpl(lambda: [record])), "acme"):
        lm = load(path, dtype="float32", cache_tokens=1024, max_sequences=3)
        layers = plan(path, dtype="float32").model.attention_layers
        layouts = [layer.backend.kv_layout() for layer in layers]
        assert [len(layout.page_shape) for layout in layouts] == [4, 2, 2]
        for prompt, completion in zip(
            prompts, lm.generate(prompts, max_new_tokens=12, ignore_eos=True), strict=True
        ):
            tokens = [*prompt, *completion.token_ids]
            best = lm.logits(tokens)[len(prompt) - 1 : -1].argmax(-1)
            assert best.tolist() == list(completion.token_ids)


CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
V2 = {**CONFIG, "architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 2}
GREEDY = {"topk_method": "group_limited_greedy"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {**CONFIG, "num_key_value_heads": 2},
            "num_key_value_heads 2 is not num_attention_heads 4",
        ),
        ({**CONFIG, "kv_lora_rank": 0}, "kv_lora_rank: Input should be greater than 0"),
        ({**CONFIG, "qk_rope_head_dim": 7}, "the rotated part of a head is 7, must be positive"),
        ({**CONFIG, "qk_nope_head_dim": 2**23}, "exceed the limit of 16777216 elements"),
        ({**CONFIG, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but"),
        ({**CONFIG, "scoring_func": "softmax"}, "scoring_func: Input should be 'sigmoid'"),
        ({**CONFIG, "topk_method": "greedy"}, "topk_method: Input should be 'noaux_tc'"),
        ({**CONFIG, "moe_layer_freq": 2}, "moe_layer_freq: Input should be 1"),
        ({**CONFIG, "n_group": 3}, "256 experts are not 3 groups of at least two"),
        ({**CONFIG, "topk_group": 9}, "topk_group 9 exceeds n_group 8"),
        ({**CONFIG, "num_experts_per_tok": 129}, "exceeds the experts of 4 groups of 32"),
        (
            {**CONFIG, "rope_scaling": {**YARN, "mscale_all_dim": "1"}},
            "mscale_all_dim of rope_parameters is '1', must be a number from 0",
        ),
        (
            {**CONFIG, "rope_scaling": {**YARN, "mscale_all_dim": 1, "factor": 1e300}},
            "factor of rope_parameters is 1e+300, must be a number",
        ),
        ({**V2, "norm_topk_prob": True}, "norm_topk_prob: Input should be False"),
        ({**V2, "topk_method": "noaux_tc"}, "topk_method: Input should be 'greedy' or"),
        ({**V2, **GREEDY}, "n_group and topk_group must be numbers"),
        ({**V2, **GREEDY, "n_group": 7, "topk_group": 1}, "64 experts are not 7 groups"),
        ({**CONFIG, "num_nextn_predict_layers": 65}, "less than or equal to 64"),
    ],
)
def test_configs_are_refused(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        plan(tmp_path)
    assert reason in str(caught.value)


JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 7, 10**9, 10**30, 0.5, 1e300, float("nan"), float("inf")),
    *("", "x", "16", [], [0, 0], [None], {}, {"a": {"b": []}}),
)
READ = sorted({*DeepseekV3.model_fields, "rope_scaling", "n_routed_experts"})


@pytest.mark.parametrize(("family", "config"), [(DeepseekV3, CONFIG), (DeepseekV2, V2)])
def test_any_field_value_is_accepted_or_refused(
    family: type[LatentFamily], config: dict[str, Any]
) -> None:
    """Alone, and within the parameters of long angles."""
    angles = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "rope_theta": 1e4}
    changes: list[dict[str, Any]] = [{name: junk} for name in READ for junk in JUNK]
    changes += [{"rope_scaling": {**angles, name: junk}} for name in angles for junk in JUNK]
    accepted = refused = 0
    for change in changes:
        try:
            parsed = family.parse({**config, **change}, "config.json")
        except InterposerError:
            refused += 1
            continue
        accepted += 1
        assert 0 < parsed.score_scale < math.inf, change
        assert parsed.grouping.top_groups <= parsed.grouping.num_groups, change
        assert parsed.head_size > parsed.rotary_size > 0, change
    assert accepted > 100
    assert refused > 300
