"""The same GGUF file in llama.cpp and here: equal tokens of every family, equal perplexity.

``make test-foreign`` builds llama.cpp first, which takes long; nothing else runs these tests.
"""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.gguf_kinds import FIELDS
from tests.gguf_models import make, write

from interposer_engine import load

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "examples" / "models" / "stdlib-lm"
PROMPT = "import os\nimport sys\n\n\ndef main("
NUM_NEW = 32
# Tokens of each text, within the model's context; texts that the model was not trained on.
NUM_TOKENS, NUM_TEXTS = 900, 4
# Of llama.cpp's own quantizer, as enum llama_ftype of llama.h numbers them.
OWN = {"q4_k": 14, "q6_k": 18}
TOKENS = list(range(3, 31))
# Sizes by which llama.cpp tells models apart: it reads windows of EXAONE 4 in 64 blocks only, and
# queries of DeepSeek-V2 without a projection of their own in 27. Groups it chooses as V3 does. It
# rounds where yarn begins, which gpt-oss does not. Of a part of heads that is rotated, Bamba's has
# other pairs than the model.
WHOLE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
LIKE_THEIRS: dict[str, dict[str, Any]] = {
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 5},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "bamba": {"partial_rotary_factor": 1.0, "rope_parameters": WHOLE},
    "gemma4_text": {"vocab_size_per_layer_input": 4096, "initializer_range": 0.05},
    "deepseek_v2": {"num_hidden_layers": 27, "topk_method": "greedy", "n_group": 1},
}
# ggml has GELU in a table of float16, and approximates that of GPT-NeoX.
GELU = ("gemma2", "gemma3_text", "starcoder2", "gpt2", "bloom", "gpt_neox", "gemma4_text")
# What keeps lengths of keys above 0 is 1e-6 in the sum of squares, in llama.cpp the least length;
# of keys of random weights, whose squares add up to about 0.01, that is 5e-5 of each number.
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.fixture(scope="module")
def llama_cpp() -> Any:
    return importlib.import_module("llama_cpp")


@pytest.fixture(scope="module")
def files(llama_cpp: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the shipped model in every type, by the gguf library or by llama.cpp's quantizer."""
    folder = tmp_path_factory.mktemp("gguf")
    found = {}
    for kind in ("f32", "f16", "q8_0", "q4_0"):
        found[kind] = folder / f"{kind}.gguf"
        script = str(ROOT / "examples" / "write_gguf.py")
        command = [sys.executable, script, str(SHIPPED), str(found[kind]), "--type", kind]
        subprocess.run(command, check=True, capture_output=True)
    for kind, number in OWN.items():
        found[kind] = folder / f"{kind}.gguf"
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.nthread = number, 1
        source, target = str(found["f32"]).encode(), str(found[kind]).encode()
        assert llama_cpp.llama_model_quantize(source, target, options) == 0
    return found


@pytest.fixture(scope="module")
def examples() -> Iterator[None]:
    """Make the examples importable."""
    sys.path.insert(0, str(ROOT / "examples"))
    yield
    sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module")
def texts(examples: None) -> list[str]:
    corpus = importlib.import_module("stdlib_corpus")
    files = [file for file in corpus.held_out_files() if file.stat().st_size > 4 * NUM_TOKENS]
    step = len(files) // NUM_TEXTS
    return [corpus.read_text(file)[: 8 * NUM_TOKENS] for file in files[: NUM_TEXTS * step : step]]


class Theirs:
    """The file in llama.cpp."""

    def __init__(self, llama_cpp: Any, path: Path, **further: Any) -> None:
        options = {"n_ctx": 1024, "n_threads": 1, "logits_all": True, "verbose": False}
        self.model = llama_cpp.Llama(str(path), **options, **further)

    def encode(self, text: str) -> list[int]:
        return list(self.model.tokenize(text.encode(), add_bos=True))

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        self.model.reset()
        self.model.eval(list(tokens))
        return torch.from_numpy(np.array(self.model.scores[: len(tokens)]))

    def greedy(self, tokens: Sequence[int]) -> list[int]:
        self.model.reset()
        self.model.eval(list(tokens))
        found: list[int] = []
        for _ in range(NUM_NEW):
            found.append(int(np.argmax(self.model.scores[self.model.n_tokens - 1])))
            self.model.eval(found[-1:])
        return found


def nats(logits: torch.Tensor, tokens: Sequence[int]) -> float:
    """Return the cost of all tokens but the first."""
    targets = torch.tensor(tokens[1:])
    likelihood = logits[:-1].double().log_softmax(-1).gather(1, targets[:, None])
    return -float(likelihood.sum())


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_greedy_tokens_are_equal(kind: str, files: dict[str, Path], llama_cpp: Any) -> None:
    ours = load(files[kind], dtype="float32", max_sequences=1)
    theirs = Theirs(llama_cpp, files[kind])
    tokens = ours.tokenizer.encode(PROMPT)
    assert tokens == theirs.encode(PROMPT)
    (completion,) = ours.generate(PROMPT, max_new_tokens=NUM_NEW)
    assert list(completion.token_ids) == theirs.greedy(tokens)


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0", *OWN])
def test_perplexity_is_equal_within_half_a_percent(
    kind: str, files: dict[str, Path], texts: list[str], llama_cpp: Any
) -> None:
    ours = load(files[kind], dtype="float32", max_sequences=1)
    theirs = Theirs(llama_cpp, files[kind])
    costs, count = [0.0, 0.0], 0
    for text in texts:
        tokens = ours.tokenizer.encode(text)[:NUM_TOKENS]
        assert tokens == theirs.encode(text)[:NUM_TOKENS]
        costs[0] += nats(ours.logits(tokens), tokens)
        costs[1] += nats(theirs.logits(tokens), tokens)
        count += len(tokens) - 1
    perplexities = [math.exp(cost / count) for cost in costs]
    print(f"{kind}: {perplexities[0]:.4f} here, {perplexities[1]:.4f} in llama.cpp")
    assert perplexities[0] == pytest.approx(perplexities[1], rel=0.005)


# An indexer with the small heads of the model here ends the process.
@pytest.mark.parametrize("kind", [kind for kind in FIELDS if kind != "deepseek_v32"])
def test_families_of_random_weights_are_equal(
    kind: str, tmp_path: Path, llama_cpp: Any, examples: None
) -> None:
    converter = importlib.import_module("write_gguf")
    tokenizer = json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))
    path = tmp_path / "model.gguf"
    make(tmp_path, kind, vocab_size=4096, **LIKE_THEIRS.get(kind, {}))
    write(
        tmp_path,
        path,
        kind,
        tokenizer=lambda writer, _: converter.add_tokenizer(writer, tokenizer, {}, "gpt-2"),
    )
    ours = load(path, dtype="float32", max_sequences=1)
    # Their cache is float16 otherwise.
    theirs = Theirs(llama_cpp, path, type_k=0, type_v=0)
    logits, expected = ours.logits(TOKENS), theirs.logits(TOKENS)
    difference = float((logits - expected).abs().max() / expected.abs().max())
    (completion,) = ours.generate([TOKENS], max_new_tokens=NUM_NEW)
    print(f"{kind}: logits differ by {difference:.1e} of the largest")
    assert list(completion.token_ids) == theirs.greedy(TOKENS)
    assert difference < (5e-3 if kind in GELU else 5e-4 if kind in DELTA else 5e-5)
