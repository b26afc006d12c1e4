"""Constrained output: texts are of the form, free requests are untouched, faults are told early."""

from __future__ import annotations

import json
import math
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from interposer.errors import RequestError
from interposer_engine import Constraint, LanguageModel, SamplingParams, TextTokenizer, load
from interposer_engine._constrained_decoding.constraints import Constraints

SHIPPED = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
ROOM = 480


@pytest.fixture(scope="module")
def tiny(llama: Path) -> LanguageModel:
    """Return a model of random weights, one token per byte and no end token."""
    return load(llama, dtype="float32", cache_tokens=4096)


@pytest.fixture(scope="module")
def shipped() -> LanguageModel:
    return load(SHIPPED, dtype="float32", cache_tokens=4096, max_sequences=8)


@pytest.fixture(scope="module", params=["tiny", "shipped"])
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    model: LanguageModel = request.getfixturevalue(request.param)
    return model


def of_form(lm: LanguageModel, constraint: Constraint, seed: int = 0) -> str:
    """Return a text that a constraint ended, drawn at a high temperature."""
    params = SamplingParams(
        constraint=constraint, max_new_tokens=ROOM, temperature=1.5, seed=seed, ignore_eos=True
    )
    actual = lm.generate("import os\n", params)[0]
    assert actual.finish_reason == "stop"
    return actual.text


NAMES = st.text("abcdefgh_é", min_size=1, max_size=6)
SMALL = st.integers(-999, 999)


def bounded(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": min(low, high), "maximum": max(low, high)}


LEAVES = st.one_of(
    st.builds(bounded, SMALL, SMALL),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.builds(lambda n: {"type": "string", "pattern": f"^[a-z]{{1,{n}}}$"}, st.integers(1, 6)),
    st.builds(lambda names: {"enum": names}, st.lists(NAMES | SMALL, min_size=1, unique=True)),
    st.builds(lambda value: {"const": value}, NAMES | st.booleans() | st.none()),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.sampled_from([{"type": "string", "format": "date"}, {"type": ["boolean", "null"]}]),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def table(properties: dict[str, Any], missing: int) -> dict[str, Any]:
        fixed = {"type": "object", "additionalProperties": False}
        return {**fixed, "properties": properties, "required": [*properties][missing:]}

    def row(items: Any, least: int, more: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + more}

    return st.one_of(
        st.builds(table, st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 3)),
        st.builds(row, inner, st.integers(0, 1), st.integers(0, 2)),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
    )


# What these describe is short, so that each text can be completed.
SCHEMAS = st.recursive(LEAVES, containers, max_leaves=4)


@pytest.mark.landing(1)
@settings(max_examples=num_examples(40))
@given(schema=SCHEMAS, seed=st.integers(0, 2**32), indented=st.booleans())
def test_texts_are_json_of_the_schema(
    lm: LanguageModel, schema: dict[str, Any], seed: int, indented: bool
) -> None:
    told = schema if indented else {**schema, "x-guidance": {"whitespace_flexible": False}}
    text = of_form(lm, Constraint.json_schema(told if seed % 2 else json.dumps(told)), seed)
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def test_any_object_is_one(lm: LanguageModel) -> None:
    expected = {"constraint": Constraint.json_object(), "max_new_tokens": 60}
    actual = lm.generate(["x = "] * 12, [drawn(seed, **expected) for seed in range(12)])
    whole = [completion for completion in actual if completion.finish_reason == "stop"]
    assert whole
    assert all(isinstance(json.loads(completion.text), dict) for completion in whole)
    assert {completion.finish_reason for completion in actual} <= {"stop", "length"}


def drawn(seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=1.2, seed=seed, **fields)


@pytest.mark.parametrize(
    "pattern", ["[0-9]{3}-[a-z]{2}", "a|bc|(d[ef]){2,3}", "ä(ö|ü)?", "[^a]{4}"]
)
def test_texts_match_the_pattern(lm: LanguageModel, pattern: str) -> None:
    for seed in range(3):
        assert re.fullmatch(pattern, of_form(lm, Constraint.regex(pattern), seed), re.DOTALL)


def test_texts_are_one_of_the_choice(lm: LanguageModel) -> None:
    texts = ["yes", 'no "x"\\', "line\nä", "<tag>"]
    actual = {of_form(lm, Constraint.choice(texts), seed) for seed in range(24)}
    assert len(actual) > 1
    assert actual <= set(texts)


@pytest.mark.parametrize(
    ("added", "is_special"), [("<think>", False), ("<|a|>", True), ("[a]", True)]
)
def test_a_constraint_may_force_the_text_of_an_added_token(
    copied: Path, added: str, is_special: bool
) -> None:
    tokenizer = Tokenizer.from_file(str(copied / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(added, special=is_special)])
    tokenizer.save(str(copied / "tokenizer.json"))
    lm = load(copied, dtype="float32", cache_tokens=1024)
    for text in (added, f"a{added}é", f"{added}{added}"):
        assert of_form(lm, Constraint.choice([text, "z"]), 1) in (text, "z")
        assert of_form(lm, Constraint.choice([text])) == text
        value = {"const": {"a": text}}
        assert json.loads(of_form(lm, Constraint.json_schema(value))) == value["const"]
        assert of_form(lm, Constraint.regex(re.escape(text))) == text


def test_a_constraint_may_force_the_text_of_an_end_token(shipped: LanguageModel) -> None:
    text = "a<|endoftext|>b"
    assert of_form(shipped, Constraint.choice([text])) == text
    ended = shipped.generate("import", constraint=Constraint.choice([text]))[0]
    assert (ended.text, ended.finish_reason) == (text, "stop")


@pytest.mark.parametrize(
    "text", ['start: "a" b\nb: "(" b ")" | "x"\n', 'root ::= "a" b\nb ::= "(" b ")" | "x"\n']
)
def test_texts_are_of_the_grammar(lm: LanguageModel, text: str) -> None:
    actual = of_form(lm, Constraint.grammar(text), seed=3)
    depth = actual.count("(")
    assert actual == "a" + "(" * depth + "x" + ")" * depth


CASES: list[dict[str, Any]] = [
    {"constraint": Constraint.regex("[0-9]{2,4}[a-f]+")},
    {"constraint": Constraint.json_object(), "logit_bias": {5: 3.0}},
    {"constraint": Constraint.choice(["one", "other"]), "presence_penalty": 0.5},
]
FREE: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 5},
]


def test_free_requests_have_the_tokens_that_they_have_alone(lm: LanguageModel) -> None:
    prompts = ["import os\n", "def f(", "class A"]
    alone = [lm.generate(p, max_new_tokens=9, **f)[0] for p, f in zip(prompts, FREE, strict=True)]
    every = [SamplingParams(max_new_tokens=9, **fields) for pair in zip(FREE, CASES, strict=True)
             for fields in pair]  # fmt: skip
    mixed = lm.generate([p for p in prompts for _ in range(2)], every)
    assert [one.token_ids for one in mixed[::2]] == [one.token_ids for one in alone]
    assert [one.finish_reason for one in mixed[::2]] == [one.finish_reason for one in alone]
    for actual, one in zip(mixed[::2], alone, strict=True):
        assert actual.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_preempted_requests_keep_their_place(llama: Path, tiny: LanguageModel) -> None:
    tight = load(llama, dtype="float32", cache_tokens=96)
    prompts = [[1] * 30, [2] * 20, [3] * 25]
    params = SamplingParams(constraint=Constraint.regex("([0-9]{3}[a-z]{2})+"), max_new_tokens=40)
    expected = tiny.generate(prompts, params)
    computed = []
    forward = tight.engine.runner.forward

    def counted(batch: Any, *arguments: Any) -> torch.Tensor:
        computed.append(len(batch.token_ids))
        return forward(batch, *arguments)

    tight.engine.runner.forward = counted  # type: ignore[assignment, method-assign]
    actual = tight.generate(prompts, params)
    assert [one.token_ids for one in actual] == [one.token_ids for one in expected]
    assert all(re.fullmatch(r"([0-9]{3}[a-z]{2})+", one.text) for one in actual)
    assert sum(computed) > sum(map(len, prompts)) + 3 * 40  # some were computed twice


def test_streams_end_with_the_text(shipped: LanguageModel) -> None:
    constraint = Constraint.choice(["a longer text", "another long text"])
    deltas = list(shipped.stream("import os\n", constraint=constraint))
    assert "".join(delta.text for delta in deltas) in json.loads(constraint.text)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]


def test_end_tokens_come_where_the_text_is_complete(shipped: LanguageModel) -> None:
    constraint = Constraint.regex("(ab){1,200}")
    eager: dict[str, Any] = {
        "constraint": constraint,
        "logit_bias": {0: 100.0},
        "max_new_tokens": 50,
    }
    actual = shipped.generate("x", **eager)[0]
    assert (actual.text, actual.finish_reason, actual.token_ids[-1]) == ("ab", "stop", 0)
    deaf = shipped.generate("x", ignore_eos=True, **eager)[0]
    assert deaf.finish_reason == "length"
    assert 0 not in deaf.token_ids
    # A token that the request itself names, which the text would hold otherwise.
    (own,) = shipped.tokenizer.encode("b")[1:]
    named = shipped.generate(
        "x", constraint=Constraint.regex("a[ab]{2}b?"), stop_token_ids=[own], logit_bias={own: 99.0}
    )[0]
    assert (named.finish_reason, named.token_ids[-1]) == ("stop", own)
    assert re.fullmatch("a[ab]{2}b?", named.text.removesuffix("b"))


BAD = [
    (Constraint.json_schema({"type": "objct"}), "Invalid type: objct"),
    (Constraint.json_schema({"not": {"type": "null"}}), r"Unimplemented keys: \[\"not\"\]"),
    (Constraint.json_schema({"$ref": "#/$defs/a"}), "does not exist"),
    (Constraint.json_schema({"type": "integer", "minimum": 3, "maximum": 1}), "Unsatisfiable"),
    (Constraint.regex("(a"), "unclosed group"),
    (Constraint.regex("(?=a)"), "look-around"),
    (Constraint.grammar("start: other"), 'unknown name: "other"'),
    (Constraint.grammar("root ::= (a"), r"Expected '\)'"),
    (Constraint.grammar("other ::= [a]"), "No 'root' rule"),
]


@pytest.mark.parametrize(("constraint", "reason"), BAD)
def test_an_invalid_constraint_is_refused_before_anything_runs(
    tiny: LanguageModel, constraint: Constraint, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        tiny.generate([[1], [2]], [SamplingParams(), SamplingParams(constraint=constraint)])
    assert str(caught.value).startswith(f"The {constraint.kind} ")
    assert not tiny.engine.busy
    assert tiny.engine.pool.num_free == tiny.engine.pool.num_pages


@pytest.mark.parametrize(
    ("make", "value", "reason"),
    [
        (Constraint.json_schema, "{", "is no JSON"),
        (Constraint.json_schema, "[]", "must be a JSON object"),
        (Constraint.json_schema, {"const": {1}}, "is no JSON"),
        (Constraint.json_schema, {"const": float("nan")}, "is no JSON"),
        (Constraint.regex, "", "must be a text"),
        (Constraint.regex, 5, "must be a text"),
        (Constraint.regex, "\ud800", "is no character"),
        (Constraint.choice, [], "choice is empty"),
        (Constraint.choice, "yes", "must be a list"),
        (Constraint.choice, ["yes", ""], "must be a text"),
        (Constraint.grammar, None, "must be a text"),
    ],
)
def test_invalid_constraints_are_refused(make: Any, value: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        make(value)


def of_letters(letters: str, folder: Path) -> TextTokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer.of_json(tokenizer.to_str(), folder)


def test_a_vocabulary_without_an_allowed_next_token_ends_the_request(copied: Path) -> None:
    (copied / "tokenizer.json").write_text(of_letters("abc1", copied).serialized())
    lm = load(copied, dtype="float32", cache_tokens=256)
    with pytest.raises(RequestError, match="no token of the vocabulary can start a matching text"):
        lm.generate([[1]], constraint=Constraint.regex("d"))
    cut, free = lm.generate(
        [[1], [2]], [SamplingParams(constraint=Constraint.regex("[ab]d")), SamplingParams()]
    )
    assert cut.finish_reason == "constraint"
    assert len(cut.token_ids) == 2
    assert all(math.isfinite(logprob) for logprob in cut.logprobs)
    assert free == lm.generate([[2]])[0]
    ended = SamplingParams(constraint=Constraint.regex("[ab]d"), stop_token_ids=(7,))
    last = lm.generate([[1]], ended)[0]
    assert (last.finish_reason, last.token_ids[1]) == ("constraint", 7)
    assert not lm.engine.busy


def test_without_the_package_the_error_names_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load(llama, dtype="float32", cache_tokens=256)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"Try: .* 'interposer-engine\[constraints\]'"):
        lm.generate([[1]], constraint=Constraint.regex("a"))
    assert len(lm.generate([[1]])[0].token_ids) == 16


def test_without_a_tokenizer_constraints_are_refused(copied: Path) -> None:
    (copied / "tokenizer.json").unlink()
    lm = load(copied, dtype="float32", cache_tokens=256)
    with pytest.raises(RequestError, match="no tokenizer, which constraints need"):
        lm.generate([[1]], constraint=Constraint.regex("a"))
    lm.engine.constraints = None
    with pytest.raises(
        RequestError, match="A constraint needs a tokenizer, and this engine has none"
    ):
        lm.generate([[1]], constraint=Constraint.regex("a"))


def test_tokenizers_of_transformers_give_the_same_tokens(tmp_path: Path) -> None:
    shipped = TextTokenizer(SHIPPED)
    held = PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED / "tokenizer.json"))
    of_library = TextTokenizer.of_transformers(held)
    constraint = Constraint.regex("(im|ex)port [a-z]+")
    rows = []
    for tokenizer in (shipped, of_library):
        matcher = Constraints(tokenizer, 4096).matcher(constraint, frozenset({0}))
        row = torch.zeros(128, dtype=torch.int32)
        matcher.fill(row, matcher.compute())
        rows.append(row)
    assert torch.equal(*rows)
    assert rows[0].any()

    class Spelled:
        name_or_path = str(tmp_path)

    with pytest.raises(RequestError, match="is a Spelled, whose tokens have no bytes"):
        Constraints(TextTokenizer.of_transformers(Spelled()), 9).matcher(constraint, frozenset())


def test_tokens_without_bytes_are_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer = TextTokenizer.of_json(words.to_str(), tmp_path)
    with pytest.raises(RequestError, match="cannot be constrained with this tokenizer"):
        Constraints(tokenizer, 3).matcher(Constraint.regex("a"), frozenset())


@pytest.mark.parametrize("vocab_size", [250, 256, 300])
def test_the_vocabulary_may_differ_in_size_from_the_tokenizers(
    llama: Path, vocab_size: int
) -> None:
    constraints = Constraints(TextTokenizer(llama), vocab_size)
    row = torch.zeros(-(-vocab_size // 32), dtype=torch.int32)
    constraints.fill([(constraints.matcher(Constraint.regex("(?s:.)"), frozenset({3})), row)])
    bits = [v for v in range(32 * len(row)) if int(row[v // 32]) >> v % 32 & 1]
    assert bits
    assert max(bits) < 256
    assert 3 not in bits


def test_compiled_constraints_are_kept_for_later_requests(llama: Path) -> None:
    constraints = Constraints(TextTokenizer(llama), 256)
    first = Constraint.regex("a{0}b")
    compiled = constraints.compiled(first)
    assert constraints.compiled(first) is compiled
    assert constraints.compiled(Constraint.regex("a{1}b")) is not compiled


def test_threads_may_compile_at_once(llama: Path) -> None:
    constraints = Constraints(TextTokenizer(llama), 256)

    def rows(index: int) -> list[int]:
        row = torch.zeros(8, dtype=torch.int32)
        constraint = Constraint.regex(f"[a-{'bcd'[index % 3]}]+")
        constraints.fill([(constraints.matcher(constraint, frozenset()), row)])
        return row.tolist()

    with ThreadPoolExecutor(8) as threads:
        actual = list(threads.map(rows, range(48)))
    assert actual == [rows(index) for index in range(3)] * 16
