"""Tokens and settings of the files beside tokenizer.json act as they do in AutoTokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from interposer.errors import CheckpointError
from interposer_engine import LanguageModel, TextTokenizer, load

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SIZE = len(ALPHABET)
GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}
TEMPLATE = "{% for m in messages %}<tool>{{ m.content }}</tool>{% endfor %}"
TEXT = "<tool> a b</tool><s> .c</s> <x><mask> 'm"
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def token(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, **FLAGS, "special": False, **flags}


DECODER = {str(SIZE): token("<tool>"), str(SIZE + 1): token("</tool>", special=True)}


def write(folder: Path, *own_tokens: AddedToken, **files: Any) -> Path:
    """Write the tokenizer of a model: single bytes, with ``own_tokens`` in tokenizer.json."""
    folder.mkdir(exist_ok=True)
    vocabulary = {text: index for index, text in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(own_tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def assert_as_transformers(folder: Path, text: str = TEXT) -> None:
    """Assert that encoding and decoding are those of AutoTokenizer."""
    expected, actual = AutoTokenizer.from_pretrained(folder), TextTokenizer(folder)
    ids = expected(text)["input_ids"]
    assert actual.encode(text) == ids
    for tokens in (ids, list(range(SIZE, len(expected)))):
        assert actual.decode(tokens) == expected.decode(tokens, skip_special_tokens=True)
    assert actual.vocabulary == expected.get_vocab()


FILES: dict[str, dict[str, Any]] = {
    "added_tokens_decoder": {"tokenizer_config": {"added_tokens_decoder": DECODER}},
    "its flags": {
        "tokenizer_config": {
            "added_tokens_decoder": {str(SIZE): token("<tool>", rstrip=True, normalized=True)}
        }
    },
    "added_tokens.json": {"added_tokens": {"</tool>": SIZE + 1, "<tool>": SIZE}},
    "special ones of added_tokens.json": {
        "added_tokens": {"<tool>": SIZE, "<s>": SIZE + 1, "<x>": SIZE + 2},
        "tokenizer_config": {"bos_token": "<s>"},
        "special_tokens_map": {"additional_special_tokens": ["<x>"]},
    },
    "an ignored added_tokens.json": {
        "added_tokens": {"<x>": SIZE},
        "special_tokens_map": {"bos_token": "<s>"},
        "tokenizer_config": {"added_tokens_decoder": DECODER},
    },
    "named tokens": {
        "tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<x>"}
    },
    "tokens as objects": {
        "tokenizer_config": {"mask_token": {"__type": "AddedToken", **token("<mask>", lstrip=True)}}
    },
    "special_tokens_map.json": {
        "tokenizer_config": {"bos_token": "<x>", "eos_token": "</s>"},
        "special_tokens_map": {"bos_token": token("<s>"), "eos_token": None, "pad_token": "<x>"},
    },
    "additional_special_tokens": {
        "tokenizer_config": {
            "additional_special_tokens": ["<x>", {"__type": "AddedToken", **token("<tool>")}]
        }
    },
    "extra_special_tokens": {
        "tokenizer_config": {
            "extra_special_tokens": ["<x>"],
            "additional_special_tokens": ["<tool>"],
        },
        "special_tokens_map": {"extra_special_tokens": ["</tool>"]},
    },
    "named extra_special_tokens": {
        "tokenizer_config": {
            "extra_special_tokens": {"image_token": "<x>"},
        }
    },
    "split_special_tokens": {
        "tokenizer_config": {"added_tokens_decoder": DECODER, "split_special_tokens": True}
    },
    "settings without effect": {
        "tokenizer_config": {
            "add_bos_token": True,
            "add_eos_token": True,
            "add_prefix_space": True,
            "bos_token": "<s>",
            "clean_up_tokenization_spaces": True,
        }
    },
    "a clean-up that is insisted on": {
        "tokenizer_config": {
            "clean_up_tokenization_spaces": True,
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
        }
    },
}


@pytest.mark.parametrize("name", FILES)
def test_tokens_and_settings_beside_tokenizer_json(tmp_path: Path, name: str) -> None:
    files = dict(FILES[name])
    files["tokenizer_config"] = GENERIC | files.get("tokenizer_config", {})
    assert_as_transformers(write(tmp_path, **files))


@pytest.mark.parametrize("settings", [{"bos_token": "<s>"}, {"added_tokens_decoder": DECODER}])
def test_tokens_that_tokenizer_json_has_with_other_flags(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    own_tokens = AddedToken("<tool>", special=True), AddedToken("</tool>"), AddedToken("<s>")
    assert_as_transformers(write(tmp_path, *own_tokens, tokenizer_config=GENERIC | settings))


@pytest.mark.parametrize("add_prefix_space", [True, False])
def test_classes_that_put_a_space_in_front(tmp_path: Path, add_prefix_space: bool) -> None:
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": add_prefix_space}
    folder = write(tmp_path, AddedToken("<|endoftext|>", special=True), tokenizer_config=settings)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert_as_transformers(folder)


@pytest.mark.parametrize("legacy", [True, False])
def test_llama_tokenizers_with_a_prepend_step(tmp_path: Path, legacy: bool) -> None:
    letters = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>", "▁", *"abc"])}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy}
    folder = write(tmp_path, tokenizer_config=settings)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert_as_transformers(folder, "<s>a b</s>c")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer_config": {"added_tokens_decoder": {"300": token("<tool>")}}},
            rf"tokenizer_config.json: the token '<tool>' has the id 300, .* with the id {SIZE}",
        ),
        ({"added_tokens": {"<x>": "y"}}, r"added_tokens.json: <x> is 'y', must be a token id"),
        ({"tokenizer_config": {"bos_token": 5}}, r"bos_token is 5, must be a text, or an object"),
        ({"special_tokens_map": {"eos_token": ["a"]}}, r"tokens_map.json: eos_token is \['a'\]"),
        ({"tokenizer_config": {"split_special_tokens": "no"}}, r"'no', must be true or false"),
        (
            {"tokenizer_config": {"additional_special_tokens": "<x>"}},
            r"additional_special_tokens is '<x>', must be a list of tokens",
        ),
        (
            {"tokenizer_config": {"bos_token": {"content": "<s>", "lstrip": 1}}},
            r"bos_token\.lstrip is 1, must be true or false",
        ),
    ],
)
def test_invalid_fields_are_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        TextTokenizer(write(tmp_path, **files)).encode("a")


def loaded(folder: Path) -> LanguageModel:
    """Return a tiny model with the tokenizer of a folder."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, vocab_size=SIZE + 8, num_attention_heads=2, num_key_value_heads=1)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": SIZE}))
    return load(folder, dtype="float32", cache_tokens=128)


def test_chats_and_texts_have_the_same_tokens(tmp_path: Path) -> None:
    settings = {**GENERIC, "added_tokens_decoder": DECODER, "chat_template": TEMPLATE}
    lm = loaded(write(tmp_path, tokenizer_config=settings))
    tokens = lm.tokenizer.encode("<tool>x</tool>")
    assert len(tokens) == 3
    assert lm.chat_prompt([{"role": "user", "content": "x"}]) == tokens
    (completion,) = lm.generate("x", max_new_tokens=2, logit_bias={SIZE: 100.0}, ignore_eos=True)
    assert completion.text == "<tool><tool>"


def test_an_end_token_is_no_part_of_the_text(tmp_path: Path) -> None:
    lm = loaded(write(tmp_path, AddedToken("<|im_end|>"), AddedToken("<|more|>")))
    (own,) = lm.generate("x", max_new_tokens=4, logit_bias={SIZE: 100.0})
    assert (own.text, own.token_ids, own.finish_reason) == ("", (SIZE,), "stop")
    bias, stops = {SIZE + 1: 100.0}, (SIZE + 1,)
    deltas = list(lm.stream("x", max_new_tokens=4, logit_bias=bias, stop_token_ids=stops))
    assert [(delta.text, delta.token_id) for delta in deltas] == [("", SIZE + 1)]
    (own,) = lm.generate("x", max_new_tokens=2, logit_bias={SIZE: 100.0}, ignore_eos=True)
    assert own.text == "<|im_end|>" * 2


def test_text_that_waits_for_more_comes_with_the_end_token(tmp_path: Path) -> None:
    lm = loaded(write(tmp_path, AddedToken("<|im_end|>")))
    first_byte = lm.tokenizer.encode("€")[0]
    bias = {first_byte: 50.0, SIZE: 49.0}
    deltas = list(lm.stream("x", logit_bias=bias, presence_penalty=2.0))
    assert [delta.token_id for delta in deltas] == [first_byte, SIZE]
    assert [delta.text for delta in deltas] == ["", "\N{REPLACEMENT CHARACTER}"]
