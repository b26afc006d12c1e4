"""transformers quantizes a model during loading, as ``load(..., quantization=...)`` does."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    LlamaConfig,
    Qwen3Config,
    T5Config,
)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from interposer import explain
from interposer.errors import ConfigError, UnknownNameError
from interposer_adapt.quantizer import InterposerConfig
from interposer_engine import load

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-biased": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen3-tied": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}
# Of weights alone: where inputs are rounded too, two ways to the same sum may part at a tie.
WEIGHT_ONLY: dict[str, dict[str, Any]] = {
    "int8": {"quant_method": "int8", "activations": "none"},
    "int4": {"quant_method": "int4", "group_size": 32},
    "int4-asymmetric": {"quant_method": "int4", "asymmetric": True, "head": "int4"},
    "plain-head": {"quant_method": "int8", "activations": "none", "head": "plain"},
    "left-out": {
        "quant_method": "int4",
        "modules_to_not_convert": ["model.layers.1.self_attn.q_proj"]
        + [f"model.layers.1.self_attn.{name}_proj" for name in "kv"],
    },
}
IDS = torch.tensor([[5, 3, 8, 127, 0, 64, 2, 2]])


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]()).save_pretrained(path)
    return path


def quantized(path: Path, config: Any, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, dtype=torch.float32, **kwargs
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        actual: torch.Tensor = model(IDS).logits[0]
    return actual


def of_load(path: Path, quantization: Any) -> torch.Tensor:
    model = load(path, dtype="float32", quantization=quantization, cache_tokens=64)
    return model.logits(IDS[0].tolist())


@pytest.mark.landing(2)
@pytest.mark.parametrize("label", WEIGHT_ONLY)
def test_logits_equal_the_loaded_model(folder: Path, label: str) -> None:
    settings = WEIGHT_ONLY[label]
    plain = logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    actual = logits(quantized(folder, InterposerConfig(settings)))
    expected = of_load(folder, settings)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert (actual - plain).abs().max() > 100 * (actual - expected).abs().max(), "it was quantized"


@pytest.mark.landing(2)
@pytest.mark.parametrize("method", ["int8", "int4", "w4a8", "fp8"])
def test_every_method_runs_with_its_defaults(folder: Path, method: str) -> None:
    model = quantized(folder, InterposerConfig(method))
    plain = logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    actual, expected = logits(model), of_load(folder, method)
    # Rounded inputs may part at ties, so that sums differ by far less than by the rounding itself.
    assert (actual - expected).norm() <= 0.1 * (expected - plain).norm()
    module_names = {name for name, _ in model.named_modules()}
    assert set(model.hf_quantizer.quantized) <= module_names
    assert "lm_head" in model.hf_quantizer.quantized
    generated = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, IDS.shape[1] + 4)
    text = str(explain(model.hf_quantizer))
    assert f"scheme 'online_{method}'" in text
    prefixes = {prefix for row in explain(model.hf_quantizer).rows for prefix in row.prefixes}
    assert "model.layers.0.self_attn.q_proj" in prefixes


def test_plain_weights_are_freed_after_quantization(folder: Path) -> None:
    model = quantized(folder, InterposerConfig("int8"))
    assert not any("proj" in name and "weight" in name for name, _ in model.named_parameters())
    layer = model.model.layers[0].mlp.gate_proj
    assert (layer.weight.shape, layer.weight.dtype) == ((96, 64), torch.float32)
    assert layer.weight.device == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"reads the plain weight of model\.layers\.0\.mlp\.gate"):
        layer.weight.sum()


@pytest.mark.landing(1)
def test_a_config_json_may_name_the_method(folder: Path, tmp_path: Path) -> None:
    """``from_pretrained`` and ``load`` follow the settings of a folder of plain weights."""
    settings = {"quant_method": "int4", "group_size": 16}
    configured = Path(shutil.copytree(folder, tmp_path / "asked"))
    config = json.loads((configured / "config.json").read_text())
    config["quantization_config"] = InterposerConfig(settings).to_dict()
    assert config["quantization_config"] == {
        "quant_method": "interposer",
        "method": "int4",
        "group_size": 16,
    }
    (configured / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(configured, dtype=torch.float32)
    expected = of_load(folder, settings)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of_load(configured, None), expected, rtol=0, atol=0)
    # The config in code overrides the config of the folder.
    torch.testing.assert_close(of_load(configured, "int8"), of_load(folder, "int8"), rtol=0, atol=0)
    del config["quantization_config"]["method"]
    (configured / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="must be the name of a method"):
        load(configured)


def test_copies_share_quantized_weights(folder: Path) -> None:
    model = quantized(folder, InterposerConfig("int8"))
    expected = logits(model)
    copied = copy.deepcopy(model)
    del model
    assert torch.equal(logits(copied), expected)
    config = InterposerConfig("int4", group_size=32)
    assert pickle.loads(pickle.dumps(config)).to_dict() == copy.deepcopy(config).to_dict()


def test_unsupported_operations_are_refused(folder: Path, tmp_path: Path) -> None:
    model = quantized(folder, InterposerConfig("int8"))
    with pytest.raises(ConfigError, match=r"cannot be saved\. Try: `interposer quantize"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"packed for this processor.*cannot be pickled"):
        pickle.dumps(model)
    with pytest.raises(ConfigError, match=r"cannot be trained\. Try: load the model without"):
        model.train()
    with pytest.raises(ConfigError, match=r"for torch\.float32 on cpu, not for torch\.bfloat16"):
        model.to(torch.bfloat16)
    assert model.to(torch.float32) is model


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: InterposerConfig("int9"), UnknownNameError, "'int9'.*nearest first: 'int4'"),
        (lambda: InterposerConfig({"group_size": 32}), ConfigError, "name of a method"),
        (lambda: InterposerConfig(8), ConfigError, "name of a method"),  # type: ignore[arg-type]
    ],
)
def test_a_config_without_a_method_is_refused_at_once(
    make: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make()


def test_settings_are_checked_before_weights_are_read(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(folder / "config.json", empty)
    (empty / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UnknownNameError, match=r"'grup_size'.*'group_size'"):
        quantized(empty, InterposerConfig("int4", grup_size=32))


def test_a_quantized_model_is_not_quantized_again(folder: Path, tmp_path: Path) -> None:
    second_folder = Path(shutil.copytree(folder, tmp_path / "other"))
    config = json.loads((second_folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (second_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="FineGrainedFP8Config but you are passing"):
        quantized(second_folder, InterposerConfig("int8"))


def test_encoders_and_encoder_decoders_are_quantized(tmp_path: Path) -> None:
    """Families that ``load`` does not know: every projection of torch's own type."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = BertConfig(**sizes, intermediate_size=96, vocab_size=128)
    t5 = T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=128)
    for label, config in (("bert", bert), ("t5", t5)):
        path = tmp_path / label
        plain = AutoModel.from_config(config).eval()
        plain.save_pretrained(path)
        model = AutoModel.from_pretrained(path, quantization_config=InterposerConfig("int8"))
        kwargs = {"decoder_input_ids": IDS} if label == "t5" else {}
        with torch.no_grad():
            actual = model(IDS, **kwargs).last_hidden_state
            expected = plain(IDS, **kwargs).last_hidden_state
        assert 0 < (actual - expected).norm() < 0.1 * expected.norm(), label
        assert not [n for n, m in model.named_modules() if type(m) is torch.nn.Linear]


@pytest.mark.slow
@pytest.mark.process
def test_the_method_is_registered_once() -> None:
    assert AUTO_QUANTIZER_MAPPING["interposer"].__module__.startswith("interposer_adapt")
    code = """
import sys
from interposer_adapt.quantizer import InterposerConfig
first = InterposerConfig
del sys.modules["interposer_adapt.quantizer"]
from interposer_adapt.quantizer import InterposerConfig
assert first is InterposerConfig
del sys.modules["interposer_adapt.quantizer"]
from transformers.quantizers import auto
auto.AUTO_QUANTIZER_MAPPING["interposer"] = object
from interposer.errors import ConfigError
try:
    import interposer_adapt.quantizer
except ConfigError as error:
    assert "knows the quantization method 'interposer' already" in str(error), error
else:
    raise AssertionError("another quantizer was replaced")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
