"""Text generation from prompts with images: the tokens and logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.adapt.tests.image_checkpoints import FAMILIES, picture, write_checkpoint

from interposer_adapt._image_processors import load_processor
from interposer_engine import Media, SamplingParams, load

# transformers' processor of PaliGemma passes a tensor to numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SIZES = ((40, 30), (64, 100), (90, 31))
NUM_TOKENS = 8


@pytest.mark.landing(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model, _ = write_checkpoint(family, tmp_path)
    processor = load_processor(tmp_path, model.config.model_type)
    images = [picture(*size, seed=i) for i, size in enumerate(SIZES)]
    one, three = f"A{family.placeholder}\nB", f"A{family.placeholder}\nB{family.placeholder * 2}C"
    texts: list[tuple[str, Any]] = [(one, images[:1]), (three, images)]
    if family.takes_texts:
        texts.append(("A text alone", []))
    expected = []
    for text, shown in texts:
        inputs = processor(
            text=[text], images=shown or None, return_tensors="pt", add_special_tokens=False
        )
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].float()  # bfloat16 in Llama 4
        inputs.pop("labels", None)  # PaliGemma's, for training
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
        expected.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    with load(tmp_path, dtype="float32") as lm:
        encoder = lm.input_encoder
        assert encoder is not None
        prompts = [
            encoder.embed(
                processor.tokenizer(text, add_special_tokens=False)["input_ids"],
                [Media("image", image) for image in shown],
            )
            for text, shown in texts
        ]
        params = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS)
        alone = [list(lm.generate([prompt], params)[0].token_ids) for prompt in prompts]
        together = [list(each.token_ids) for each in lm.generate(prompts, params)]
    assert alone == expected
    assert together == expected
    # Another image changes the answer: the random weights are not too small to notice.
    assert expected[0] != expected[1]
