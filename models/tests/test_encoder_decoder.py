"""Encoder-decoders: sources are encoded once, and the tokens are those of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.conftest import write_tokenizer
from models.engine.tests.test_bad_checkpoints import edit_json, edit_weights
from models.tests.interpreter import interpreted
from models.tests.schedules import REQUESTS
from safetensors.torch import load_file
from tests.landing import num_examples
from tests.tape import TapePlatform

from interposer import Config, explain
from interposer.errors import CheckpointError, ConfigError, RequestError
from interposer_engine import LanguageModel, SamplingParams, load, plan
from interposer_engine.parts import decoder_of
from interposer_models._families import examples

Pair = tuple[Path, Any]
STEPS = 64
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "bart": (examples.bart, "sides"),
    "mbart": (examples.mbart, "small"),
    "t5gemma": (examples.t5gemma, "windowed"),
}
ALL = sorted(MODELS)


def written(name: str, path: Path) -> Any:
    """Write a checkpoint of one of ``MODELS`` and return transformers' own model of it."""
    family, label = MODELS[name]
    config = {**family()[label], "vocab_size": 256, "forced_bos_token_id": 9}
    for side in ("encoder", "decoder"):
        if side in config:
            config[side] = {**config[side], "vocab_size": 256}
    kind = getattr(transformers, config["architectures"][0])
    torch.manual_seed(7)
    model = kind(kind.config_class(**config)).eval().to(torch.float32)
    with torch.no_grad():
        for part, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in part or "bias" in part:
                tensor.add_(0.05 * torch.randn_like(tensor))
            elif any(
                fragment in part for fragment in ("q_proj", "v_proj", "out_proj", "positions")
            ):
                tensor.mul_(4)  # else a tied head names the newest token again and again
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    return model


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """The directory of each model, and transformers' own of it."""
    models = {}
    for name in MODELS:
        path = tmp_path_factory.mktemp(name)
        models[name] = path, written(name, path)
    return models


@pytest.fixture(params=ALL)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs[request.param]


@pytest.fixture
def copied(pairs: dict[str, Pair], tmp_path: Path) -> Path:
    """A copy of BART's directory."""
    for file in pairs["bart"][0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


STARTS = [2, 9]
"""As config.json states them."""


def logits_of(model: Any, source: list[int], tokens: list[int]) -> torch.Tensor:
    ids, decoder_ids = torch.tensor([source]), torch.tensor([tokens])
    masks = {"attention_mask": ids.clamp(1, 1), "decoder_attention_mask": decoder_ids.clamp(1, 1)}
    with torch.inference_mode():
        output = model(input_ids=ids, decoder_input_ids=decoder_ids, **masks)
    return output.logits[0].float()  # type: ignore[no-any-return]


def greedy_of(model: Any, source: list[int], steps: int) -> list[int]:
    ids = torch.tensor([source])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        decoder_input_ids=torch.tensor([STARTS]),
        do_sample=False,
        num_beams=1,
        max_new_tokens=steps,
        min_new_tokens=steps,
        eos_token_id=None,
        forced_bos_token_id=None,
        forced_eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(STARTS) :].tolist()  # type: ignore[no-any-return]


def sources(lengths: tuple[int, ...], seed: int = 3) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(3, 256) for _ in range(length)] for length in lengths]


def loaded(path: Path, **more: Any) -> LanguageModel:
    return load(path, "float32", **{"platform": "cpu", "cache_tokens": 640, **more})


def idle(lm: LanguageModel) -> bool:
    pools = [*lm.engine.pools, lm.engine.scheduler.encoder_pool]
    return not lm.engine.busy and all(p and p.num_free == p.num_pages for p in pools)


@pytest.mark.landing(2)
def test_float32_logits_differ_by_at_most_1e_4_of_the_largest(pair: Pair) -> None:
    path, model = pair
    lm = loaded(path)
    for source, tokens in zip(sources((1, 2, 33, 150)), sources((40, 1, 7, 20), 4), strict=True):
        decoder_tokens = [*STARTS, *tokens]
        expected = logits_of(model, source, decoder_tokens)
        difference = (lm.logits(decoder_tokens, source=source) - expected).abs().max()
        assert difference <= 1e-4 * expected.abs().max()
    assert idle(lm)


@pytest.mark.landing(1)
def test_greedy_tokens_are_equal_for_a_single_request(pair: Pair) -> None:
    path, model = pair
    (source,) = sources((23,))
    lm = loaded(path)
    (completion,) = lm.generate([source], max_new_tokens=STEPS, ignore_eos=True)
    assert list(completion.token_ids) == greedy_of(model, source, STEPS)
    assert lm.engine.start_token_ids == tuple(STARTS)


@pytest.mark.landing(1)
def test_greedy_tokens_are_equal_while_requests_join_and_leave(pair: Pair) -> None:
    """In a cache in which sequences give their pages back, those of sources among them."""
    path, model = pair
    lm = loaded(path, max_sequences=4, max_step_tokens=61, cache_tokens=160)
    lengths, steps = (5, 40, 1, 23, 61, 12), (STEPS, 9, STEPS, 30, STEPS, 3)
    preempted, encoded = [], []
    release, encode = lm.engine.scheduler._release, lm.engine.model.encode

    def seen(sequence: Any) -> None:
        if sequence.num_computed and sequence.finish_reason is None:
            preempted.append(len(sequence.source))
        release(sequence)

    def counted(batch: Any, *arguments: Any) -> None:
        encoded.append(len(batch.token_ids))
        encode(batch, *arguments)

    lm.engine.scheduler._release = seen  # type: ignore[method-assign]
    lm.engine.model.encode = counted
    started = []
    for source, count in zip(sources(lengths), steps, strict=True):
        params = SamplingParams(max_new_tokens=count, ignore_eos=True)
        started.append(lm.start(source, params).sequence)
        for _ in range(4):
            lm.engine.step()
    while lm.engine.busy:
        lm.engine.step()
    for sequence, count in zip(started, steps, strict=True):
        assert sequence.output == greedy_of(model, [*sequence.source], count)
    # Only an input whose pages were given back, and used by others, was encoded again.
    assert preempted
    assert sum(lengths) <= sum(encoded) <= sum(lengths) + sum(preempted)
    assert max(encoded) <= 61
    assert idle(lm)


@pytest.mark.slow
def test_bfloat16_is_no_further_from_float32_than_transformers_is(pair: Pair) -> None:
    path, model = pair
    narrow = type(model).from_pretrained(path, dtype=torch.bfloat16).eval()
    lm = load(path, dtype="bfloat16", platform="cpu", cache_tokens=640)
    ours, theirs = [], []
    for source, tokens in zip(sources((60, 61, 62, 63) * 4), sources((64,) * 16, 5), strict=True):
        decoder_tokens = [*STARTS, *tokens]
        exact = logits_of(model, source, decoder_tokens)
        ours.append(lm.logits(decoder_tokens, source=source) - exact)
        theirs.append(logits_of(narrow, source, decoder_tokens) - exact)
    assert_no_larger_of_many(ours, theirs)


def assert_no_larger_of_many(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Compare errors by what ``assert_no_larger`` takes, but allow for what is chance.

    All positions of a sequence share the error of its source, so that each sequence is one draw.
    Where both sides round alike, as without products of bfloat16, either has the larger mean: up to
    two standard errors of the differences.
    """
    sizes: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda error: error.square().mean(),
        lambda error: error.abs().amax(-1).mean(),
    )
    for size in sizes:
        pairs = zip(ours, theirs, strict=True)
        larger = torch.stack([size(own) - size(other) for own, other in pairs])
        assert larger.mean() <= 2 * larger.std() / len(larger) ** 0.5


def test_the_error_test_detects_larger_errors() -> None:
    noise = list(torch.randn(16, 64, 256, generator=torch.Generator().manual_seed(3)))
    assert_no_larger_of_many(noise[::-1], noise)
    assert_no_larger_of_many([0.9 * error for error in noise], noise)
    with pytest.raises(AssertionError):
        assert_no_larger_of_many([1.1 * error for error in noise], noise)


@pytest.fixture(scope="module")
def references(pairs: dict[str, Pair]) -> dict[str, LanguageModel]:
    return {name: loaded(pairs[name][0], cache_tokens=4096) for name in MODELS}


@pytest.fixture(scope="module")
def small(pairs: dict[str, Pair]) -> dict[str, LanguageModel]:
    """Models in caches so small that sequences are preempted; what nobody holds is spoiled."""
    models = {}
    for name in MODELS:
        sizes = {"cache_tokens": 144, "max_sequences": 3, "max_step_tokens": 96}
        models[name] = lm = loaded(pairs[name][0], **sizes)
        spoil(lm)
    return models


def spoil(lm: LanguageModel) -> None:
    """Write NaN over every page of sources that no sequence holds, after each step."""
    engine, scheduler = lm.engine, lm.engine.scheduler
    advance, pool = scheduler.advance, lm.engine.scheduler.encoder_pool
    assert pool is not None

    def spoiled(chunks: Any) -> None:
        advance(chunks)
        used_pages = {page for s in scheduler.running for page in s.source_pages}
        used_pages |= pool.kept_pages
        free = torch.tensor(sorted({*range(pool.num_pages)} - used_pages), dtype=torch.int64)
        for cache, backend in zip(engine.runner.caches, engine.runner.backends, strict=True):
            if backend.spec.type == "encoder_decoder":
                cache.index_fill_(backend.kv_layout().page_axis, free, torch.nan)

    scheduler.advance = spoiled  # type: ignore[method-assign]


@settings(
    max_examples=num_examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=REQUESTS,
    leaver=st.integers(0, 30),
    name=st.sampled_from(ALL),
)
def test_any_schedule_gives_the_tokens_of_each_alone(
    references: dict[str, LanguageModel],
    small: dict[str, LanguageModel],
    requests: list[tuple[int, int, int]],
    leaver: int,
    name: str,
) -> None:
    lm = small[name]
    texts = [[3 + (7 * i + first) % 250 for i in range(n)] for n, _, first in requests]
    drawn: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "seed": 5}
    params = [SamplingParams(max_new_tokens=n, **drawn) for _, n, _ in requests]
    expected = [references[name].generate([t], p)[0] for t, p in zip(texts, params, strict=True)]
    started = []
    for text, request_params, (_, _, pause) in zip(texts, params, requests, strict=True):
        started.append(lm.start(text, request_params).sequence)
        for _ in range(pause):
            lm.engine.step()
    steps = 0
    while lm.engine.busy:
        if steps == leaver:
            lm.engine.cancel(started[0])
        lm.engine.step()
        steps += 1
    for sequence, reference in zip(started, expected, strict=True):
        was_cancelled = sequence.finish_reason == "cancelled"
        assert (
            sequence.output
            == list(reference.token_ids)[: len(sequence.output) if was_cancelled else None]
        )
    assert idle(lm)


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    "rules",
    [
        {"attention": {"encoder_decoder": "paged"}},
        {"attention": {"encoder_decoder": "paged"}, "kernels": {"paged_attention": "reference"}},
        {"attention": {"decoder": "sdpa", "encoder_decoder": "native_rows"}},
    ],
    ids=str,
)
def test_all_backends_for_encoder_inputs_agree(
    references: dict[str, LanguageModel], pairs: dict[str, Pair], rules: dict[str, Any]
) -> None:
    lm = loaded(pairs["bart"][0], config=Config(platform="cpu", **rules), platform=None)
    texts = sources((70, 3, 16))
    tokens, expected = (
        [c.token_ids for c in model.generate(texts, max_new_tokens=20, ignore_eos=True)]
        for model in (lm, references["bart"])
    )
    assert tokens == expected
    backend = next(iter(rules["attention"].values()))
    assert backend in str(
        explain(lm).why("encoder_decoder" if len(rules["attention"]) == 1 else "decoder")
    )


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_triton_computes_encoder_inputs(
    references: dict[str, LanguageModel], pairs: dict[str, Pair]
) -> None:
    report = interpreted("interpreted_chunks.py", pairs["mbart"][0])
    assert {"paged_attention_triton", "ragged_attention_triton"} <= {*report["chosen"]}
    texts = [list(range(3, 18)), [1, 2]]
    expected = references["mbart"].generate(texts, max_new_tokens=3, ignore_eos=True)
    assert report["tokens"] == [[*completion.token_ids] for completion in expected]


def test_a_backend_without_cross_attention_is_refused(pairs: dict[str, Pair]) -> None:
    config = Config(platform="cpu", attention={"encoder_decoder": "sdpa"})
    with pytest.raises(Exception, match="serves decoder attention only, got encoder_decoder"):
        plan(pairs["bart"][0], config=config)


@pytest.mark.landing(1)
@pytest.mark.usefixtures("tape")
def test_decode_steps_are_graphs(pair: Pair, references: dict[str, LanguageModel]) -> None:
    path, model = pair
    plugins = ("interposer-models", "interposer-ops", "interposer-quantization")
    config = Config(graphs="on", platform="tape", plugins=plugins, require={"graph_safe"})
    lm = load(path, config=config, cache_tokens=320, max_sequences=3, max_step_tokens=128)
    spoil(lm)
    texts, counts = sources((70, 3, 30)), (40, 9, 20)
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in counts]
    completions = lm.generate(texts, params)
    for text, count, completion in zip(texts, counts, completions, strict=True):
        assert list(completion.token_ids) == greedy_of(model, text, count)
    assert TapePlatform.replayed > 30
    assert idle(lm)


@pytest.mark.slow
def test_steps_are_compiled(pairs: dict[str, Pair], references: dict[str, LanguageModel]) -> None:
    config = Config(platform="cpu", compile="eager")
    lm = loaded(pairs["bart"][0], config=config, platform=None)
    texts = sources((70, 3, 16))
    tokens, expected = (
        [c.token_ids for c in model.generate(texts, max_new_tokens=9, ignore_eos=True)]
        for model in (lm, references["bart"])
    )
    assert tokens == expected
    assert lm.engine.runner.compiled is not None
    assert lm.engine.runner.compiled.graphs


def test_draft_tokens_of_the_decoder_are_verified(
    pairs: dict[str, Pair], references: dict[str, LanguageModel]
) -> None:
    lm = loaded(pairs["t5gemma"][0], speculation="ngram")
    texts = sources((70, 3, 16))
    tokens, expected = (
        [c.token_ids for c in model.generate(texts, max_new_tokens=40, ignore_eos=True)]
        for model in (lm, references["t5gemma"])
    )
    assert tokens == expected
    assert lm.speculation is not None
    assert lm.speculation.drafted_tokens
    assert idle(lm)


def test_the_cache_budget_counts_encoder_inputs(pairs: dict[str, Pair]) -> None:
    lm = loaded(pairs["t5gemma"][0], cache_tokens=1000, max_sequences=2, max_step_tokens=32)
    engine = lm.engine
    size = engine.pool.page_size
    assert engine.runner.encoder_inputs is not None
    pages = -(-1000 // size)
    assert engine.runner.encoder_inputs.pool.num_pages == engine.pool.num_pages == pages
    (note,) = (n for n in explain(lm).notes if n.startswith("KV cache"))
    tokens = pages * size
    assert f"({tokens} in 1 full-attention layer, {tokens} in 3 cross-attention layers" in note
    page = size * 2 * 2 * 16 * 4  # keys and values of 2 heads of 16 floats
    windowed = engine.pools[1].num_pages + 1
    assert engine.runner.cache_bytes == page * (pages + 3 * pages + 2 * windowed)
    measured = load(
        pairs["t5gemma"][0], "float32", platform="cpu", memory_fraction=0.001, max_sequences=2
    )
    texts = sources((70, 3))
    generated, expected = (
        [c.token_ids for c in model.generate(texts, max_new_tokens=9, ignore_eos=True)]
        for model in (measured, loaded(pairs["t5gemma"][0]))
    )
    assert generated == expected
    with pytest.raises(ConfigError, match="the free memory holds"):
        loaded(pairs["bart"][0], cache_tokens=10**13)


def test_unusable_encoder_inputs_are_refused(pairs: dict[str, Pair]) -> None:
    lm = loaded(pairs["bart"][0], max_step_tokens=100, cache_tokens=64)
    for source, reason in (
        (
            [5] * 257,
            r"The encoder input has 257 tokens, the encoder takes 256. Try: shorten it to 256",
        ),
        ([5] * 101, r"max_step_tokens is 100. Try: load\(..., max_step_tokens=101\)"),
        ([5] * 90, r"needs 90 cached tokens, the cache holds 64"),
        ([], "The prompt is empty"),
        ([256], "Token id 256 is outside the vocabulary of 256"),
    ):
        with pytest.raises(RequestError, match=reason):
            lm.generate([source], max_new_tokens=3)
        with pytest.raises(RequestError, match=reason):
            lm.check(source, SamplingParams(max_new_tokens=3))
    with pytest.raises(RequestError, match="has an encoder, but no encoder input was given"):
        lm.engine.add([2], SamplingParams())
    assert idle(lm)


def test_models_without_an_encoder_refuse_encoder_inputs(llama: Path) -> None:
    lm = loaded(llama)
    with pytest.raises(RequestError, match="the model has no encoder"):
        lm.engine.add([2], SamplingParams(), source=[1])
    with pytest.raises(RequestError, match="has no encoder"):
        lm.logits([2], source=[1])


def test_features_without_encoder_support_are_refused_by_name(
    pairs: dict[str, Pair], llama: Path, tmp_path: Path
) -> None:
    path = pairs["bart"][0]
    with pytest.raises(ConfigError, match="prefix_cache=True, but the model has an encoder"):
        loaded(path, prefix_cache=True)
    with pytest.raises(
        ConfigError, match="has an encoder, and draft models cannot read an encoder input"
    ):
        loaded(path, speculation=str(llama))
    with pytest.raises(
        ConfigError, match="has an encoder, and draft models cannot read an encoder input"
    ):
        loaded(llama, speculation=str(path))
    with pytest.raises(ConfigError, match="A model with an encoder takes no adapters"):
        loaded(path).load_adapter("one", tmp_path)
    with pytest.raises(ConfigError, match="builds a BartLM whose blocks need each other"):
        decoder_of(plan(path))


def test_texts_are_read_scored_and_streamed(pairs: dict[str, Pair]) -> None:
    path, model = pairs["bart"]
    lm = loaded(path)
    text = "a text that is read"
    source = lm.tokenizer.encode(text)
    expected = greedy_of(model, source, 12)
    settings: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    (completion,) = lm.generate(text, **settings)
    assert list(completion.token_ids) == expected
    assert completion.text == lm.tokenizer.decode(expected)
    assert [delta.token_id for delta in lm.stream(text, **settings)] == expected
    first, second = lm.score(text, ["of it", "not"])
    decoder_tokens = [*STARTS, *lm.tokenizer.encode("of it")]
    after = logits_of(model, source, decoder_tokens).log_softmax(-1)
    chosen = [after[1 + i, token].item() for i, token in enumerate(decoder_tokens[2:])]
    assert list(first) == pytest.approx(chosen, abs=1e-4)
    assert len(second) == 3
    assert lm.score(source, [lm.tokenizer.encode("of it")]) == [first]
    assert lm.room(source) == lm.engine.runner.max_sequence_tokens - 2


def test_the_logits_bias_is_added(copied: Path, pairs: dict[str, Pair]) -> None:
    lm = loaded(pairs["bart"][0])
    inputs: dict[str, Any] = {"token_ids": [2, 7, 5], "source": [9, 8, 7]}
    bias = load_file(copied / "model.safetensors")["final_logits_bias"].clone()
    edit_weights(copied, final_logits_bias=None)
    plain = loaded(copied)
    assert lm.engine.model.final_logits_bias.operands
    assert not plain.engine.model.final_logits_bias.operands
    torch.testing.assert_close(lm.logits(**inputs), plain.logits(**inputs) + bias)
    # Exchanged while it runs, too.
    plain.update_weights({"final_logits_bias": bias})
    torch.testing.assert_close(plain.logits(**inputs), lm.logits(**inputs))


@pytest.mark.landing(5)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"decoder_start_token_id": None, "bos_token_id": None}, "names no decoder_start_token_id"),
        ({"decoder_start_token_id": 256}, "decoder_start_token_id is 256, must be a token of 256"),
        ({"forced_bos_token_id": "en"}, "forced_bos_token_id is 'en', must be a token"),
        ({"encoder_attention_heads": 3}, "d_model 64 is not a multiple of 3 encoder_attention"),
        ({"decoder_attention_heads": 5}, "the hidden size 64 is not a multiple of 5 heads"),
        ({"encoder_layers": None}, r"config\.json: encoder_layers: Field required"),
        ({"encoder_ffn_dim": -1}, r"config\.json: encoder_ffn_dim"),
        ({"encoder_ffn_dim": 81}, "'model.encoder.layers.0.fc1.bias' has shape"),
        ({"encoder_layers": 5}, "lacks the tensor 'model.encoder.layers.4"),
        ({"decoder_layers": 2}, "'model.decoder.layers.2.*which the model has no place for"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, which is not supported"),
        ({"activation_function": "sillu"}, "'sillu'"),
    ],
    ids=str,
)
def test_contradictory_fields_are_refused(
    copied: Path, fields: dict[str, Any], reason: str
) -> None:
    (copied / "generation_config.json").unlink(missing_ok=True)
    edit_json(copied / "config.json", **fields)
    with pytest.raises(Exception, match=reason):
        loaded(copied)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_an_error_in_a_nested_field_names_encoder_or_decoder(
    pairs: dict[str, Pair], tmp_path: Path, side: str
) -> None:
    for file in pairs["t5gemma"][0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    for value, reason in (
        ({**config[side], "num_hidden_layers": 0}, f"{side}: num_hidden_layers"),
        ({**config[side], "rope_parameters": {"rope_type": "linear"}}, f"{side}: .*'factor'"),
        (7, f"{side}: must be the settings of the {side}"),
        ({**config[side], "vocab_size": 128}, "128"),
    ):
        edit_json(tmp_path / "config.json", **{side: value})
        with pytest.raises(CheckpointError, match=reason):
            loaded(tmp_path)


def test_wrong_tensors_are_refused(copied: Path) -> None:
    name = "model.decoder.layers.1.encoder_attn.k_proj.weight"
    tensor = load_file(copied / "model.safetensors")[name].clone()
    for changed, reason in (
        ({name: None}, f"lacks the tensor '{name}'"),
        ({name: tensor[:7].clone()}, f"'{name}' has shape"),
        (
            {name: tensor, "model.encoder.odd": tensor.clone()},
            "'model.encoder.odd', which the model has no",
        ),
    ):
        edit_weights(copied, **changed)
        with pytest.raises(CheckpointError, match=reason):
            loaded(copied)
    # First checkpoints repeat the shared table for either side.
    table = load_file(copied / "model.safetensors")["model.shared.weight"]
    repeated = {
        f"model.{side}.embed_tokens.weight": table.clone() for side in ("encoder", "decoder")
    }
    edit_weights(copied, **{"model.encoder.odd": None}, **repeated)
    assert loaded(copied).generate([[5, 6]], max_new_tokens=2)
