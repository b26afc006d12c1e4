"""Decoders of checkpoints with an encoder of images or sounds, in all published layouts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from interposer.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    UnsupportedModelError,
)
from interposer_engine import load, plan, quantize
from interposer_models._families import examples, vision_language
from interposer_models._families.vision_language import AnyText, TextDecoder

TOKENS = list(range(3, 40))
WEIGHTS = "model.safetensors"
PLAIN_LAYER = "layers.0.self_attn.o_proj"
OLD, NEW = "language_model.model.", "model.language_model."


def written(folder: Path, config: dict[str, Any]) -> torch.Tensor:
    """Write a model of random weights, and return its logits of ``TOKENS``."""
    torch.manual_seed(0)
    model_class = getattr(transformers, config["architectures"][0])
    model = model_class(model_class.config_class(**config)).eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]  # type: ignore[no-any-return]


def rename(folder: Path, rename_tensor: Callable[[str], str]) -> None:
    tensors = {rename_tensor(name): t for name, t in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def restate(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def assert_logits(folder: Path, expected: torch.Tensor) -> None:
    logits = load(folder, dtype="float32", cache_tokens=64).logits(TOKENS)
    bound = 1e-4 * float(expected.abs().max())
    torch.testing.assert_close(logits, expected, rtol=0, atol=bound)


def as_modules(name: str) -> str:
    """Return a name as the modules of transformers 5 have it."""
    name = re.sub(r"^(vision_tower|audio_tower|multi_modal_projector|visual)\.", r"model.\1.", name)
    name = re.sub(r"^model\.(?=layers|embed_tokens|norm)", NEW, name)
    return name.replace(OLD, NEW).replace("language_model.lm_head", "lm_head")


def as_published(name: str) -> str:
    """Return a name as transformers 4.50 and earlier wrote it."""
    name = re.sub(r"^model\.(vision_tower|multi_modal_projector|visual)\.", r"\1.", name)
    return name.replace(NEW, OLD).replace("lm_head", "language_model.lm_head")


@pytest.mark.parametrize(
    ("example", "layout"),
    [
        (examples.any_text()["mistral3"], as_modules),
        (examples.gemma3_text()["mixed"], as_modules),
        (examples.gemma4_text()["shared"], as_published),
        (examples.paligemma()["first"], as_modules),
        (examples.qwen2_vl()["windowed"], as_modules),
        (examples.qwen3_vl()["tied"], as_published),
        (examples.qwen2_audio()["windowed"], as_modules),
        (examples.voxtral()["wide"], as_modules),
    ],
    ids=[
        "mistral3",
        "gemma3",
        "gemma4",
        "paligemma",
        "qwen2-vl",
        "qwen3-vl",
        "qwen2-audio",
        "voxtral",
    ],
)
@pytest.mark.filterwarnings("ignore:.*Sliding Window Attention")
def test_both_layouts_of_names_have_the_logits_of_transformers(
    tmp_path: Path, example: dict[str, Any], layout: Callable[[str], str]
) -> None:
    expected = written(tmp_path, example)
    before = load_file(tmp_path / WEIGHTS).keys()
    rename(tmp_path, layout)
    assert not {name for name in before if "layers.0.self_attn" in name} & (
        load_file(tmp_path / WEIGHTS).keys()
    )
    assert_logits(tmp_path, expected)


def test_stacked_experts_are_read_in_either_order(tmp_path: Path) -> None:
    """Published matrices are [inputs, outputs]; transformers 5 writes [outputs, inputs]."""
    expected = written(tmp_path, examples.qwen3_vl_moe()["some"])
    tensors = load_file(tmp_path / WEIGHTS)
    swapped = {n: t.mT.contiguous() if ".experts." in n else t for n, t in tensors.items()}
    assert {name for name in tensors if tensors[name].shape != swapped[name].shape}
    save_file(swapped, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert_logits(tmp_path, expected)


def test_experts_are_read_stacked_or_separately(tmp_path: Path) -> None:
    """Published checkpoints of Qwen3.5 stack all experts; transformers 5 writes them one by one."""
    expected = written(tmp_path, examples.qwen3_5_moe_vl()["half"])
    tensors = load_file(tmp_path / WEIGHTS)
    assert any(".experts.0.gate_proj." in name for name in tensors)
    assert_logits(tmp_path, expected)
    stacked = {name: t for name, t in tensors.items() if ".experts." not in name}
    for layer in range(4):
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(6)])
            for part in ("gate", "up", "down")
        )
        stacked |= {f"{prefix}gate_up_proj": torch.cat((gate, up), 1), f"{prefix}down_proj": down}
    save_file(stacked, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert_logits(tmp_path, expected)


def test_windows_of_paligemma_2_limit_its_context(tmp_path: Path) -> None:
    """Windows do not apply within a prompt, so a longer one could not be computed."""
    written(tmp_path, examples.paligemma()["second"])
    lm = load(tmp_path, dtype="float32", cache_tokens=256)
    with pytest.raises(ContextLengthError, match=r"201 tokens.* 200"):
        lm.generate([[1] * 201])
    with pytest.raises(ConfigError, match="lets prompt tokens attend to later ones"):
        load(tmp_path, dtype="float32", cache_tokens=256, prefix_cache=True)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """Return a checkpoint in which one layer of the decoder is plain, and the plain logits."""
    plain = tmp_path_factory.mktemp("plain")
    logits = written(plain, examples.any_text()["llava"])
    folder = plain / "quantized"
    quantize(plain, folder, "int8", ignore=[f"{NEW}{PLAIN_LAYER}"])
    return folder, logits


@pytest.mark.parametrize("prefix", [NEW, OLD, r"re:language_model\.model\."])
def test_skip_lists_of_quantized_checkpoints_may_name_modules_in_any_layout(
    quantized: tuple[Path, torch.Tensor], prefix: str
) -> None:
    folder, expected = quantized
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    others = [name for name in settings["ignore"] if PLAIN_LAYER not in name]
    restate(folder, quantization_config={**settings, "ignore": [*others, prefix + PLAIN_LAYER]})
    logits = load(folder, dtype="float32", cache_tokens=64).logits(TOKENS)
    # Each of 21 matrices and its inputs are rounded to 254 levels, an error of 0.6 % each; a matrix
    # that is read wrongly changes the logits by their own size.
    assert (logits - expected).abs().mean() <= 0.1 * expected.abs().mean()


def test_a_quantized_copy_names_the_plain_layers_of_the_encoder(
    quantized: tuple[Path, torch.Tensor],
) -> None:
    """Other programs also run the encoder, whose layers are not quantized."""
    folder, _ = quantized
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    tensors = load_file(folder / WEIGHTS)
    encoder = {name for name in tensors if name.startswith(("vision_tower", "multi_modal"))}
    assert len(encoder) > 10
    matrices = {name for name in encoder if tensors[name].ndim == 2}
    assert {name.removesuffix(".weight") for name in matrices} <= {*ignored}
    assert f"{OLD}{PLAIN_LAYER}.weight" in tensors


@pytest.mark.parametrize(
    "family",
    [c for c in vars(vision_language).values() if isinstance(c, type) and vars(c).get("defaults")],
)
def test_a_text_config_without_fields_has_the_defaults_of_transformers(
    family: type[TextDecoder],
) -> None:
    """transformers 4 wrote only those fields that differ from the defaults."""
    kinds: dict[type[TextDecoder], str] = {
        **{decoder: kind for kind, decoder in AnyText.decoders.items()},
        vision_language.GemmaText: "gemma",
        vision_language.Gemma2Text: "gemma2",
        vision_language.Gemma3Text: "gemma3_text",
        vision_language.Gemma4Text: "gemma4_text",
        vision_language.Llama4Text: "llama4_text",
        vision_language.Qwen2VL: "qwen2_vl_text",
        vision_language.Qwen3VL: "qwen3_vl_text",
        vision_language.Qwen3VLMoe: "qwen3_vl_moe_text",
        vision_language.Qwen3_5VL: "qwen3_5_text",
        vision_language.Qwen3_5MoeVL: "qwen3_5_moe_text",
        vision_language.VoxtralText: "llama",
    }
    theirs: Any = CONFIG_MAPPING[kinds[family]]()
    if family is vision_language.VoxtralText:
        # These defaults are of the whole model.
        theirs = transformers.VoxtralConfig(text_config={}).text_config
    if family is vision_language.Gemma2Text:
        # Its prompts see each other as far as a window reaches.
        theirs.max_position_embeddings = theirs.sliding_window
    ours = family.parse({"text_config": {"model_type": kinds[family]}}, "config.json")
    names = set(type(ours).model_fields)
    if family is vision_language.Gemma4Text:
        # Of each layer; ours follow from global_head_dim.
        names -= {"head_dim", "num_key_value_heads", "per_layer_config"}
    for name in names:
        unstated = {"dtype", "quantization_config", "rope_parameters", "tie_word_embeddings"}
        expected = getattr(theirs, name, None)
        expected = tuple(expected) if isinstance(expected, list) else expected
        if expected is None or name in {*unstated, "layer_types", "no_rope_layers", "moe_layers"}:
            continue
        ours_by_property = {"head_dim": ours.head_size, "num_key_value_heads": ours.num_kv_heads}
        assert ours_by_property.get(name, getattr(ours, name)) == expected, name
    # The first layer with full attention: Gemma 3 has other angles in windows.
    base, scaling = ours.rotation((*ours.windows, None).index(None) % ours.num_hidden_layers)
    rope = theirs.rope_parameters
    rope = rope.get("full_attention", rope)
    assert base == rope["rope_theta"]
    assert scaling.get("rope_type", "default") == rope["rope_type"]


def test_the_settings_of_the_decoder_must_be_there(tmp_path: Path) -> None:
    written(tmp_path, examples.any_text()["llava"])
    restate(tmp_path, text_config=None)
    with pytest.raises(CheckpointError, match=r"text_config: must be the settings of the text m"):
        load(tmp_path)


def test_a_decoder_without_a_family_is_adapted(tmp_path: Path) -> None:
    llava = examples.any_text()["llava"]
    text_config = {**llava["text_config"], "model_type": "gemma", "head_dim": 16}
    expected = written(tmp_path, {**llava, "text_config": text_config})
    with pytest.raises(UnsupportedModelError, match=r"model_type 'gemma'; decoders are of llama, "):
        plan(tmp_path)
    assert_logits(tmp_path, expected)
