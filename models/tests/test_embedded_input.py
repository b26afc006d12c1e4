"""Prompts with runs of tokens whose vectors an encoder has computed, next to transformers' models.

transformers gets the same vectors as ``inputs_embeds``, with positions and masks written out here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from models.conftest import SIZES, write_tokenizer
from models.engine.tests.test_speculation import always, idle
from models.tests.family_checkpoints import write_family
from safetensors.torch import save_file
from tests.tape import TapePlatform
from torch import Tensor
from transformers import (
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    LlamaModel,
    Qwen2VLTextConfig,
    Qwen2VLTextModel,
    Qwen3VLTextConfig,
    Qwen3VLTextModel,
)

from interposer import Config, register
from interposer.errors import CheckpointError, ContextLengthError, RequestError
from interposer.hookspecs import hookimpl
from interposer.records import ModelEntry
from interposer_engine import EmbeddedInput, LanguageModel, SamplingParams, load
from interposer_engine.parts import TokenSequence
from interposer_models._families import examples
from interposer_models._families.gemma import Gemma3
from interposer_models._families.llama import Llama
from interposer_models._families.qwen import Qwen2, Qwen3

HIDDEN, WINDOW, STEPS = 64, 24, 6
Part = int | EmbeddedInput


class ShiftedText(Llama):
    """Text half of a model with one position per token."""


class ChunkedText(Qwen2):
    """Text half with M-RoPE whose coordinates have adjacent frequencies."""

    default_mrope_section: ClassVar[tuple[int, int, int]] = (2, 3, 3)


class InterleavedText(Qwen3):
    """Text half with M-RoPE whose coordinates take turns, and with vectors after blocks."""

    default_mrope_section: ClassVar[tuple[int, int, int]] = (3, 3, 2)
    is_mrope_interleaved: ClassVar[bool] = True


class MutualText(Gemma3):
    """Text half in which the tokens of an image attend to each other in both directions."""

    runs_attend_both_ways: ClassVar[bool] = True


def rope(section: Sequence[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}


def configs() -> dict[str, tuple[type[Any], Any, type[Any]]]:
    """Return the class, the config and the family of each text half."""
    sliding = ["sliding_attention", "full_attention", "sliding_attention"]
    return {
        "shifted": (LlamaModel, LlamaConfig(**SIZES), ShiftedText),
        "chunked": (
            Qwen2VLTextModel,
            Qwen2VLTextConfig(**SIZES, rope_parameters=rope((2, 3, 3))),
            ChunkedText,
        ),
        "interleaved": (
            Qwen3VLTextModel,
            Qwen3VLTextConfig(**SIZES, head_dim=16, rope_parameters=rope((3, 3, 2))),
            InterleavedText,
        ),
        "mutual": (
            Gemma3TextModel,
            Gemma3TextConfig(
                **SIZES,
                head_dim=16,
                query_pre_attn_scalar=16,
                sliding_window=WINDOW,
                layer_types=sliding,
            ),
            MutualText,
        ),
    }


def image(
    name: str, height: int = 1, width: int = 12, seed: int = 0, layers: int = 2
) -> EmbeddedInput:
    """Return an image of ``height`` times ``width`` tokens, as the text half ``name`` takes it."""
    count = height * width
    generator = torch.Generator().manual_seed(100 * seed + count)
    vectors = torch.randn(count, HIDDEN, generator=generator)
    facts: dict[str, Any] = {"kind": "image", "digest": f"{seed} {height} {width}".encode()}
    if name == "shifted":
        return EmbeddedInput(**facts, embeddings=0.3 * vectors, num_positions=min(3, count))
    if name == "mutual":
        return EmbeddedInput(**facts, embeddings=vectors, attends_both_ways=True)
    rows = [(0, row, column) for row in range(height) for column in range(width)]
    facts |= {"positions": torch.tensor(rows), "num_positions": max(height, width)}
    if name == "interleaved" and layers:
        facts["layer_embeddings"] = 0.3 * torch.randn(layers, count, HIDDEN, generator=generator)
    return EmbeddedInput(**facts, embeddings=0.3 * vectors)


def joined(*parts: Part) -> list[Part]:
    """Return a prompt of token ids and images."""
    return [*parts]


def text(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), generator=generator).tolist()


def prompts(name: str) -> list[list[Part]]:
    """Return prompts with 0, 1 and 3 images, also at the borders and next to each other."""
    small, wide, tall = image(name, 2, 4, 1), image(name, 2, 6, 2), image(name, 4, 3, 3)
    return [
        [*text(9, 1)],
        [*text(5, 2), small, *text(30, 3)],
        [wide, *text(3, 4), tall, small, *text(2, 5)],
        [*text(17, 6), tall],
    ]


class Reference:
    """A text half of transformers, which gets vectors, positions and masks."""

    def __init__(self, name: str, model: Any, head: Tensor, path: Path) -> None:
        self.name, self.model, self.head, self.path = name, model, head, path

    @torch.inference_mode()
    def logits(self, prompt: Sequence[Part], output: Sequence[int] = ()) -> Tensor:
        """Return the logits ``[T, V]`` of all tokens."""
        vectors, positions, images, group = list[Tensor](), list[Tensor](), list[int](), 0
        parts, deep, start = [*prompt, *output], list[Tensor](), 0
        for part in parts:
            if isinstance(part, EmbeddedInput):
                count, group = len(part), group + 1
                vectors.append(part.embeddings)
                offsets = part.positions
                if offsets is None:
                    offsets = torch.arange(count)[:, None].expand(count, 3)
                positions.append(start + offsets)
                images += [group] * count
                start += part.num_positions or count
                if part.layer_embeddings is not None:
                    deep.append(part.layer_embeddings)
            else:
                vectors.append(self.model.embed_tokens(torch.tensor([part])))
                positions.append(torch.full((1, 3), start))
                images.append(0)
                start += 1
        inputs: dict[str, Any] = {"inputs_embeds": torch.cat(vectors)[None]}
        coordinates = torch.cat(positions).T[:, None]
        if self.name == "shifted":
            inputs["position_ids"] = coordinates[0]
            # Otherwise positions that do not count up would separate packed sequences.
            inputs["attention_mask"] = torch.ones(1, len(images), dtype=torch.int64)
        elif self.name == "mutual":
            inputs["position_ids"] = coordinates[0]
            inputs["attention_mask"] = masks(images)
        else:
            inputs["position_ids"] = coordinates
        if deep:
            inputs["visual_pos_masks"] = torch.tensor(images)[None] > 0
            inputs["deepstack_visual_embeds"] = [*torch.cat(deep, 1)]
        hidden = self.model(**inputs, use_cache=False).last_hidden_state[0]
        return hidden @ self.head.T  # type: ignore[no-any-return]

    def greedy(self, prompt: Sequence[Part], count: int = STEPS) -> list[int]:
        output: list[int] = []
        while len(output) < count:
            output.append(int(self.logits(prompt, output)[-1].argmax()))
        return output


def masks(images: Sequence[int]) -> dict[str, Tensor]:
    """Return the masks of Gemma 3, for tokens with the number of their image, or 0."""
    at, groups = torch.arange(len(images)), torch.tensor(images)
    is_same_image = (groups[:, None] == groups) & (groups > 0)
    seen = (at <= at[:, None]) | is_same_image
    near = at > at[:, None] - WINDOW
    return {"full_attention": seen[None, None], "sliding_attention": (seen & near)[None, None]}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Reference]]:
    """Text halves with random weights; their families are registered meanwhile."""
    found: dict[str, Reference] = {}
    with ExitStack() as stack:
        for name, (kind, config, family) in configs().items():
            torch.manual_seed(7)
            model = kind(config).eval()
            head = 0.1 * torch.randn(256, HIDDEN)
            path = tmp_path_factory.mktemp(name)
            tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
            save_file({**tensors, "lm_head.weight": head}, path / "model.safetensors")
            fields = json.loads(config.to_json_string())
            fields |= {"architectures": [family.__name__], "tie_word_embeddings": False}
            fields["vision_config"] = {"depth": 1}
            (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
            write_tokenizer(path)
            record = ModelEntry((family.__name__,), name, f"{__name__}:{family.__name__}")
            plugin = SimpleNamespace(interposer_records=hookimpl(lambda record=record: [record]))
            stack.enter_context(register(plugin, f"acme-{name}"))
            found[name] = Reference(name, model, head, path)
        yield found


@pytest.fixture(scope="module")
def models(references: dict[str, Reference]) -> Callable[[str], LanguageModel]:
    """Return a function that loads a text half once, with a large cache."""
    loaded: dict[str, LanguageModel] = {}

    def model(name: str) -> LanguageModel:
        if name not in loaded:
            loaded[name] = load(references[name].path, "float32", cache_tokens=2048)
        return loaded[name]

    return model


NAMES = [*configs()]
Models = Callable[[str], LanguageModel]


@pytest.mark.parametrize("name", NAMES)
def test_float32_logits_differ_by_at_most_1e_4(
    references: dict[str, Reference], models: Models, name: str
) -> None:
    for prompt in prompts(name):
        expected = references[name].logits(prompt)
        actual = models(name).logits(prompt)
        assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.landing(2)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_equal_in_moving_batches_and_after_preemption(
    references: dict[str, Reference], models: Models, name: str
) -> None:
    requests = prompts(name)
    expected = [references[name].greedy(prompt) for prompt in requests]
    alone = [models(name).generate([prompt], max_new_tokens=STEPS)[0] for prompt in requests]
    assert [[*answer.token_ids] for answer in alone] == expected
    # Steps of 12 tokens compute prompts in parts, and all prompts together exceed the cache.
    sizes: dict[str, Any] = {"cache_tokens": 80, "max_sequences": 3, "max_step_tokens": 12}
    lm, started = load(references[name].path, "float32", **sizes), list[TokenSequence]()
    preempted = set[TokenSequence]()
    for prompt in requests:
        started.append(lm.engine.add(prompt, SamplingParams(max_new_tokens=STEPS)))
        lm.engine.step()
    while lm.engine.busy:
        num_computed = {sequence: sequence.num_computed for sequence in started}
        lm.engine.step()
        preempted |= {s for s, count in num_computed.items() if s.num_computed < count}
    assert [sequence.output for sequence in started] == expected
    assert preempted
    assert idle(lm)


@pytest.mark.landing(2)
@pytest.mark.parametrize("name", NAMES)
def test_equal_images_share_cached_prefixes_and_others_do_not(
    references: dict[str, Reference], name: str
) -> None:
    lm = load(references[name].path, "float32", cache_tokens=512, prefix_cache=True)
    prompt = joined(*text(5, 1), image(name, 3, 4, 1), *text(20, 2))
    (answer,) = lm.generate([prompt], max_new_tokens=STEPS)
    assert [*answer.token_ids] == references[name].greedy(prompt)
    statistics = lm.engine.prefixes
    assert statistics is not None
    same, ends_within, other = (
        joined(*text(5, 1), image(name, 3, 4, 1), *text(20, 2)),
        joined(*text(5, 1), image(name, 3, 4, 1)),
        joined(*text(5, 1), image(name, 3, 4, 2), *text(20, 2)),
    )
    for request, num_shared in ((same, 36), (ends_within, 16), (other, 5)):
        shared_before = statistics.shared_tokens
        (answer,) = lm.generate([request], max_new_tokens=STEPS)
        assert [*answer.token_ids] == references[name].greedy(request)
        assert statistics.shared_tokens - shared_before == num_shared


def test_answers_report_no_tokens_of_images(
    references: dict[str, Reference], models: Models
) -> None:
    lm, prompt = models("chunked"), joined(*text(4, 1), image("chunked"), *text(2, 2))
    (answer,) = lm.generate([prompt], max_new_tokens=2, repetition_penalty=1.3, frequency_penalty=1)
    assert answer.prompt_token_ids == (*text(4, 1), *text(2, 2))
    stream = lm.start(prompt, SamplingParams(max_new_tokens=1))
    assert len(stream.sequence.prompt) == 18
    assert stream.sequence.num_encoded_tokens == {"image": 12}
    lm.engine.cancel(stream.sequence)
    assert lm.room(prompt) == lm.room([0] * 18)
    (scores,) = lm.score(prompt, [[7, 8]])
    expected = references["chunked"].logits(prompt, [7, 8])[-3:-1].log_softmax(-1)
    assert scores == pytest.approx(expected[[0, 1], [7, 8]].tolist(), abs=1e-3)


def test_draft_tokens_of_prompt_lookup_are_never_those_of_images(
    references: dict[str, Reference],
) -> None:
    lm = load(references["shifted"].path, "float32", cache_tokens=512, speculation=always("ngram"))
    end = references["shifted"].greedy([1, 2])
    # The text before the image ends as the prompt and the answer do.
    prompt = joined(*text(6, 1), *end, image("shifted"), *text(6, 1), *end[:2])
    (answer,) = lm.generate([prompt], max_new_tokens=20)
    assert [*answer.token_ids] == references["shifted"].greedy(prompt, 20)


@pytest.mark.usefixtures("tape")
def test_prompts_run_eagerly_where_decode_steps_are_graphs(
    references: dict[str, Reference],
) -> None:
    plugins = ("interposer-models", "interposer-ops", "interposer-quantization")
    config = Config(graphs="on", platform="tape", plugins=plugins, require={"graph_safe"})
    lm = load(references["chunked"].path, "float32", config=config, cache_tokens=512)
    replayed = TapePlatform.replayed
    # The last step of the first prompt has one token, as a decode step.
    requests = [joined(image("chunked", 1, 1)), *prompts("chunked")]
    answers = lm.generate(requests, max_new_tokens=STEPS)
    for prompt, answer in zip(requests, answers, strict=True):
        assert [*answer.token_ids] == references["chunked"].greedy(prompt)
    assert TapePlatform.replayed > replayed


@pytest.mark.slow
def test_prompts_run_eagerly_where_steps_are_compiled(references: dict[str, Reference]) -> None:
    config = Config(platform="cpu", compile="eager")
    lm = load(references["chunked"].path, "float32", config=config, cache_tokens=512)
    requests = prompts("chunked")[:2]
    answers = lm.generate(requests, max_new_tokens=STEPS)
    for prompt, answer in zip(requests, answers, strict=True):
        assert [*answer.token_ids] == references["chunked"].greedy(prompt)


def test_vectors_after_every_block_are_added(references: dict[str, Reference]) -> None:
    lm = load(references["interleaved"].path, "float32", cache_tokens=256)
    prompt = joined(*text(4, 1), image("interleaved", 2, 3, layers=3))
    (answer,) = lm.generate([prompt], max_new_tokens=STEPS)
    assert [*answer.token_ids] == references["interleaved"].greedy(prompt)


def test_vectors_of_another_model_are_refused_before_the_request_runs(
    references: dict[str, Reference], models: Models
) -> None:
    plain = torch.zeros(4, HIDDEN)
    grid = torch.zeros(4, 3, dtype=torch.int64)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("shifted", {"embeddings": plain[:, :60]}, r"vectors have 60 elements, the model 64"),
        ("shifted", {"embeddings": plain, "positions": grid}, r"three positions per token"),
        ("chunked", {"embeddings": plain, "attends_both_ways": True}, r"attend both ways"),
        (
            "chunked",
            {"embeddings": plain, "layer_embeddings": torch.zeros(4, 4, HIDDEN)},
            r"vectors after 4 blocks, the model has 3",
        ),
    ]
    for name, run, reason in cases:
        with pytest.raises(RequestError, match=rf"holds an image, but .*{reason}.* Try: "):
            models(name).generate([[1, EmbeddedInput("image", b"1", **run)]])
        assert idle(models(name))
    with pytest.raises(RequestError, match=r"prompt_logprobs is 2, but .* no ids to predict"):
        models("chunked").generate([[1, image("chunked")]], prompt_logprobs=2)


def test_text_only_loads_a_model_without_attention_in_both_directions(
    references: dict[str, Reference],
) -> None:
    path = references["mutual"].path
    lm = load(path, "float32", cache_tokens=512, text_only=True)
    assert not any(layer.backend.spec.prefix_lm for layer in lm.engine.model.attention_layers)
    (answer,) = lm.generate([text(9, 1)], max_new_tokens=STEPS)
    assert [*answer.token_ids] == references["mutual"].greedy(text(9, 1))
    with pytest.raises(RequestError, match=r"attention .* is causal.* without text_only=True"):
        lm.generate([[image("mutual")]])


def test_an_image_longer_than_a_step_is_refused_if_it_attends_in_both_directions(
    references: dict[str, Reference],
) -> None:
    sizes: dict[str, Any] = {"cache_tokens": 256, "max_step_tokens": 12}
    lm = load(references["mutual"].path, "float32", **sizes)
    with pytest.raises(ContextLengthError, match=r"image has 14 tokens.* takes 12\. Try: .*=14"):
        lm.generate([[1, image("mutual", 2, 7)]])
    lm = load(references["chunked"].path, "float32", **sizes)
    prompt = joined(1, image("chunked", 4, 7))
    assert [*lm.generate([prompt], max_new_tokens=STEPS)[0].token_ids] == references[
        "chunked"
    ].greedy(prompt)


def test_encoders_of_texts_refuse_images(tmp_path: Path) -> None:
    lm = load(write_family(tmp_path, examples.bart()["released"]), cache_tokens=64)
    with pytest.raises(RequestError, match=r"holds an image, but .*encoder reads token ids.* Try"):
        lm.generate([[1, image("shifted")]])


@pytest.mark.parametrize("family", [ChunkedText, InterleavedText])
@pytest.mark.parametrize("section", [[2, 3], [2, 3, 4], "233", [2.0, 3, 3], [-1, 6, 3]])
def test_sections_that_do_not_fit_a_head_are_refused(
    family: type[Qwen2 | Qwen3], section: object
) -> None:
    fields = {**SIZES, "head_dim": 16, "rope_scaling": {"type": "mrope", "mrope_section": section}}
    with pytest.raises(CheckpointError, match="mrope_section"):
        family.parse(fields, "config.json")


def test_the_older_spelling_of_sections_is_read() -> None:
    scaling = {"type": "mrope", "mrope_section": [1, 4, 3]}
    settings = ChunkedText.parse({**SIZES, "rope_scaling": scaling}, "config.json")
    assert settings.mrope_axes == [0, 1, 1, 1, 1, 2, 2, 2]
    fields = {**SIZES, "head_dim": 16, "rope_parameters": {"mrope_interleaved": True}}
    assert InterleavedText.parse(fields, "config.json").mrope_axes == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"embeddings": torch.zeros(0, 8)}, r"\[0, 8\], must be \[N, H\] with at least one token"),
        ({"embeddings": torch.zeros(8)}, r"\[8\], must be \[N, H\]"),
        ({"positions": torch.zeros(4, 2, dtype=torch.int64)}, r"must be \[4, 3\] int64"),
        ({"positions": torch.full((4, 3), 4)}, r"are from 4 to 4, must be from 0 to 3"),
        ({"num_positions": 5}, r"is 5, must be from 1 to 4"),
        ({"layer_embeddings": torch.zeros(2, 3, 8)}, r"must be \[L, 4, 8\]"),
        ({"digest": b""}, r"digest is b''"),
    ],
)
def test_inconsistent_inputs_are_refused(facts: dict[str, Any], reason: str) -> None:
    valid = {"kind": "image", "digest": b"1", "embeddings": torch.zeros(4, 8)}
    with pytest.raises(RequestError, match=reason):
        EmbeddedInput(**{**valid, **facts})
