"""Images in prompts of models without a family: the tokens of transformers, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.adapt.tests.adapted_image_checkpoints import FAMILIES, REFUSED
from models.adapt.tests.image_checkpoints import picture, write_checkpoint
from transformers import AutoTokenizer

import interposer
from interposer import explain
from interposer.errors import ConfigError, RequestError
from interposer_adapt import adapt, language_model
from interposer_adapt._image_processors import load_processor
from interposer_engine import EmbeddedInput, LanguageModel, Media, load

# GLM-4V's processor converts tensors to arrays in a way that NumPy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SIZES = ((40, 30), (64, 100), (90, 31))
COUNT = 8
TOKENS = [3, 50, 60, 9]

Write = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Return a function that writes a tiny model once, and returns its folder and model."""
    checkpoints: dict[str, tuple[Path, Any]] = {}

    def write(name: str) -> tuple[Path, Any]:
        if name not in checkpoints:
            folder = tmp_path_factory.mktemp(name)
            family = FAMILIES.get(name) or REFUSED[name][0]
            checkpoints[name] = folder, write_checkpoint(family, folder)[0]
        return checkpoints[name]

    return write


@torch.no_grad()
def greedy(model: Any, inputs: Any) -> list[int]:
    """Return the tokens that transformers generates."""
    out = model.generate(**inputs, max_new_tokens=COUNT, do_sample=False)
    tokens: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def text_inputs(token_ids: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([token_ids])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def image_notes(lm: LanguageModel) -> list[str]:
    return [note for note in interposer.explain(lm).notes if note.startswith("images are ")]


def slow_but(names: Any, quick: str) -> list[Any]:
    return [n if n == quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.landing(3)
@pytest.mark.parametrize("name", slow_but(FAMILIES, "glm4v"))
def test_greedy_tokens_are_those_of_transformers(name: str, checkpoint: Write) -> None:
    path, model = checkpoint(name)
    placeholder = FAMILIES[name].placeholder
    processor = load_processor(path, model.config.model_type)
    images = [picture(*size, seed=i) for i, size in enumerate(SIZES)]
    one, three = f"A{placeholder}\nB", f"A{placeholder}\nB{placeholder}C{placeholder}D"
    expected = [greedy(model, text_inputs(TOKENS))]
    # Steps are shorter than the prompts, and more requests wait than run.
    lm = load(path, "float32", cache_tokens=2048, max_sequences=2, max_step_tokens=24)
    assert image_notes(lm) == ["images are encoded by the adapted model, up to 24 tokens at once"]
    prompts: list[Any] = [TOKENS]
    for text, shown in ((one, images[:1]), (three, images)):
        arguments = {"text": [text], "images": shown}
        inputs = processor(**arguments, return_tensors="pt", add_special_tokens=False)
        expected.append(greedy(model, inputs))
        token_ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        prompts.append(lm.media_prompt(token_ids, [Media("image", image) for image in shown]))
    alone = [lm.generate([prompt], max_new_tokens=COUNT)[0] for prompt in prompts]
    assert [list(each.token_ids) for each in alone] == expected
    together = lm.generate(prompts, max_new_tokens=COUNT)
    assert [list(each.token_ids) for each in together] == expected
    # Another image changes the answer: the random weights are not too small to notice.
    assert expected[1] != expected[2]
    lm.close()


@pytest.mark.landing(2)
@pytest.mark.parametrize("name", slow_but(REFUSED, "idefics2"))
def test_images_that_the_engine_cannot_compute_are_refused(name: str, checkpoint: Write) -> None:
    path, model = checkpoint(name)
    family, reason = REFUSED[name]
    lm = load(path, "float32", cache_tokens=2048)
    (note,) = image_notes(lm)
    assert note.startswith(f"images are refused: {reason}")
    (completion,) = lm.generate([TOKENS], max_new_tokens=COUNT)
    assert list(completion.token_ids) == greedy(model, text_inputs(TOKENS))
    with pytest.raises(RequestError, match="no encoder"):
        lm.media_prompt(family.placeholder, [Media("image", picture(40, 30))])
    run = EmbeddedInput("image", b"vectors", torch.zeros(2, 32))
    with pytest.raises(RequestError, match="holds an image, but the model takes no vectors"):
        lm.generate([[1, run]])
    lm.close()


def test_a_model_without_a_family_loads_for_texts_only(checkpoint: Write) -> None:
    path, model = checkpoint("glm4v")
    lm = load(path, "float32", cache_tokens=256, text_only=True)
    assert lm.input_encoder is None
    assert not image_notes(lm)
    (completion,) = lm.generate([TOKENS], max_new_tokens=COUNT)
    assert list(completion.token_ids) == greedy(model, text_inputs(TOKENS))
    lm.close()


def test_language_model_takes_a_processor(checkpoint: Write) -> None:
    path, model = checkpoint("glm4v")
    processor = load_processor(path, model.config.model_type)
    adapted = adapt(type(model).from_pretrained(path).eval())
    tokenizer = AutoTokenizer.from_pretrained(path)
    lm = language_model(adapted, tokenizer, max_sequences=2, processor=processor)
    assert lm.media_kinds == {"image"}
    (budget,) = [note for note in explain(lm).notes if note.startswith("KV cache")]
    assert budget.endswith("its cached vectors up to 512.0 MiB")
    prompt = lm.media_prompt(
        f"A{FAMILIES['glm4v'].placeholder}B", [Media("image", picture(40, 30))]
    )
    assert len(lm.generate([prompt], max_new_tokens=2)[0].token_ids) == 2
    lm.close()


@pytest.mark.slow
def test_errors_name_a_nested_decoder_without_a_family(checkpoint: Write) -> None:
    path, _ = checkpoint("llava-gemma")
    with pytest.raises(ConfigError, match=r"the decoder 'gemma' of 'LlavaForConditionalGener"):
        load(path, "float32", offload="50%")
