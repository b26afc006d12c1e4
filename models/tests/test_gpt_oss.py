"""gpt-oss: its config, its experts in MXFP4 and its attention, beside transformers.

Plain checkpoints of it are among those of ``test_parity``. No library that installs here writes
MXFP4 experts, so these tests write the published layout themselves, and let transformers read it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import Mxfp4Config

from interposer import Config, explain
from interposer.errors import CheckpointError, ConfigError
from interposer_engine import load, plan, quantize
from interposer_models.families import GptOss
from interposer_ops.layers.moe.experts import Experts
from interposer_ops.quantizers import quantize_mxfp4
from interposer_quantization import Mxfp4Experts

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
HIDDEN, INNER, NUM_EXPERTS = 64, 96, 6
PREFIX = "model.layers.0.mlp.experts"
# Each of three blocks adds up at most 96 terms, thrice: 3 * 3 * 96 * 2^-24 is half of it, relative
# to the largest logits, which are above 1.
FLOAT32: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
Change = Callable[[dict[str, torch.Tensor]], None]


def quantized(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a plain checkpoint with its experts in MXFP4, in the layout of the released ones."""
    stored = {}
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed, scales = quantize_mxfp4(tensor.transpose(1, 2).contiguous())
            stored[f"{name}_blocks"] = packed.unflatten(-1, (scales.shape[-1], 16)).contiguous()
            stored[f"{name}_scales"] = scales
        else:
            stored[name] = tensor.contiguous()
    return stored


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({n: v for n, v in config.items() if v != "absent"}))


@pytest.fixture(scope="module")
def plain(gpt_oss: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The directory of a plain model whose sinks and experts matter, and transformers' model."""
    path, model = tmp_path_factory.mktemp("plain"), copy.deepcopy(gpt_oss[1])
    (path / "tokenizer.json").write_bytes((gpt_oss[0] / "tokenizer.json").read_bytes())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Scores and gates from far below to far above the clamps.
            scale = 1.0 if name.endswith("sinks") else 0.5 if "experts" in name else 0.0
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path)
    return path, model


@pytest.fixture(scope="module")
def checkpoint(plain: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with experts in MXFP4."""
    path = tmp_path_factory.mktemp("mxfp4")
    for source in plain[0].iterdir():
        (path / source.name).write_bytes(source.read_bytes())
    save_file(quantized(load_file(plain[0] / "model.safetensors")), path / "model.safetensors")
    edit_config(path, quantization_config=MXFP4)
    return path


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    for source in checkpoint.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    return tmp_path


def spoil(path: Path, change: Change) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def token_ids(count: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].double()  # type: ignore[no-any-return]


def test_sinks_experts_and_windows_matter_and_agree(plain: tuple[Path, Any]) -> None:
    path, model = plain
    lm = load(path, dtype="float32", cache_tokens=1024)
    ids = token_ids(150)
    expected = logits_of(model, ids)
    torch.testing.assert_close(lm.logits(ids).double(), expected, **FLOAT32)
    for spoiled in ("self_attn.sinks", "router.bias", "gate_up_proj_bias", "down_proj_bias"):
        tensors = load_file(path / "model.safetensors")
        layer_tensors = {n: t for n, t in tensors.items() if n.startswith("model.layers.1.")}
        lm.update_weights(
            {n: 0 * t if n.endswith(spoiled) else t for n, t in layer_tensors.items()}
        )
        assert (lm.logits(ids) - expected).abs().max() > 1e-2, spoiled
        lm.update_weights(layer_tensors)
    torch.testing.assert_close(lm.logits(ids).double(), expected, **FLOAT32)


def test_packed_experts_equal_the_experts_that_transformers_unpacks(checkpoint: Path) -> None:
    """Bit for bit, in the order of transformers: inputs before outputs, gates in turn."""
    tensors = load_file(checkpoint / "model.safetensors")
    experts = Experts(site_of(checkpoint), spec_of(checkpoint))
    for name, parameter in experts.named_parameters():
        parameter.data.copy_(tensors[f"{PREFIX}.{name}"])
    unpacked = experts.method.dequantized(experts)
    assert isinstance(experts.method, Mxfp4Experts)
    assert unpacked is not None
    for name, ours in zip(("gate_up_proj", "down_proj"), unpacked, strict=True):
        stored = (tensors[f"{PREFIX}.{name}_{kind}"] for kind in ("blocks", "scales"))
        theirs = convert_moe_packed_tensors(*stored, dtype=torch.float64).transpose(1, 2)
        if name == "gate_up_proj":
            theirs = torch.cat((theirs[:, ::2], theirs[:, 1::2]), 1)
        assert torch.equal(ours, theirs)


def test_logits_equal_transformers_on_the_same_checkpoint(checkpoint: Path) -> None:
    """Every product of a code and its scale is exact in float32, so only sums are rounded."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    ).eval()
    lm = load(checkpoint, dtype="float32", cache_tokens=1024)
    for count in (1, 17, 150):
        ids = token_ids(count)
        torch.testing.assert_close(lm.logits(ids).double(), logits_of(model, ids), **FLOAT32)
    prompt = token_ids(23)
    (completion,) = lm.generate([prompt], max_new_tokens=32)
    token_tensor = torch.tensor([prompt])
    output = model.generate(
        token_tensor,
        attention_mask=torch.ones_like(token_tensor),
        do_sample=False,
        max_new_tokens=32,
        min_new_tokens=32,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert list(completion.token_ids) == output[0, len(prompt) :].tolist()


def test_logits_of_mxfp4_experts_are_near_the_plain_ones(
    checkpoint: Path, plain: tuple[Path, Any]
) -> None:
    exact = load(plain[0], dtype="float32", cache_tokens=1024).logits(token_ids(60))
    narrow = load(checkpoint, dtype="float32", cache_tokens=1024).logits(token_ids(60))
    # MXFP4 keeps one bit after the first, so weights are off by about a tenth.
    assert 0.01 < (narrow - exact).norm() / exact.norm() < 1


def held_bytes(checkpoint: Path, config: Config | None = None) -> int:
    """Return the bytes of the first layer's experts, of which nothing is left but operands."""
    lm = load(checkpoint, dtype="float32", cache_tokens=1024, config=config)
    (layer, *_) = [m for m in lm.engine.model.modules() if isinstance(m, Experts)]
    assert list(layer.parameters()) == []
    tensors = [t for t in layer.operands if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in tensors if t.dtype == torch.uint8)


def test_experts_are_in_memory_once_in_four_bits(checkpoint: Path) -> None:
    weights = 3 * NUM_EXPERTS * HIDDEN * INNER
    in_turn = Config(kernels={"fused_experts_mxfp4": "fused_experts_mxfp4_in_turn"})
    assert held_bytes(checkpoint, in_turn) == weights // 2 + weights // 32
    # A kernel may hold more outputs than there are, in whole vectors.
    assert weights // 2 + weights // 32 <= held_bytes(checkpoint) < weights


def test_choices_are_explained(checkpoint: Path) -> None:
    text = str(explain(load(checkpoint, cache_tokens=1024)).all())
    assert "kernel 'fused_experts_mxfp4'" in text
    assert "scheme 'mxfp4'" in text
    assert "sdpa (interposer-cpu 0.1.0): does not do sinks" in text
    assert "layer 'router'" in text
    for backend in ("paged",):
        pinned = Config(attention={"decoder": backend})
        assert f"]: {backend} (" in str(explain(plan(checkpoint, config=pinned)))


def test_the_default_dtype_is_bfloat16(copied: Path) -> None:
    edit_config(copied, dtype="absent", torch_dtype="absent")
    assert plan(copied).dtype == torch.bfloat16
    edit_config(copied, torch_dtype="float32")
    assert plan(copied).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_updated_in_place(copied: Path, dtype: str) -> None:
    lm = load(copied, dtype=dtype, cache_tokens=1024)
    ids, before = token_ids(40), lm.logits(token_ids(40))
    tensors = load_file(copied / "model.safetensors")
    first = {n: t for n, t in tensors.items() if n.startswith(PREFIX)}
    updated = {n: t.flip(0) for n, t in first.items()}
    assert lm.update_weights(updated) == ()
    spoil(copied, lambda stored: stored.update({n: t.contiguous() for n, t in updated.items()}))
    changed = lm.logits(ids)
    assert not torch.equal(changed, before)
    assert torch.equal(changed, load(copied, dtype=dtype, cache_tokens=1024).logits(ids))
    assert lm.update_weights(first) == ()
    assert torch.equal(lm.logits(ids), before)
    with pytest.raises(CheckpointError, match="goes together with"):
        lm.update_weights({f"{PREFIX}.down_proj_blocks": first[f"{PREFIX}.down_proj_blocks"]})


def test_shards_are_read_one_after_the_other(checkpoint: Path, copied: Path) -> None:
    """Tensors of one layer in different files, as the released checkpoints have them."""
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    places = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({n: tensors[n] for n in tensors if places[n] == file}, copied / file)
    index = {"metadata": {}, "weight_map": places}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    ids = token_ids(30)
    single, parts = (load(p, dtype="float32", cache_tokens=1024) for p in (checkpoint, copied))
    assert torch.equal(single.logits(ids), parts.logits(ids))


def nan_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{PREFIX}.down_proj_scales"][1, 2, 0] = 255


def missing_scales(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{PREFIX}.gate_up_proj_scales"]


def flat_blocks(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{PREFIX}.gate_up_proj_blocks"
    tensors[name] = tensors[name].flatten(2)


def float_scales(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{PREFIX}.down_proj_scales"
    tensors[name] = tensors[name].float()


def infinite_sink(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.sinks"][3] = torch.inf


@pytest.mark.landing(4)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nan_scale, r"down_proj_scales: 1 of 1152 scales are 255, .* the first at \[1, 2, 0\]"),
        (missing_scales, r"lacks the tensor 'model.layers.0.mlp.experts.gate_up_proj_scales'"),
        (flat_blocks, r"gate_up_proj_blocks' has shape \[6, 192, 32\], .* \[6, 192, 2, 16\]"),
        (float_scales, r"down_proj_scales' is stored as torch.float32, expected torch.uint8"),
        (infinite_sink, r"layers.1.self_attn.sinks: holds a score that is infinite or not a numb"),
    ],
)
def test_broken_tensors_are_refused_by_name(copied: Path, change: Change, message: str) -> None:
    spoil(copied, change)
    with pytest.raises(CheckpointError, match=message):
        load(copied, dtype="float32", cache_tokens=1024)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dequantize": True}, "quantization_config.dequantize = True"),
        ({"bits": 4}, "setting 'bits'"),
        ({"modules_to_not_convert": ["("]}, "not a regular expression"),
    ],
)
def test_unsupported_settings_are_refused(
    copied: Path, settings: dict[str, Any], message: str
) -> None:
    edit_config(copied, quantization_config={**MXFP4, **settings})
    with pytest.raises(ConfigError) as raised:
        plan(copied)
    assert message in str(raised.value)


def test_experts_whose_inputs_fill_no_blocks_are_refused(copied: Path) -> None:
    edit_config(copied, intermediate_size=80)
    message = "layers.0.mlp.experts: blocks of 32 do not divide its 80 inputs"
    with pytest.raises(ConfigError, match=message):
        plan(copied)


def test_experts_not_quantized_by_the_config_are_plain(
    plain: tuple[Path, Any], copied: Path
) -> None:
    left_out = {**MXFP4, "modules_to_not_convert": ["model.layers.1.mlp.experts"]}
    edit_config(copied, quantization_config=left_out)
    stored = load_file(plain[0] / "model.safetensors")

    def unpack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.1.mlp.experts")]:
            del tensors[name]
        tensors |= {n: t for n, t in stored.items() if "layers.1.mlp.experts" in n}

    spoil(copied, unpack)
    lm = load(copied, dtype="float32", cache_tokens=1024)
    methods = [type(m.method).__name__ for m in lm.engine.model.modules() if isinstance(m, Experts)]
    assert methods == ["Mxfp4Experts", "PlainExperts", "Mxfp4Experts"]
    assert lm.logits(token_ids(9)).isfinite().all()


def test_linear_layers_beside_experts_are_quantized_and_calibrated(
    gpt_oss: tuple[Path, Any], tmp_path: Path
) -> None:
    """Copying reads every tensor by the name that it is stored under, sinks and experts too."""
    text = tmp_path / "text"
    text.write_text(str(list(range(400))))
    result = quantize(gpt_oss[0], tmp_path / "out", "int4", group_size=32, calibrate=text)
    lm = load(result.path, dtype="float32", cache_tokens=1024)
    assert "kernel 'w4a16_linear'" in str(explain(lm))
    assert "kernel 'fused_experts'" in str(explain(lm))
    assert lm.logits(token_ids(9)).isfinite().all()


def test_omitted_fields_have_the_defaults_of_transformers() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 512,
    }
    peer: Any = GptOssConfig(**sizes)
    ours = GptOss.parse(sizes, "config.json")
    assert ours.head_size == peer.head_dim
    assert ours.attention_bias == peer.attention_bias
    assert ours.num_local_experts == peer.num_local_experts
    assert ours.num_experts_per_tok == peer.num_experts_per_tok
    assert ours.rms_norm_eps == peer.rms_norm_eps
    assert ours.rope_theta == peer.rope_parameters["rope_theta"]
    slides = [kind == "sliding_attention" for kind in peer.layer_types]
    assert ours.windows == tuple(peer.sliding_window if slid else None for slid in slides)
    for name, value in peer.rope_parameters.items():
        default = {"beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 150000.0}.get(name)
        assert ours.rope_scaling.get(name, default) == value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0, experts compute with 7.0"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 exceeds num_local_experts 6"),
        ({"num_local_experts": None}, "num_local_experts and num_experts_per_tok must be numbers"),
        (
            {"intermediate_size": 2**24, "hidden_size": 2**24, "num_key_value_heads": 4},
            "exceed the limit of",
        ),
    ],
)
def test_impossible_moe_configs_are_refused(
    copied: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(copied, **changes)
    with pytest.raises(CheckpointError, match=message):
        plan(copied)


def site_of(path: Path) -> Any:
    from interposer import Site

    planned = plan(path, dtype="float32")
    return Site(planned.resolver, PREFIX, torch.float32)


def spec_of(path: Path) -> Any:
    (layer, *_) = [m for m in plan(path).model.modules() if isinstance(m, Experts)]
    return layer.spec
