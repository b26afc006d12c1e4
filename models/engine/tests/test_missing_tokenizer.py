"""A model directory without a tokenizer loads and runs on token ids, whatever its family."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from interposer.errors import CheckpointError, RequestError
from interposer_engine import TextTokenizer, load, quantize

PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.landing(2)
@pytest.mark.parametrize("settings", [False, True], ids=["no settings", "settings"])
def test_a_model_without_a_tokenizer_runs_on_token_ids(
    pair: tuple[Path, Any], tmp_path: Path, settings: bool
) -> None:
    (expected,) = load(pair[0], cache_tokens=64).generate([PROMPT], max_new_tokens=4)
    shutil.copytree(pair[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    if settings:  # without a vocabulary, some classes of transformers make an empty tokenizer
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    lm = load(tmp_path, cache_tokens=64)
    (completion,) = lm.generate([PROMPT], max_new_tokens=4)
    assert completion.token_ids == expected.token_ids
    assert completion.text == ""
    assert [delta.text for delta in lm.stream(PROMPT, max_new_tokens=2)] == ["", ""]
    refused: tuple[tuple[Any, dict[str, Any]], ...] = (("text", {}), ([PROMPT], {"stop": ("x",)}))
    for prompts, params in refused:
        with pytest.raises(RequestError, match=r"holds no tokenizer[\s\S]*Try: "):
            lm.generate(prompts, max_new_tokens=2, **params)
    assert not lm.engine.busy


def test_features_that_need_texts_are_refused(copied: Path, tmp_path: Path) -> None:
    (copied / "tokenizer.json").unlink()
    text = tmp_path / "text"
    text.write_text("some text")
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        quantize(copied, tmp_path / "out", "int8", calibrate=text)


@pytest.mark.parametrize(
    ("name", "content", "package"),
    [
        ("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02", "sentencepiece"),
        ("tokenizer.model", b"YQ== 0\n", "tiktoken"),
        ("qwen.tiktoken", b"YQ== 0\n", "tiktoken"),
        ("tekken.json", b'{"config": {}, "vocab": []}', "mistral-common"),
    ],
)
def test_a_format_without_its_reader_names_the_package(
    copied: Path, name: str, content: bytes, package: str
) -> None:
    if any(each.name == package for each in metadata.distributions()):
        pytest.skip(f"{package} is installed")
    (copied / "tokenizer.json").unlink()
    (copied / name).write_bytes(content)
    said = rf"{name}: needs {package} .*to be read, [\s\S]*Try: pip install {package}.*, or add the"
    with pytest.raises(CheckpointError, match=said):
        TextTokenizer(copied).encode("text")
