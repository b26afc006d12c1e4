"""A model in a GGUF file is the model that was written to it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tests.landing import landing_sample
from torch.utils import _pytree

from interposer import Config, current_registry, explain
from interposer.errors import (
    CheckpointError,
    ConfigError,
    RequestError,
    UnknownNameError,
    UnsupportedModelError,
)
from interposer_engine import Constraint, LanguageModel, load
from interposer_gguf._checkpoint import GGUFCheckpoint
from interposer_gguf._scheme import GGUF
from interposer_ops.layers.linear import Linear

SHIPPED = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
PROMPT = "import os\nimport sys\n\n\ndef main("
TOKENS = 32
Write = Callable[..., Path]
Dequantize = Callable[[Path], Path]


def loaded(path: Path, **settings: Any) -> LanguageModel:
    return load(path, dtype="float32", max_sequences=1, cache_tokens=256, **settings)


def greedy(lm: LanguageModel) -> tuple[int, ...]:
    return lm.generate(PROMPT, max_new_tokens=TOKENS)[0].token_ids


def ops(lm: LanguageModel) -> set[str]:
    return {row.choice.request.name for row in explain(lm).rows}


@pytest.mark.landing(1)
@pytest.mark.parametrize("stored_as", landing_sample(["f32", "f16", "bf16"], every=3, first=1))
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_float_file_generates_the_tokens_of_the_model_directory(
    directory: Callable[[str], Path], write: Write, name: str, stored_as: str
) -> None:
    source = directory(name)
    path = write(source, stored_as, pre="gpt-2")
    lm, reference = loaded(path), loaded(source)
    tokens = reference.tokenizer.encode(PROMPT)
    assert lm.tokenizer.encode(PROMPT) == tokens
    assert torch.equal(lm.logits(tokens), reference.logits(tokens))
    assert greedy(lm) == greedy(reference)


def test_names_agree_with_the_stream(directory: Callable[[str], Path], write: Write) -> None:
    for stored_as in ("f16", "q4_1"):
        file = GGUFCheckpoint.open(write(directory("qwen2"), stored_as))
        yielded = [name for name, _ in file.stream()]
        assert len(yielded) == len(set(yielded))
        assert file.names() == set(yielded)
        assert any(name.endswith("_proj.q4_1") for name in yielded) == (stored_as == "q4_1")


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    "stored_as",
    [
        "q8_0",
        "q4_0",
        "q4_1",
        pytest.param("q5_0", marks=pytest.mark.slow),
        pytest.param("q5_1", marks=pytest.mark.slow),
    ],
)
def test_blocks_generate_the_tokens_of_their_dequantized_values(
    directory: Callable[[str], Path], write: Write, dequantize: Dequantize, stored_as: str
) -> None:
    """The reference is the same model, of which all numbers are written out in float32."""
    assert_is_dequantized(write(directory("llama"), stored_as), dequantize)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stored_as", ["q4_k", pytest.param("q5_k", marks=pytest.mark.slow), "q6_k"]
)
def test_long_blocks_generate_the_tokens_of_their_dequantized_values(
    directory: Callable[[str], Path],
    write: Write,
    requantize: Write,
    dequantize: Dequantize,
    stored_as: str,
) -> None:
    path = write(directory("qwen2"), "f32")
    assert_is_dequantized(requantize(path, lambda _: stored_as), dequantize)


def test_a_file_of_mixed_formats_is_read(
    directory: Callable[[str], Path], write: Write, requantize: Write, dequantize: Dequantize
) -> None:
    """As llama-quantize writes them: layers that are fused here are stored in different ways."""
    types = {
        "attn_q.": "q4_k",
        "attn_k.": "q8_0",
        "attn_v.": "q4_k",
        "ffn_gate": "q6_k",
        "ffn_down": "q4_0",
        "token_embd": "q4_k",
        "output.": "q6_k",
    }

    def kind(name: str) -> str:
        return next((t for part, t in types.items() if part in name), "f32")

    path = requantize(write(directory("qwen2"), "f32"), kind)
    lm = assert_is_dequantized(path, dequantize)
    assert {"linear", "gguf_linear", "w8a16_linear", "w4a16_linear"} <= ops(lm)
    checkpoint = GGUFCheckpoint.open(path)
    names = dict(checkpoint.stream())
    prefix = "model.layers.0.self_attn"
    assert {f"{prefix}.q_proj.q4_k", f"{prefix}.k_proj.q8_0", f"{prefix}.v_proj.q4_k"} <= set(names)
    assert {"lm_head.q6_k", "model.embed_tokens.q4_k"} <= set(names)
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in names.values())


def test_weights_are_replaced_in_place(
    directory: Callable[[str], Path], write: Write, requantize: Write
) -> None:
    """Of a layer of two formats as well."""

    def kind(name: str) -> str:
        return "q4_k" if "attn_q." in name else "q8_0" if "blk." in name else "f32"

    plain = write(directory("qwen2"), "f32")
    paths = [requantize(plain, kind, seed) for seed in (0, 1)]
    lm, other = map(loaded, paths)
    tokens = lm.tokenizer.encode(PROMPT)
    assert not torch.equal(lm.logits(tokens), other.logits(tokens))
    assert lm.update_weights(GGUFCheckpoint.open(paths[1]).stream()) == ()
    assert torch.equal(lm.logits(tokens), other.logits(tokens))


def assert_is_dequantized(path: Path, dequantize: Callable[[Path], Path]) -> LanguageModel:
    """Compare with the file whose blocks the library has dequantized."""
    lm, reference = loaded(path), loaded(dequantize(path))
    tokens = reference.tokenizer.encode(PROMPT)
    expected = reference.logits(tokens)
    # Sums in another order, through two layers of random weights.
    size = float(expected.abs().max())
    torch.testing.assert_close(lm.logits(tokens), expected, atol=2e-5 * size, rtol=0)
    return lm


@pytest.mark.landing(1)
@pytest.mark.parametrize("stored_as", ["f16", "q8_0"])
def test_the_shipped_model_writes_the_same_program(write: Write, stored_as: str) -> None:
    path = write(SHIPPED, stored_as)
    lm, reference = loaded(path), loaded(SHIPPED)
    assert greedy(lm) == greedy(reference)
    completion = lm.generate(PROMPT, max_new_tokens=TOKENS)[0]
    assert completion.text == reference.generate(PROMPT, max_new_tokens=TOKENS)[0].text


@pytest.mark.slow
def test_four_bits_hardly_change_the_shipped_model(write: Write) -> None:
    """Perplexity of its own kind of text; llama.cpp finds the same figures of these files."""
    text = Path(__file__).read_text(encoding="utf-8")[:2000]
    found = {}
    for stored_as in ("f16", "q8_0", "q4_0"):
        lm = loaded(write(SHIPPED, stored_as))
        tokens = lm.tokenizer.encode(text)[:250]
        logs = lm.logits(tokens).double().log_softmax(-1)[:-1]
        found[stored_as] = 1 / float(logs.gather(1, torch.tensor(tokens[1:])[:, None]).mean().exp())
    assert found["q8_0"] == pytest.approx(found["f16"], rel=0.02)
    assert found["q4_0"] == pytest.approx(found["f16"], rel=0.25)
    assert found["q4_0"] != found["f16"]


@pytest.mark.landing(1)
@pytest.mark.parametrize(("stored_as", "num_bytes"), [("q4_1", 20), ("q5_0", 22)])
def test_weights_stay_packed(write: Write, stored_as: str, num_bytes: int) -> None:
    lm = loaded(write(SHIPPED, stored_as))
    layer = lm.engine.model.get_submodule("model.layers.0.mlp.gate_up_proj")
    assert isinstance(layer, Linear)
    operands = [o for o in _pytree.tree_leaves(layer.operands) if isinstance(o, torch.Tensor)]
    assert {tensor.dtype for tensor in operands} == {torch.uint8}
    assert sum(tensor.nbytes for tensor in operands) == 2 * 688 * 256 // 32 * num_bytes
    assert dict(layer.named_parameters()) == {}


def test_tensors_agree_with_the_model_directory(
    directory: Callable[[str], Path], write: Write
) -> None:
    source = directory("llama")
    stored = load_file(source / "model.safetensors")
    actual = dict(GGUFCheckpoint.open(write(source, "f32")).stream())
    assert actual.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(actual[name], tensor), name


def test_rope_factors_stretch_wavelengths(small: Callable[..., Path]) -> None:
    plain, stretched = small(), small("s.gguf", {"rope_freqs.weight": (8,)})
    factors = torch.linspace(1, 4, 8)
    file = gguf.GGUFReader(stretched, "r+")
    next(t for t in file.tensors if t.name == "rope_freqs.weight").data[:] = factors.numpy()
    file.data.flush()
    rope = GGUFCheckpoint.open(stretched).config["rope_parameters"]
    assert rope["short_factor"] == rope["long_factor"] == factors.tolist()
    lm, other = loaded(stretched), loaded(plain)
    cos = [m.engine.model.model.tables[0][0] for m in (lm, other)]
    assert torch.equal(cos[0][0], cos[1][0])
    torch.testing.assert_close(cos[0][4, 7], cos[1][1, 7])


@pytest.mark.landing(5)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"rope_type": "default"}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        # llama.cpp reads a factor without a type, and the old key, as linear scaling.
        ({"llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"llama.rope.scaling.factor": 2.0, "llama.rope.scale_linear": 4.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "default"},
        ),
        ({"llama.rope.scaling.factor": 0.0}, {"rope_type": "default"}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_is_read(
    small: Callable[..., Path], changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    path = small(**changes)
    assert GGUFCheckpoint.open(path).config["rope_parameters"] == expected
    loaded(path)


def test_every_combination_of_scaling_keys_is_read_by_the_rule_of_llama_cpp(
    small: Callable[..., Path],
) -> None:
    """Angles are those of llama.cpp, or the file is refused with the key that it lacks."""
    kinds, factors = (None, "none", "linear", "yarn"), (None, 0.0, 1.0, 4.0)
    for kind, factor, old_factor in itertools.product(kinds, factors, (None, 0.0, 2.0)):
        keys = {"scaling.type": kind, "scaling.factor": factor, "scale_linear": old_factor}
        path = small(**{f"llama.rope.{key}": value for key, value in keys.items()})
        # Source: llama.cpp, llama_model_base::load_hparams and llama_context. A missing type is
        # linear, the new key goes before the old one, 0 and no factor mean 1, none scales nothing.
        scale = factor if factor is not None else old_factor
        expected = ("none", 1.0) if kind == "none" else (kind or "linear", scale or 1.0)
        if scale is None and kind in ("linear", "yarn"):
            with pytest.raises(CheckpointError, match=r"'llama\.rope\.scaling\.factor'"):
                GGUFCheckpoint.open(path)
            continue
        rope = GGUFCheckpoint.open(path).config["rope_parameters"]
        read = rope["rope_type"], rope.get("factor", 1.0)
        # A factor of 1 leaves the angles as they are, whatever the type.
        assert read == expected or read[1] == expected[1] == 1.0, keys


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        (
            {"architecture": "mamba"},
            UnsupportedModelError,
            "the unsupported architecture 'mamba'; similar ones are",
        ),
        (
            {"architecture": "clip"},
            UnsupportedModelError,
            "holds the image or audio encoder of a model, .* load the GGUF file of the language",
        ),
        ({"llama.expert_count": 8}, CheckpointError, "lacks .*'llama.expert_used_count'"),
        (
            {"architecture": "qwen2", "qwen2.expert_count": 8},
            UnsupportedModelError,
            "has 'expert_count', but 'qwen2' is supported without experts only",
        ),
        ({"split.count": 3}, UnsupportedModelError, "is one of 3 parts of a model"),
        ({"llama.context_length": None}, CheckpointError, "lacks .*'llama.context_length'"),
        ({"llama.context_length": "64"}, CheckpointError, "= '64', must be an integer"),
        ({"llama.context_length": True}, CheckpointError, "= True, must be an integer"),
        ({"llama.attention.head_count": 0}, CheckpointError, "it has 0 heads"),
        ({"llama.attention.head_count": [2, 4]}, UnsupportedModelError, "differs between layers"),
        ({"llama.attention.head_count": 5}, UnsupportedModelError, "not pairs of 5 heads"),
        ({"llama.block_count": 2}, CheckpointError, "it has 2 blocks, but holds tensors of 1"),
        ({"llama.block_count": 2**31}, CheckpointError, "it has 2,147,483,648 blocks"),
        ({"llama.attention.value_length": 8}, UnsupportedModelError, "keys and values of diff"),
        ({"llama.rope.freq_base": float("nan")}, CheckpointError, "= nan, must be a number"),
        (
            {"llama.rope.scaling.type": "longrope"},
            UnsupportedModelError,
            "'longrope'; supported are",
        ),
        ({"tensors": {"token_embd.weight": None}}, CheckpointError, "lacks the tensor 'token_emb"),
        ({"tensors": {"ssm.weight": (2, 2)}}, UnsupportedModelError, "'ssm.weight', which no sup"),
        ({"tensors": {"blk.0.attn_q.bias": (32,)}}, UnsupportedModelError, "without 'blk.0.attn_o"),
        ({"tensors": {"rope_freqs.weight": (9,)}}, CheckpointError, "'rope_freqs.weight' as f32"),
        ({"tensors": {"blk.0.ffn_up.weight": (32, 32)}}, CheckpointError, "has shape"),
        ({"tensors": {"blk.0.ffn_up.weight": None}}, CheckpointError, "lacks the tensor 'model."),
    ],
)
def test_contradicting_metadata_is_refused(
    small: Callable[..., Path], changes: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    path = small(**changes)
    with pytest.raises(kind, match=reason):
        loaded(path)


def test_a_scale_that_is_not_finite_is_refused(small: Callable[..., Path]) -> None:
    path = small()
    file = gguf.GGUFReader(path, "r+")
    stored = next(t for t in file.tensors if t.name == "blk.0.ffn_up.weight")
    stored.data[3, 0:2] = (0, 0x7C)  # an infinite scale
    file.data.flush()
    with pytest.raises(CheckpointError, match=r"up_proj\.q8_0: holds a scale or an offset"):
        loaded(path)


def test_an_unquantized_weight_that_is_not_finite_is_refused(small: Callable[..., Path]) -> None:
    path = small()
    file = gguf.GGUFReader(path, "r+")
    stored = next(t for t in file.tensors if t.name == "blk.0.attn_norm.weight")
    stored.data[3] = float("nan")
    file.data.flush()
    name = "model.layers.0.input_layernorm.weight"
    with pytest.raises(CheckpointError, match=rf"small\.gguf: holds the tensor '{name}', 1 of "):
        load(path, cache_tokens=64)
    load(path, cache_tokens=64, config=Config(weight_check="off"))


def test_an_unknown_suffix_raises_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "model.ggml"
    path.write_bytes(b"ggml")
    with pytest.raises(CheckpointError, match=r"is neither .*\nTry: .* ends in \.gguf"):
        load(path)


def test_suffixes_ignore_case(small: Callable[..., Path]) -> None:
    assert loaded(small("SMALL.GGUF")).path.name == "SMALL.GGUF"


def test_without_the_plugin_the_file_is_refused(small: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"which is not used: .*\nTry: allow"):
        load(small(), config=Config(disable=frozenset({"gguf"})))


def test_the_explanation_names_the_format(small: Callable[..., Path]) -> None:
    rows = {row.choice.request.kind: row.choice for row in explain(small()).rows}
    assert rows["checkpoint"].chosen.qualified_name == "interposer-gguf/gguf"
    assert rows["checkpoint"].request.name == ".gguf"
    assert current_registry().subjects("checkpoint") == [".gguf"]


@pytest.mark.parametrize(
    ("settings", "kind", "reason"),
    [
        ({"quant_method": "gguf", "bits": 4}, UnknownNameError, "setting 'bits'"),
        ({"quant_method": "gguf"}, ConfigError, "tensors is None, must map names"),
        ({"quant_method": "gguf", "tensors": {"a": "q9"}}, UnknownNameError, "block format 'q9'"),
    ],
)
def test_the_scheme_refuses_unknown_settings(
    settings: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        GGUF.parse(settings)


@pytest.mark.slow
def test_constrained_texts_agree_with_the_model_directory(
    directory: Callable[[str], Path], write: Write
) -> None:
    source = directory("llama")
    constraint = Constraint.regex("(import|from) [a-z]{2,9}(, [a-z]{2,9}){3}")
    texts = [
        loaded(path).generate(PROMPT, constraint=constraint, max_new_tokens=60)[0]
        for path in (source, write(source, "f32", pre="gpt-2"))
    ]
    # Not the probabilities: "<|endoftext|>" may follow too where a file ends texts by it.
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[0].text == texts[1].text
    assert re.fullmatch(constraint.text, texts[0].text)


def test_a_picture_for_a_gguf_file_is_refused_with_the_next_action(
    directory: Callable[[str], Path], write: Write
) -> None:
    """llama.cpp keeps image encoders in a file of their own, which is not read."""
    lm = loaded(write(directory("llama"), "f32"))
    content = [{"type": "image", "image": b"a picture"}, {"type": "text", "text": "What is it?"}]
    with pytest.raises(RequestError, match=r"\(mmproj\) are not read. Try: load the folder of"):
        lm.chat([{"role": "user", "content": content}])
