"""MPT as a prefix-LM: the tokens of a prompt see each other in both directions, later ones do not.

transformers passes over ``prefix_lm``, ``alibi_bias_max`` and ``expansion_ratio`` of a config, so
its modules are given the mask and the biases that follow from these.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.conftest import write_checkpoint
from models.engine.tests.test_bad_checkpoints import edit_json
from models.engine.tests.test_speculation import always, idle
from models.tests.interpreter import interpreted
from models.tests.test_parity import STEPS, assert_no_larger, prompts
from safetensors.torch import load_file, save_file
from tests.landing import num_examples
from tests.tape import TapePlatform
from transformers import AutoModelForCausalLM, MptConfig
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from interposer import Config, explain
from interposer.errors import CheckpointError, ConfigError, RequestError, UnsupportedModelError
from interposer_engine import LanguageModel, SamplingParams, load, quantize
from interposer_engine._pages import PagePool
from interposer_engine._scheduler import Scheduler
from interposer_engine._sequence import TokenSequence

CONTEXT = 256
SMALL: dict[str, Any] = {"cache_tokens": 192, "max_sequences": 3, "max_step_tokens": 64}
# Heads that are no power of 2 with other slopes and bounds, scores of another scale, and plain.
MODELS: dict[str, dict[str, Any]] = {
    "six heads": {"n_heads": 6, "attn_config": {"alibi_bias_max": 16, "clip_qkv": 0.5}},
    "scaled": {"n_heads": 3, "attn_config": {"softmax_scale": 0.5, "alibi_bias_max": 4}},
    "plain": {"n_heads": 4, "attn_config": {}},
}


def config_of(name: str, prefix_lm: bool = True) -> MptConfig:
    own = MODELS[name]
    sizes: dict[str, Any] = {
        "d_model": 96,
        "n_layers": 3,
        "vocab_size": 256,
        "max_seq_len": CONTEXT,
    }
    special = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.1}
    inner = {**own["attn_config"], "prefix_lm": prefix_lm}
    return MptConfig(**{**sizes, **special, **own, "attn_config": inner})


Pair = tuple[Path, Any]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Directories, and transformers' models of them."""
    recorded = {}
    for name in MODELS:
        path = tmp_path_factory.mktemp("mpt")
        recorded[name] = path, write_checkpoint(config_of(name), path)
    return recorded


@torch.inference_mode()
def logits_of(model: Any, tokens: list[int], num_prompt: int) -> torch.Tensor:
    """Return transformers' logits ``[T, V]`` behind a prompt of the first ``num_prompt`` tokens."""
    config, count = model.config, len(tokens)
    at = torch.arange(count)
    # Of 2 tokens, the bias of the first is its slope, negative.
    slopes = -build_mpt_alibi_tensor(config.n_heads, 2, config.attn_config.alibi_bias_max)[:, 0, 0]
    biases = -slopes[:, None, None] * (at[:, None] - at).abs()
    seen = (at <= at[:, None]) | (torch.maximum(at[:, None], at) < num_prompt)
    model.transformer.build_mpt_alibi_tensor = lambda *_, **__: biases
    ids = torch.tensor([tokens])
    out = model(ids, attention_mask=~seen[None, None], use_cache=False)
    return out.logits[0].float()  # type: ignore[no-any-return]


def greedy_of(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(model, tokens, len(prompt))[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.landing(2)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_float32_logits_differ_by_at_most_1e_4(pairs: dict[str, Pair], name: str) -> None:
    path, model = pairs[name]
    lm = load(path, "float32")
    for tokens in prompts(256, (1, 2, 17, 150)):
        expected = logits_of(model, tokens, len(tokens))
        assert (lm.logits(tokens) - expected).abs().max() <= 1e-4 * expected.abs().max()
    # The first token sees the last one.
    assert not torch.equal(lm.logits([1, 2, 3])[0], lm.logits([1, 2, 4])[0])


@pytest.mark.landing(1)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_greedy_tokens_are_equal_alone_and_while_requests_join_and_leave(
    pairs: dict[str, Pair], name: str
) -> None:
    path, model = pairs[name]
    (prompt,) = prompts(256, (23,))
    (completion,) = load(path, "float32").generate([prompt], max_new_tokens=STEPS)
    assert list(completion.token_ids) == greedy_of(model, prompt, STEPS)
    lm = load(path, "float32", **{**SMALL, "max_sequences": 4, "cache_tokens": 640})
    lengths, counts = (5, 40, 1, 23, 64, 12), (STEPS, 9, STEPS, 30, STEPS, 3)
    requests, started = prompts(256, lengths), []
    for prompt, count in zip(requests, counts, strict=True):
        started.append(lm.engine.add(prompt, SamplingParams(max_new_tokens=count)))
        for _ in range(4):
            lm.engine.step()
    leaving = lm.engine.add([7] * 30, SamplingParams(max_new_tokens=100))
    while lm.engine.busy:
        lm.engine.step()
        if len(leaving.output) == 5:
            lm.engine.cancel(leaving)
    for prompt, count, sequence in zip(requests, counts, started, strict=True):
        assert sequence.output == greedy_of(model, prompt, count)
    assert idle(lm)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_bfloat16_is_no_further_from_float32_than_transformers_is(
    pairs: dict[str, Pair], name: str
) -> None:
    path, model = pairs[name]
    narrow = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    lm, ours, theirs = load(path, "bfloat16"), [], []
    for tokens in prompts(256, (60, 61, 62, 63) * 4):
        exact = logits_of(model, tokens, len(tokens))
        ours.append(lm.logits(tokens) - exact)
        theirs.append(logits_of(narrow, tokens, len(tokens)) - exact)
    assert_no_larger(torch.cat(ours), torch.cat(theirs))


def test_a_wider_mlp_is_computed_as_the_config_says(tmp_path: Path) -> None:
    """transformers has one of 4 times the hidden size, whatever the config says."""
    model = write_checkpoint(config_of("plain"), tmp_path)
    torch.manual_seed(3)
    for block in model.transformer.blocks:
        block.ffn.up_proj = torch.nn.Linear(96, 192, bias=False)
        block.ffn.down_proj = torch.nn.Linear(192, 96, bias=False)
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", expansion_ratio=2)
    actual = load(tmp_path, "float32").logits([3, 1, 4, 1, 5])
    torch.testing.assert_close(actual, logits_of(model, [3, 1, 4, 1, 5], 5), atol=1e-4, rtol=0)


def test_a_causal_mpt_with_six_heads_equals_the_reference(tmp_path: Path) -> None:
    model = write_checkpoint(config_of("six heads", prefix_lm=False), tmp_path)
    lm, tokens = load(tmp_path, "float32", max_step_tokens=7), list(range(40))
    torch.testing.assert_close(lm.logits(tokens), logits_of(model, tokens, 0), atol=1e-4, rtol=0)
    (actual,) = lm.generate([tokens], max_new_tokens=4)
    for place in range(4):
        given = [*tokens, *actual.token_ids[:place]]
        assert actual.token_ids[place] == int(logits_of(model, given, 0)[-1].argmax())


@pytest.mark.landing(2)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_continuations_are_causal_where_they_are_scored(pairs: dict[str, Pair], name: str) -> None:
    path, model = pairs[name]
    lm, (tokens,) = load(path, "float32"), prompts(256, (60,))
    for count in (1, 25, 59):
        expected = logits_of(model, tokens, count)
        bound = 1e-4 * float(expected.abs().max())
        actual = lm.logits(tokens, num_prompt=count)
        torch.testing.assert_close(actual, expected, atol=bound, rtol=0)
        (scores,) = lm.score(tokens[:count], [tokens[count:]])
        after = expected[count - 1 : -1].log_softmax(-1)
        wanted = after.gather(1, torch.tensor(tokens[count:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scores), wanted, atol=2 * bound, rtol=0)
    for count in (0, 61):
        with pytest.raises(RequestError, match=f"num_prompt is {count}, must be from 1 to 60"):
            lm.logits(tokens, num_prompt=count)


@pytest.fixture(scope="module")
def whole(pairs: dict[str, Pair]) -> LanguageModel:
    """A model in which every request has room."""
    return load(pairs["six heads"][0], "float32", cache_tokens=4096)


@pytest.fixture(scope="module")
def crowded(pairs: dict[str, Pair]) -> dict[str, LanguageModel]:
    """Models in caches so small that sequences are computed again, some with guesses."""
    path, other = pairs["six heads"][0], pairs["plain"][0]
    drafts: dict[str, Any] = {"": None, "ngram": "ngram", "same": path, "other": other}
    return {
        name: load(path, "float32", speculation=always(draft) if draft else None, **SMALL)
        for name, draft in drafts.items()
    }


@settings(
    max_examples=num_examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 40)), min_size=1, max_size=6),
    leaver=st.integers(0, 20),
    name=st.sampled_from(["", "ngram", "same", "other"]),
)
def test_any_schedule_gives_the_tokens_of_a_large_cache(
    whole: LanguageModel,
    crowded: dict[str, LanguageModel],
    requests: list[tuple[int, int]],
    leaver: int,
    name: str,
) -> None:
    """What was generated stays causal when a sequence is computed again."""
    lm = crowded[name]
    given = [
        [(place * number) % 7 + 1 for place in range(n)] for number, (n, _) in enumerate(requests)
    ]
    params = [SamplingParams(max_new_tokens=count) for _, count in requests]
    expected = whole.generate(given, params)
    leaving = lm.engine.add([5, 6] * 10, SamplingParams(max_new_tokens=40))
    for _ in range(leaver):
        lm.engine.step()
    lm.engine.cancel(leaving)
    actual = lm.generate(given, params)
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
    assert idle(lm)


def test_a_draft_that_is_the_model_is_accepted(
    pairs: dict[str, Pair], whole: LanguageModel
) -> None:
    path = pairs["six heads"][0]
    lm = load(path, "float32", cache_tokens=512, speculation=always(path))
    (actual,) = lm.generate([[1, 2, 3]], max_new_tokens=41)
    assert actual.token_ids == whole.generate([[1, 2, 3]], max_new_tokens=41)[0].token_ids
    assert lm.speculation is not None
    assert lm.speculation.acceptance == 1


def test_a_prompt_longer_than_a_step_is_refused(pairs: dict[str, Pair]) -> None:
    lm = load(pairs["plain"][0], "float32", **SMALL)
    with pytest.raises(RequestError, match=r"has 65 tokens.* takes 64\. Try: .*_tokens=65\), or"):
        lm.generate([list(range(65))], max_new_tokens=1)
    assert len(lm.generate([list(range(64))], max_new_tokens=1)[0].token_ids) == 1
    assert lm.logits(list(range(100))).shape == (100, 256)  # a call of its own has one step


def test_pages_of_prefixes_are_not_shared(pairs: dict[str, Pair]) -> None:
    with pytest.raises(ConfigError, match=r"prefix_cache=True, but .* attend to later ones"):
        load(pairs["plain"][0], cache_tokens=512, prefix_cache=True)


def test_only_steps_with_prompts_have_prefixes(
    pairs: dict[str, Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(path: Path) -> list[list[int] | None]:
        lm, actual = load(path, "float32", cache_tokens=512), list[Any]()
        forward = lm.engine.runner.forward

        def noted(batch: Any, *given: Any) -> torch.Tensor:
            prefixes = batch.attention.prefix_lens
            actual.append(None if prefixes is None else prefixes.tolist())
            return forward(batch, *given)

        monkeypatch.setattr(lm.engine.runner, "forward", noted)
        lm.generate([[3, 1, 4], [1]], max_new_tokens=3)
        lm.generate([[5]], max_new_tokens=2)
        return actual

    assert told(pairs["plain"][0]) == [[3, 1], None, None, None, None]
    write_checkpoint(config_of("plain", prefix_lm=False), tmp_path)
    assert told(tmp_path) == [None] * 5


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=8),
    st.integers(40, 60),
    st.integers(1, 4),
    st.sampled_from((1, 4, 16)),
    st.data(),
)
def test_prompts_are_never_split_and_no_request_waits_forever(
    requests: list[tuple[int, int]], step: int, most: int, page_size: int, data: st.DataObject
) -> None:
    longest = max(prompt + count for prompt, count in requests)
    pages = -(-longest // page_size) + data.draw(st.integers(0, 10))
    scheduler = Scheduler([PagePool(pages, page_size)], most, step, whole_prompts=True)
    expected = {}
    for number, (prompt, count) in enumerate(requests):
        sequence = TokenSequence(number, [0] * prompt, SamplingParams(), 0)
        expected[sequence] = count
        scheduler.add(sequence)
    steps = 0
    while scheduler.busy:
        chunks = scheduler.next_step()
        assert sum(chunk.num_tokens for chunk in chunks) <= step
        for chunk in chunks:
            first, last = chunk.sequence.num_computed, len(chunk.sequence.prompt)
            assert first >= last or (first == 0 and chunk.num_tokens >= last)
        scheduler.advance(chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.num_computed == len(sequence):
                if len(sequence.output) == expected[sequence]:
                    scheduler.remove(sequence)
                else:
                    sequence.output.append(0)
        steps += 1
        assert steps < 40 * sum(prompt + count for prompt, count in requests)


def test_a_prompt_takes_turns_with_older_sequences() -> None:
    """Three that decode leave no room for it in a step of its length; each waits one step."""
    scheduler = Scheduler([PagePool(100, 1)], 8, 20, whole_prompts=True)
    older = [TokenSequence(number, [0], SamplingParams(), 0) for number in range(3)]
    long = [TokenSequence(number, [0] * 19, SamplingParams(), 0) for number in (3, 4)]
    for sequence in older:
        scheduler.add(sequence)
    computed = []
    for number in range(6):
        chunks = scheduler.next_step()
        computed.append([(chunk.sequence.id, chunk.num_tokens) for chunk in chunks])
        scheduler.advance(chunks)
        for chunk in chunks:
            chunk.sequence.output.append(0)
        if not number:
            for sequence in long:
                scheduler.add(sequence)
    decodes = [(0, 1), (1, 1), (2, 1)]
    assert computed[:2] == [decodes, decodes]
    assert computed[2] == [(0, 1), (3, 19)]
    assert computed[3] == [*decodes, (3, 1)]
    assert computed[4] == [(0, 1), (4, 19)]
    assert computed[5] == [*decodes, (3, 1), (4, 1)]


@pytest.mark.usefixtures("tape")
def test_decode_steps_are_graphs(pairs: dict[str, Pair], whole: LanguageModel) -> None:
    plugins = ("interposer-models", "interposer-ops", "interposer-quantization")
    config = Config(graphs="on", platform="tape", plugins=plugins, require={"graph_safe"})
    path = pairs["six heads"][0]
    lm = load(path, "float32", config=config, cache_tokens=320, max_sequences=3)
    given = prompts(256, (20, 1, 33, 8))
    actual = lm.generate(given, max_new_tokens=20)
    expected = whole.generate(given, max_new_tokens=20)
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
    assert TapePlatform.replayed > 20


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_triton_computes_prefixes(pairs: dict[str, Pair], whole: LanguageModel) -> None:
    report = interpreted("interpreted_chunks.py", pairs["six heads"][0])
    assert "paged_attention_triton" in report["chosen"]
    given = [list(range(3, 18)), [1, 2]]
    expected = whole.generate(given, max_new_tokens=3, ignore_eos=True)
    assert report["tokens"] == [[*each.token_ids] for each in expected]


def test_the_backend_is_explained(whole: LanguageModel) -> None:
    why = str(explain(whole).why("decoder"))
    assert "-> paged" in why
    assert "does not do prefix_lm" in why


@pytest.mark.parametrize(
    ("field", "value"), [("logit_scale", 0.5), ("no_bias", False), ("norm_type", "rmsnorm")]
)
def test_other_forms_of_mpt_are_refused(
    pairs: dict[str, Pair], tmp_path: Path, field: str, value: object
) -> None:
    copy_to(tmp_path, pairs["plain"][0])
    edit_json(tmp_path / "config.json", **{field: value})
    refusal = f"{field} is {value!r}, which is not supported"
    with pytest.raises(UnsupportedModelError, match=refusal):
        load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alibi", False),
        ("attn_type", "multiquery_attention"),
        ("qk_ln", True),
        ("rope", True),
        ("sliding_window_size", 16),
    ],
)
def test_other_attention_of_mpt_is_refused(
    pairs: dict[str, Pair], tmp_path: Path, field: str, value: object
) -> None:
    copy_to(tmp_path, pairs["plain"][0])
    edit_json(tmp_path / "config.json", attn_config={field: value})
    with pytest.raises(UnsupportedModelError, match=rf"attn_config\.{field} is {value!r}, which"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alibi_bias_max", 0),
        ("alibi_bias_max", "steep"),
        ("clip_qkv", -1),
        ("softmax_scale", 0),
        ("prefix_lm", 7),
    ],
)
def test_impossible_settings_are_refused(
    pairs: dict[str, Pair], tmp_path: Path, field: str, value: object
) -> None:
    copy_to(tmp_path, pairs["plain"][0])
    edit_json(tmp_path / "config.json", attn_config={field: value})
    with pytest.raises(CheckpointError, match=rf"attn_config\.{field}.*got {value!r}"):
        load(tmp_path)


def test_head_sizes_that_do_not_fit_are_refused(pairs: dict[str, Pair], tmp_path: Path) -> None:
    copy_to(tmp_path, pairs["plain"][0])
    edit_json(tmp_path / "config.json", n_heads=20)
    with pytest.raises(CheckpointError, match="hidden size 96 is not a multiple of 20 heads"):
        load(tmp_path)


def test_missing_and_unknown_tensors_are_named(pairs: dict[str, Pair], tmp_path: Path) -> None:
    copy_to(tmp_path, pairs["plain"][0])
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    name = "transformer.blocks.1.attn.Wqkv.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, weights)
    with pytest.raises(CheckpointError, match=r"transformer\.blocks\.1\.attn\.Wqkv\.weight"):
        load(tmp_path)
    extra = {"transformer.blocks.1.attn.q_ln.weight": torch.ones(96)}
    save_file({**tensors, **extra}, weights)
    with pytest.raises(CheckpointError, match=r"transformer\.blocks\.1\.attn\.q_ln\.weight"):
        load(tmp_path)


@pytest.mark.slow
def test_calibration_computes_prompts_in_both_directions(
    pairs: dict[str, Pair], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A token of a prompt sees those that come after it. " * 60)
    recorded = []
    for name, prefix_lm in (("both", True), ("causal", False)):
        source, target = tmp_path / name, tmp_path / f"{name}-quantized"
        source.mkdir()
        copy_to(source, pairs["six heads"][0])
        edit_json(source / "config.json", attn_config={"clip_qkv": 0.5, "prefix_lm": prefix_lm})
        quantize(source, target, "int4", group_size=32, calibrate=text)
        recorded.append(load_file(next(target.glob("*.safetensors"))))
    both, causal = recorded
    assert both.keys() == causal.keys()
    first = "transformer.blocks.0.attn.{}.weight_packed"
    # The inputs of the first projection are embeddings, those of the last one what attention mixed.
    for name, same in (("Wqkv", True), ("out_proj", False)):
        assert torch.equal(both[first.format(name)], causal[first.format(name)]) == same


def copy_to(target: Path, source: Path) -> None:
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
