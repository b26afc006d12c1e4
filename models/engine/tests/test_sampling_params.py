from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from interposer.errors import RequestError, UnknownNameError
from interposer_engine._sampling_params import Constraint, SamplingParams

RANGES = {
    "max_new_tokens": "an integer of at least 1",
    "temperature": "a number from 0, which is greedy, to 1000",
    "top_k": "0 or -1, which keep all tokens, or a positive integer",
    "top_p": "a number from 0 to 1",
    "min_p": "a number from 0 to 1",
    "repetition_penalty": "a number from 0.001 to 1000",
    "presence_penalty": "a number from -2 to 2",
    "frequency_penalty": "a number from -2 to 2",
    "seed": "None or an integer from 0 to 2^63 - 1",
    "stop": "a list or tuple of texts that are not empty",
    "stop_token_ids": "a list or tuple of integers of at least 0",
    "ignore_eos": "True or False",
    "min_tokens": "an integer from 0 to max_new_tokens",
    "logit_bias": "token ids with numbers from -100 to 100",
    "constraint": "None or a Constraint, such as Constraint.regex('[0-9]+')",
    "transcript": "None or TranscriptRules",
    "top_logprobs": "an integer from 0 to 20",
    "prompt_logprobs": "None or an integer from 0 to 20",
    "adapter": "None or the name of a loaded adapter",
    "cache_salt": "a text",
}
INTEGERS = ("max_new_tokens", "top_k", "seed", "min_tokens", "top_logprobs")
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def refuse(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == f"{name} is {value!r}; allowed is {RANGES[name]}"


def test_defaults_are_greedy_and_neutral() -> None:
    assert SamplingParams().model_dump() == {
        "max_new_tokens": 16,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "min_tokens": 0,
        "logit_bias": {},
        "constraint": None,
        "transcript": None,
        "top_logprobs": 0,
        "prompt_logprobs": None,
        "adapter": None,
        "cache_salt": "",
    }


def test_every_field_describes_its_allowed_values() -> None:
    assert {n: f.description for n, f in SamplingParams.model_fields.items()} == RANGES


@pytest.mark.parametrize(
    ("name", "least", "largest"),
    [
        ("max_new_tokens", 1, 10**9),
        ("temperature", 0.0, 1000.0),
        ("top_k", 0, 2**63 - 1),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.001, 1000.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("seed", 0, 2**63 - 1),
    ],
)
def test_both_ends_of_a_range_are_allowed(name: str, least: Any, largest: Any) -> None:
    for value in (least, largest):
        fields: dict[str, Any] = {name: value}
        assert getattr(SamplingParams(**fields), name) == value


def test_top_k_of_minus_one_keeps_all_tokens() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) == SamplingParams()


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf"), -3.0, 1e4, True, False, "1", None, [1.0]]
)
def test_numbers_outside_the_range_are_refused(name: str, value: Any) -> None:
    refuse(name, value)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [-2, True, False, 1.0, 1.5, float("nan"), "1", [1]])
def test_integers_outside_the_range_are_refused(name: str, value: Any) -> None:
    refuse(name, value)


@pytest.mark.parametrize("name", ["top_k", "seed"])
def test_integers_fit_the_ops(name: str) -> None:
    refuse(name, 2**63)


def test_at_least_one_token_must_be_requested() -> None:
    refuse("max_new_tokens", 0)


@pytest.mark.parametrize("value", ["text", ["fine", ""], [1], 3, None, {"a": 1}])
def test_stop_must_be_a_list_of_texts(value: Any) -> None:
    refuse("stop", value)


@pytest.mark.parametrize("value", [1, [-1], [True], [1.0], ["1"], None])
def test_stop_token_ids_must_be_a_list_of_ids(value: Any) -> None:
    refuse("stop_token_ids", value)


@pytest.mark.parametrize("value", [0, 1, "yes", None])
def test_ignore_eos_must_be_a_bool(value: Any) -> None:
    refuse("ignore_eos", value)


def test_lists_become_tuples() -> None:
    params = SamplingParams(stop=["\n", "end"], stop_token_ids=[2, 7])  # type: ignore[arg-type]
    assert params.stop == ("\n", "end")
    assert params.stop_token_ids == (2, 7)


def test_an_unknown_name_lists_the_nearest_first() -> None:
    with pytest.raises(UnknownNameError) as caught:
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    assert caught.value.name == "temprature"
    assert caught.value.known[0] == "temperature"
    assert set(caught.value.known) == set(RANGES)


def test_an_unknown_name_is_reported_before_a_wrong_value() -> None:
    with pytest.raises(UnknownNameError, match="max_tokens"):
        SamplingParams(temperature=-1.0, max_tokens=3)  # type: ignore[call-arg]


def test_params_cannot_change_and_can_be_keys() -> None:
    params = SamplingParams(temperature=0.5)
    with pytest.raises(ValidationError, match="frozen"):
        params.temperature = 0.7
    assert {params: 1}[SamplingParams(temperature=0.5)] == 1
    biased = SamplingParams(logit_bias={3: 1.0, 5: -2.0})
    assert {biased: 1}[SamplingParams(logit_bias={5: -2.0, 3: 1.0})] == 1
    assert biased != params


@given(
    temperature=st.floats(0, 1000),
    top_k=st.integers(0, 2**63 - 1),
    top_p=st.floats(0, 1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 2**63 - 1), st.floats(-100, 100), max_size=3),
    constraint=st.none() | st.builds(Constraint.regex, st.text(min_size=1)),
    top_logprobs=st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
def test_values_in_range_are_kept_unchanged(**fields: Any) -> None:
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 1, "stop": ("x",)}, True),
        ({"temperature": 1e-3}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": -0.5}, False),
        ({"frequency_penalty": 0.5}, False),
        ({"min_tokens": 1}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"constraint": Constraint.regex("a")}, False),
        ({"top_logprobs": 1}, False),
    ],
)
def test_which_parameters_decode_greedily(fields: dict[str, Any], expected: bool) -> None:
    params = SamplingParams(**fields)
    assert params.takes_likeliest is expected
    # What was found out is kept, and is no part of the parameters.
    assert params == SamplingParams(**fields)
    assert hash(params) == hash(SamplingParams(**fields))
    assert "takes_likeliest" not in params.model_dump()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {3: 101}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"3": 1}),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", [3]),
        ("constraint", {"type": "object"}),
        ("constraint", "[0-9]+"),
        ("top_logprobs", 21),
        ("prompt_logprobs", 21),
        ("min_tokens", -1),
    ],
)
def test_values_out_of_range_of_logit_edits_are_refused(name: str, value: Any) -> None:
    refuse(name, value)


def test_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens is 17, which is more than max_new_tokens"):
        SamplingParams(min_tokens=17)
    with pytest.raises(RequestError, match="min_tokens and constraint are both given"):
        SamplingParams(min_tokens=1, constraint=Constraint.regex("a"))
