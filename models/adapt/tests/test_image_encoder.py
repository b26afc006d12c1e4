"""Images in prompts: the ids and vectors of transformers' processor and model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models.adapt.tests.image_checkpoints import FAMILIES, picture, write_checkpoint
from PIL import Image
from torch import Tensor

from interposer import Config, Resolver, place
from interposer_adapt._image_encoder import ImageEncoder
from interposer_adapt._image_processors import load_processor
from interposer_adapt._input_encoders import load_input_encoder
from interposer_engine import Checkpoint, EmbeddedInput, Media


def fake_plan(path: Path) -> Any:
    config = Config()
    placement = place(config)
    resolver = Resolver.at(placement, config)
    return SimpleNamespace(path=path, dtype=torch.float32, placement=placement, resolver=resolver, numerics=lambda: placement.platform.numerics(config.numerics))

@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("checkpoint")
    model, ids = write_checkpoint(FAMILIES[request.param], path)
    checkpoint = Checkpoint.open(path)
    encoder = load_input_encoder(checkpoint, fake_plan(path))
    return SimpleNamespace(family=FAMILIES[request.param], model=model, ids=ids, encoder=encoder, path=path, processor=load_processor(path, model.config.model_type))


def reference(case: Any, text: str, images: Sequence[Image.Image]) -> tuple[list[int], dict[str, Any]]:
    inputs = case.processor(text=[text], images=list(images) or None, return_tensors="pt", add_special_tokens=False)
    decoder = case.model.get_decoder()
    seen: dict[str, Any] = {}
    hook = decoder.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    with torch.no_grad():
        case.model(**inputs)
    hook.remove()
    return inputs["input_ids"][0].tolist(), seen


def test_vectors(case: Any) -> None:
    images = [picture(40, 30, 1), picture(64, 100, 2), picture(90, 31, 3)]
    text = f"A{case.family.placeholder}\nB {case.family.placeholder}{case.family.placeholder}\n\nC?"
    expected_ids, seen = reference(case, text, images)
    plain = case.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    media = [Media("image", image, f"picture {i}") for i, image in enumerate(images)]
    prompt = case.encoder.embed(plain, media)
    table = case.model.get_input_embeddings()
    vector_id = case.model.config.image_token_id
    ids, rows = [], []
    for token in prompt:
        if isinstance(token, EmbeddedInput):
            ids += [vector_id] * len(token.embeddings)
            rows.append(token.embeddings)
        else:
            ids.append(token)
            rows.append(table(torch.tensor([token])))
    assert ids == expected_ids
    torch.testing.assert_close(torch.cat(rows), seen["inputs_embeds"][0], rtol=1e-4, atol=1e-5)
    print([t for t in prompt if not isinstance(t, EmbeddedInput)][:10], seen.keys())
