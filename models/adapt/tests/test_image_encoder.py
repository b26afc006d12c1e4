"""Images in prompts: the tokens, vectors and positions of transformers' processors and models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models.adapt.tests.image_checkpoints import FAMILIES, Family, picture, write_checkpoint
from models.conftest import CONFIGS
from models.conftest import write_checkpoint as write_text_checkpoint
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import interposer
from interposer.errors import CheckpointError, RequestError
from interposer_adapt._image_decoding import ImageLimits
from interposer_adapt._image_encoder import ImageEncoder
from interposer_adapt._image_processors import load_processor
from interposer_adapt._image_tower import ImageTower, load_tower
from interposer_adapt._input_encoders import load_input_encoder
from interposer_engine import Checkpoint, EmbeddedInput, Media, Plan, load, plan, quantize

# transformers' processor of PaliGemma passes a tensor to numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SIZES = ((40, 30), (64, 100), (90, 31))


@dataclass(frozen=True)
class Case:
    """A checkpoint, its model and processor in transformers, and our encoder of it."""

    family: Family
    path: Path
    model: Any
    processor: Any
    tower: ImageTower
    encoder: ImageEncoder

    def prompt(self, num_images: int) -> str:
        """Return a text with placeholders: alone, next to newlines, and next to each other."""
        parts = ["A {}\nB", "\n{}", "{}\n\nC?"]
        texts = [parts[i].format(self.family.placeholder) for i in range(num_images)]
        return "".join(texts) or "A text\n\nalone"

    def token_ids(self, text: str) -> list[int]:
        """Return the token ids of a prompt, as ``lm.chat`` tokenizes it."""
        ids: list[int] = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def embed(self, images: Sequence[Any]) -> list[int | EmbeddedInput]:
        """Return our prompt with images."""
        media = [Media("image", image, f"image {i}") for i, image in enumerate(images)]
        return self.encoder.embed(self.token_ids(self.prompt(len(images))), media)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The plan of a small text model."""
    path = tmp_path_factory.mktemp("text")
    write_text_checkpoint(CONFIGS["llama"](), path)
    return plan(path, dtype="float32")


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(
    request: pytest.FixtureRequest, planned: Plan, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    """Each family."""
    return write_case(request.param, tmp_path_factory.mktemp(request.param), planned)


@pytest.fixture(scope="module")
def llava(planned: Plan, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One family, for promises that all of them keep in the same way."""
    return write_case("llava", tmp_path_factory.mktemp("one"), planned)


def write_case(name: str, path: Path, planned: Plan) -> Case:
    """Write the checkpoint of a family, and load its encoder."""
    model, _ = write_checkpoint(FAMILIES[name], path)
    processor = load_processor(path, model.config.model_type)
    tower = load_tower(Checkpoint.open(path), planned)
    encoder = ImageEncoder(tower, processor, planned)
    return Case(FAMILIES[name], path, model, processor, tower, encoder)


def decoder_inputs(case: Case, inputs: Any) -> dict[str, Any]:
    """Return the inputs that transformers' model gives to its decoder."""
    seen: dict[str, Any] = {}

    def record(_: Any, args: Any, kwargs: Any) -> None:
        seen.update(kwargs)

    hook = case.model.get_decoder().register_forward_pre_hook(record, with_kwargs=True)
    try:
        with torch.no_grad():
            case.model(**inputs)
    finally:
        hook.remove()
    return seen


def rows(case: Case, prompt: Sequence[int | EmbeddedInput]) -> Iterator[tuple[int, Tensor, bool]]:
    """Yield each token of a prompt: its id, its vector, and whether it sees the tokens behind."""
    table = case.model.get_input_embeddings()
    for part in prompt:
        if isinstance(part, EmbeddedInput):
            for vector in part.embeddings:
                yield case.model.config.image_token_id, vector, part.attends_both_ways
        else:
            yield part, table(torch.tensor(part)), False


def positions(prompt: Sequence[int | EmbeddedInput]) -> Tensor:
    """Return the M-RoPE positions ``[3, T]`` of a prompt."""
    columns, start = [], 0
    for part in prompt:
        if isinstance(part, EmbeddedInput):
            assert part.positions is not None
            assert part.num_positions is not None
            columns.append(part.positions.T + start)
            start += part.num_positions
        else:
            columns.append(torch.full((3, 1), start))
            start += 1
    return torch.cat(columns, dim=1)


@pytest.mark.landing(14)
@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_a_prompt_is_that_of_transformers(case: Case, num_images: int) -> None:
    if not num_images and not case.family.takes_texts:
        pytest.skip("the processor of transformers refuses prompts without pictures")
    images = [picture(*size, seed=i) for i, size in enumerate(SIZES[:num_images])]
    text = case.prompt(num_images)
    inputs = case.processor(
        text=[text], images=images or None, return_tensors="pt", add_special_tokens=False
    )
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].float()  # bfloat16 in Llama 4
    expected = decoder_inputs(case, inputs)
    prompt = case.embed(images)
    token_ids, vectors, both_ways = zip(*rows(case, prompt), strict=True)
    assert list(token_ids) == inputs["input_ids"][0].tolist()
    wanted = expected["inputs_embeds"][0]
    scale = float(wanted.abs().max())
    torch.testing.assert_close(torch.stack(vectors), wanted, rtol=0, atol=1e-4 * scale)
    if "token_type_ids" in inputs:
        # Gemma 3: by these, transformers lets the tokens of an image see each other. PaliGemma: all
        # are 0, and the decoder lets all tokens of a prompt see each other.
        assert list(both_ways) == inputs["token_type_ids"][0].bool().tolist()
    runs = [part for part in prompt if isinstance(part, EmbeddedInput)]
    if images and hasattr(case.model.base_model, "get_rope_index"):
        assert torch.equal(positions(prompt), expected["position_ids"][-3:, 0])
    else:
        assert all(run.positions is None and run.num_positions is None for run in runs)
    if images and expected.get("deepstack_visual_embeds") is not None:
        each = [run.layer_embeddings for run in runs if run.layer_embeddings is not None]
        layers = torch.cat(each, dim=1)
        torch.testing.assert_close(
            layers, torch.stack(list(expected["deepstack_visual_embeds"])), rtol=0, atol=1e-4
        )
    else:
        assert all(run.layer_embeddings is None for run in runs)


@pytest.mark.landing(4)
def test_a_white_and_a_wide_image(case: Case) -> None:
    for image in (Image.new("L", (1, 1), 255), picture(300, 20)):
        text = case.prompt(1)
        inputs = case.processor(
            text=[text],
            images=[image.convert("RGB")],
            return_tensors="pt",
            add_special_tokens=False,
        )
        ids = [token_id for token_id, _, _ in rows(case, case.embed([image]))]
        assert ids == inputs["input_ids"][0].tolist()


@pytest.mark.landing(4)
def test_the_encoder_is_loaded_without_the_decoder(case: Case) -> None:
    model = case.tower.adapted.model
    decoder = {id(each) for each in case.model.get_decoder().parameters()}
    decoder.add(id(case.model.get_output_embeddings().weight))
    expected = {name for name, each in case.model.named_parameters() if id(each) not in decoder}
    assert {name for name, _ in model.named_parameters()} == expected


def test_explain_lists_the_kernels_of_an_encoder(llava: Case) -> None:
    explanation = str(interposer.explain(llava.encoder))
    assert "layer_norm" in explanation
    assert "vision_tower" in explanation


@pytest.mark.landing(4)
def test_images_of_several_threads_at_once(case: Case, planned: Plan) -> None:
    sizes = [(20 + 10 * (i % 3), 30 + 7 * (i % 2)) for i in range(6)]
    images = [picture(*size, seed=10 + i) for i, size in enumerate(sizes)]
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda image: case.embed([image]), images))
    without_cache = ImageEncoder(case.tower, case.processor, planned, cached_bytes=0)
    for image, result in zip(images, results, strict=True):
        media = [Media("image", image)]
        alone = without_cache.embed(case.token_ids(case.prompt(1)), media)
        assert digests(result) == digests(alone)
        for ours, theirs in zip(rows(case, result), rows(case, alone), strict=True):
            # Matmuls of other sizes sum in another order; vectors have lengths of 1 to 10.
            torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-4)


def digests(prompt: Sequence[int | EmbeddedInput]) -> list[bytes]:
    """Return the digests of the runs of a prompt."""
    return [part.digest for part in prompt if isinstance(part, EmbeddedInput)]


@pytest.mark.landing(4)
def test_equal_images_have_equal_digests_and_others_do_not(case: Case) -> None:
    first, second, third = picture(40, 30), picture(40, 30), picture(40, 30, seed=9)
    runs = [digests(case.embed([image])) for image in (first, second, third)]
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])
    # The parts of one image have different vectors.
    assert len(set(runs[0])) == len(runs[0])


def test_digests_depend_on_the_settings_of_the_processor(llava: Case, planned: Plan) -> None:
    processor = load_processor(llava.path, "llava")
    processor.image_processor.image_mean = [0.0, 0.0, 0.0]
    other = ImageEncoder(llava.tower, processor, planned)
    image = picture(40, 30)
    ours, theirs = (_runs(encoder, llava, image)[0] for encoder in (other, llava.encoder))
    assert ours.digest != theirs.digest


def _runs(encoder: ImageEncoder, case: Case, image: Image.Image) -> list[EmbeddedInput]:
    media = [Media("image", image)]
    prompt = encoder.embed(case.token_ids(case.prompt(1)), media)
    return [part for part in prompt if isinstance(part, EmbeddedInput)]


def test_recent_images_are_not_encoded_again(llava: Case, planned: Plan) -> None:
    images = [picture(40, 30, seed=i) for i in range(3)]
    size = sum(run.embeddings.nbytes for run in _runs(llava.encoder, llava, images[0]))
    encoder = ImageEncoder(llava.tower, llava.processor, planned, cached_bytes=2 * size)
    first, second = (_runs(encoder, llava, image)[0] for image in images[:2])
    assert _runs(encoder, llava, images[0])[0] is first
    # The third image takes the place of the second, which was used before the first.
    _runs(encoder, llava, images[2])
    assert _runs(encoder, llava, images[0])[0] is first
    again = _runs(encoder, llava, images[1])[0]
    assert again is not second
    assert torch.equal(again.embeddings, second.embeddings)


def test_a_step_of_the_encoder_has_a_limit_of_tokens(llava: Case, planned: Plan) -> None:
    encoder = ImageEncoder(llava.tower, llava.processor, planned)
    images = [picture(40, 30, seed=i) for i in range(7)]
    media = [Media("image", image) for image in images]
    token_ids = llava.token_ids(llava.family.placeholder * len(media))
    sizes: list[int] = []

    def count(_: Any, args: Any, kwargs: Any) -> None:
        sizes.append(len(args[0] if args else kwargs["pixel_values"]))

    tower = llava.tower.adapted.model.base_model.vision_tower
    hook = tower.register_forward_pre_hook(count, with_kwargs=True)
    try:
        expected = encoder.embed(token_ids, media)
        for max_images in (3, 1):
            # A picture has 16 tokens; the one more is too few for another picture.
            encoder = ImageEncoder(llava.tower, llava.processor, planned)
            encoder.max_step_tokens = 16 * max_images + 1
            prompt = encoder.embed(token_ids, media)
            for ours, theirs in zip(rows(llava, prompt), rows(llava, expected), strict=True):
                torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-4)
        # A picture with more tokens than a step is encoded alone.
        encoder = ImageEncoder(llava.tower, llava.processor, planned)
        encoder.max_step_tokens = 8
        encoder.embed(token_ids[:2], media[:2])
    finally:
        hook.remove()
    assert sizes == [7, 3, 3, 1, *[1] * 7, 1, 1]


def test_a_sample_has_as_many_tokens_as_a_step_allows(case: Case, planned: Plan) -> None:
    encoder = ImageEncoder(case.tower, case.processor, planned, cached_bytes=1 << 20)
    assert encoder.max_cached_bytes == 1 << 20
    counts = {}
    for max_tokens in (1, 40, 700):
        counts[max_tokens] = encoder.run_sample(max_tokens)
    # One picture has at least as many tokens as the smallest one of its model.
    assert 0 < counts[1] <= counts[40] <= counts[700]
    assert 350 < counts[700] <= 700


def _wrong_count(case: Case) -> None:
    case.encoder.embed(case.token_ids(case.prompt(2)), [Media("image", picture(40, 30))])


def _wrong_kind(case: Case) -> None:
    case.encoder.embed(case.token_ids(case.prompt(1)), [Media("audio", b"", "input[0]")])


def _broken_image(case: Case) -> None:
    case.embed([picture(40, 30), b"\x89PNG\r\n\x1a\n", picture(40, 30)])


REFUSALS: dict[str, tuple[Callable[[Case], None], str]] = {
    "count": (_wrong_count, "2 placeholders for images.*but 1 images are given"),
    "kind": (_wrong_kind, r"input\[0\] is of the kind 'audio'; the model takes image"),
    "broken": (_broken_image, "^image 1 is not a readable picture"),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_wrong_prompts_are_refused(llava: Case, reason: str) -> None:
    refused, text = REFUSALS[reason]
    with pytest.raises(RequestError, match=text):
        refused(llava)


def test_the_number_of_images_is_limited(llava: Case, planned: Plan) -> None:
    encoder = ImageEncoder(llava.tower, llava.processor, planned, limits=ImageLimits(images=1))
    media = [Media("image", picture(40, 30))] * 2
    with pytest.raises(RequestError, match="has 2 images, at most 1 are accepted"):
        encoder.embed(llava.token_ids(llava.prompt(2)), media)


def test_an_image_that_the_processor_refuses(llava: Case, planned: Plan) -> None:
    processor = load_processor(llava.path, "llava")
    processor.image_processor.size = {}
    encoder = ImageEncoder(llava.tower, processor, planned)
    with pytest.raises(RequestError, match=r"^here, 40 x 30 pixels, is refused by the model's"):
        encoder.embed(llava.token_ids("<image>"), [Media("image", picture(40, 30), "here")])


def test_a_failure_of_the_encoder_concerns_one_image(llava: Case, planned: Plan) -> None:
    processor = load_processor(llava.path, "llava")
    # Pictures keep their sizes, and one of them has more patches than the encoder has positions.
    processor.image_processor.do_resize = processor.image_processor.do_center_crop = False
    encoder = ImageEncoder(llava.tower, processor, planned)
    good, bad = picture(32, 32), picture(64, 64)
    with pytest.raises(RequestError, match=r"^bad fails in the model's image encoder"):
        encoder.embed(
            llava.token_ids("<image><image>"),
            [Media("image", good, "good"), Media("image", bad, "bad")],
        )
    assert encoder.embed(llava.token_ids("<image>"), [Media("image", good)])


def test_the_provider_loads_the_encoder(llava: Case, planned: Plan) -> None:
    encoder = load_input_encoder(Checkpoint.open(llava.path), planned)
    assert isinstance(encoder, ImageEncoder)
    image = picture(40, 30)
    assert torch.equal(
        _runs(encoder, llava, image)[0].embeddings, _runs(llava.encoder, llava, image)[0].embeddings
    )
    assert "images are encoded by LlavaForConditionalGeneration" in planned.resolver.notes[-1]


def test_a_checkpoint_without_a_tensor_of_the_encoder(
    llava: Case, planned: Plan, tmp_path: Path
) -> None:
    _copy(llava.path, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    removed = next(name for name in tensors if "projector" in name)
    del tensors[removed]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks the tensor.*projector") as refusal:
        load_input_encoder(Checkpoint.open(tmp_path), planned)
    assert "text_only=True" in str(refusal.value)


def test_a_checkpoint_without_its_processor(llava: Case, planned: Plan, tmp_path: Path) -> None:
    _copy(llava.path, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="processor for its images"):
        load_input_encoder(Checkpoint.open(tmp_path), planned)
    # A copy without these files has texts in view.
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).unlink()
    assert load_input_encoder(Checkpoint.open(tmp_path), planned) is None
    assert "has none of preprocessor_config.json" in planned.resolver.notes[-1]


def test_the_encoder_of_a_quantized_checkpoint(llava: Case, planned: Plan, tmp_path: Path) -> None:
    _copy(llava.path, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": ["vision"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    encoder = load_input_encoder(Checkpoint.open(tmp_path), planned)
    assert isinstance(encoder, ImageEncoder)
    image = picture(40, 30)
    ours, theirs = (_runs(each, llava, image)[0] for each in (encoder, llava.encoder))
    assert torch.equal(ours.embeddings, theirs.embeddings)


def test_weights_that_are_not_finite(llava: Case, planned: Plan, tmp_path: Path) -> None:
    _copy(llava.path, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if "projector" in name)
    tensors[name][..., 0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="projector"):
        load_input_encoder(Checkpoint.open(tmp_path), planned)


QUANTIZED: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    # Only the scale tells that these integers are no weights.
    "compressed-tensors int8": lambda weight: {
        "weight": (weight * 100).to(torch.int8),
        "weight_scale": torch.full((len(weight), 1), 0.01),
    },
    "fp8": lambda weight: {
        "weight": weight.to(torch.float8_e4m3fn),
        "weight_scale": torch.ones(len(weight), 1),
    },
    "awq": lambda weight: {
        "qweight": torch.zeros(weight.shape[1], len(weight) // 8, dtype=torch.int32),
        "qzeros": torch.zeros(1, len(weight) // 8, dtype=torch.int32),
        "scales": torch.ones(1, len(weight), dtype=torch.float16),
    },
    "bitsandbytes nf4": lambda weight: {
        "weight": torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.ones(weight.numel() // 64),
    },
}


@pytest.mark.landing(2)
@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_weights_of_an_encoder_are_refused(
    llava: Case, tmp_path: Path, method: str
) -> None:
    _copy(llava.path, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    weight = next(n for n in tensors if "vision_tower" in n and n.endswith("q_proj.weight"))
    stem = weight.removesuffix("weight")
    parts = QUANTIZED[method](tensors.pop(weight))
    tensors |= {f"{stem}{name}": part for name, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    refusal = r"image encoder are quantized: '.*q_proj.* is stored as .*\n?.*text_only=True"
    with pytest.raises(CheckpointError, match=refusal):
        load(tmp_path, "float32", cache_tokens=64)
    with load(tmp_path, "float32", cache_tokens=64, text_only=True) as lm:
        assert lm.generate([[1, 2]], max_new_tokens=1)


def test_the_encoder_of_a_quantized_copy_has_the_plain_vectors(llava: Case, tmp_path: Path) -> None:
    quantize(llava.path, tmp_path / "int8", "int8")
    for file in llava.path.glob("*processor*"):
        (tmp_path / "int8" / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "int8"
    encoder = load_input_encoder(Checkpoint.open(path), plan(path, dtype="float32"))
    assert isinstance(encoder, ImageEncoder)
    image = picture(40, 30)
    ours, theirs = (_runs(each, llava, image)[0] for each in (encoder, llava.encoder))
    assert torch.equal(ours.embeddings, theirs.embeddings)


def _copy(source: Path, target: Path) -> None:
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())


def test_without_pillow_a_note_names_the_package(
    llava: Case, planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert load_input_encoder(Checkpoint.open(llava.path), planned) is None
    assert "interposer-adapt[images]" in planned.resolver.notes[-1]


def test_models_without_images_have_no_encoder(planned: Plan) -> None:
    checkpoint = planned.checkpoint
    assert isinstance(checkpoint, Checkpoint)
    assert load_input_encoder(checkpoint, planned) is None
