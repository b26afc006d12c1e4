"""Rules: how they are written, and what several of them come to for one request."""

from __future__ import annotations

import pickle
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interposer import Config, Request
from interposer._config.policy import Policy, pin_matches, policy_for
from interposer._config.rules import Rule, check_key, parse_rules
from interposer._contract.request import Kind
from interposer.errors import ConfigError, UnknownNameError
from interposer.records import PROPERTIES

FIELDS: dict[Kind, str] = {
    "kernel": "kernels",
    "layer": "layers",
    "attention": "attention",
    "scheme": "quantization",
}

some = st.sampled_from(["x", "y", "acme/z", "acme/*"])
sets = st.sets(some, max_size=2)
wishes: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    some.map(lambda name: {"pin": name}),
    st.lists(some, min_size=1, max_size=3).map(lambda names: {"prefer": names}),
)
rules = st.builds(lambda wish, forbid: Rule(**wish, forbid=forbid), wishes, sets)
globs = st.sampled_from(["", "*", "layers.*", "layers.0.*", "*.mlp", "layers.[01].mlp", "norm"])
keys = st.builds(
    lambda name, glob: f"{name}@{glob}" if glob else name, st.sampled_from(["a", "b", "*"]), globs
)
prefixes = st.sampled_from(["", "norm", "layers.0.mlp", "layers.1.attention", "layers.10.mlp"])
properties = st.sets(st.sampled_from(["deterministic", "traceable"]))


def test_a_rule_compares_with_rules_only() -> None:
    assert Rule(pin="x") == Rule(pin="x")
    text: object = "x"
    assert Rule(pin="x") != text
    assert len({Rule(forbid={"x", "y"}), Rule(forbid=["y", "x"])}) == 1


@pytest.mark.parametrize(
    ("rule", "text", "code"),
    [
        (Rule(), "nothing", "Rule()"),
        (Rule(pin="x"), "x", "Rule(pin='x')"),
        (
            Rule(prefer=["y", "acme/*"], forbid={"z", "b"}, require={"traceable"}),
            "+y, +acme/*, -b, -z, requires traceable",
            "Rule(prefer=('y', 'acme/*'), forbid=['b', 'z'], require=['traceable'])",
        ),
    ],
)
def test_a_rule_prints_its_wishes(rule: Rule, text: str, code: str) -> None:
    assert (str(rule), repr(rule)) == (text, code)
    assert pickle.loads(pickle.dumps(rule)) == rule


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"pin": 3}, "^pin = 3: "),
    ({"pin": ""}, "^pin = '': "),
    ({"pin": "x", "prefer": ["y"]}, "^a pin leaves nothing to prefer"),
    ({"prefer": {"x"}}, "^prefer = {'x'}: must be a list of names, the first choice first"),
    ({"prefer": ["x", 3]}, "^prefer.1 = 3: "),
    ({"forbid": "x"}, "^forbid = 'x': must be a list or a set of names"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_a_wrong_rule_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rule(**fields)


def test_an_unknown_field_of_a_rule_lists_the_nearest() -> None:
    wrong: dict[str, Any] = {"forbids": []}
    with pytest.raises(UnknownNameError, match=r"field 'forbids' of Rule.* first: 'forbid'"):
        Rule(**wrong)


@pytest.mark.parametrize("name", sorted(PROPERTIES))
def test_properties_about_results_or_capture_can_be_required(name: str) -> None:
    if name in ("opaque", "in_place"):
        with pytest.raises(UnknownNameError, match=f"property '{name}' in require"):
            Rule(require={name})
    else:
        assert Rule(require=[name]).require == {name}


@pytest.mark.parametrize("key", ["", "@", "a@", "@a.*", "a*", "[ab]@c", "a?@*"])
def test_a_malformed_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="is none of NAME, NAME@GLOB, "):
        check_key(key)


@pytest.mark.parametrize("key", ["a", "a@b.*", "*", "*@b.*", "compressed-tensors", "a@b@c"])
def test_the_forms_of_a_key(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize(
    ("key", "matches"),
    [
        ("a", True),
        ("b", False),
        ("*", True),
        ("a@layers.*", True),
        ("a@Layers.*", False),
        ("*@layers.0.mlp", True),
        ("*@layers.1.*", False),
        ("a@layers", False),
    ],
)
def test_a_key_matches_a_name_at_a_place(key: str, matches: bool) -> None:
    assert pin_matches(key, "a", "layers.0.mlp") is matches


@given(st.dictionaries(st.sampled_from(["a", "b@c.*", "*"]), rules))
def test_rules_read_back_from_their_text(written: dict[str, Rule]) -> None:
    written = {key: rule for key, rule in written.items() if rule != Rule()}
    items = [f"{key}={text}" for key, rule in written.items() for text in str(rule).split(", ")]
    parsed = parse_rules(items, "--kernel")
    assert {key: Rule(**fields) for key, fields in parsed.items()} == written


@given(st.dictionaries(keys, rules, max_size=6), st.sampled_from("abc"), prefixes, st.data())
def test_the_most_specific_wish_and_every_prohibition_apply(
    written: dict[str, Rule], name: str, prefix: str, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(sorted(FIELDS)))
    matching = {}
    for key, rule in written.items():
        key_name, _, glob = key.partition("@")
        if key_name in (name, "*") and (glob == "" or fnmatchcase(prefix, glob)):
            matching[key_name, glob] = rule
    # From the least specific to the most: what comes later replaces the wish.
    wish, forbid = Rule(), set[str]()
    for key_name in ("*", name):
        for glob in sorted({g for n, g in matching if n == key_name}, key=lambda g: (len(g), g)):
            rule = matching[key_name, glob]
            forbid |= rule.forbid
            if rule.pin or rule.prefer:
                wish = rule
    expected = Policy(wish.pin, wish.prefer, frozenset(forbid))
    request = Request(kind, name, prefix=prefix)
    fields: dict[str, Any] = {FIELDS[kind]: written}
    shuffled: dict[str, Any] = {
        FIELDS[kind]: dict(data.draw(st.permutations(list(written.items()))))
    }
    assert policy_for(Config(**fields), request) == expected
    assert policy_for(Config(**shuffled), request) == expected


@given(
    st.dictionaries(keys, properties.map(lambda p: Rule(require=p)), max_size=4),
    properties,
    prefixes,
    st.sampled_from(["kernel", "attention"]),
)
def test_everything_required_by_a_matching_rule_or_by_the_config_is_required(
    written: dict[str, Rule], everywhere: set[str], prefix: str, kind: Kind
) -> None:
    fields: dict[str, Any] = {FIELDS[kind]: written, "require": everywhere}
    policy = policy_for(Config(**fields), Request(kind, "a", prefix=prefix))
    matching = [rule for key, rule in written.items() if pin_matches(key, "a", prefix)]
    assert policy.require == everywhere.union(*(rule.require for rule in matching))


@pytest.mark.parametrize("kind", ["platform", "layer", "scheme"])
def test_global_requirements_skip_kinds_without_properties(
    kind: Kind,
) -> None:
    config = Config(require={"deterministic"})
    assert policy_for(config, Request(kind, "a")) == Policy()


def test_rules_of_one_kind_do_not_affect_another() -> None:
    config = Config(
        kernels={"a": "k"}, layers={"a": "l"}, attention={"a": "t"}, quantization={"a": "q"}
    )
    kinds: tuple[Kind, ...] = ("kernel", "layer", "attention", "scheme", "platform")
    assert [policy_for(config, Request(kind, "a")).pin for kind in kinds] == [*"kltq", None]


def test_the_rule_for_platforms() -> None:
    rule = Rule(prefer=["one"], forbid={"acme/*"})
    policy = policy_for(Config(platform=rule, strict=True), Request("platform", ""))
    assert policy == Policy(prefer=("one",), forbid=frozenset({"acme/*"}), strict=True)


PLACES: list[tuple[dict[str, str], str | None]] = [
    ({}, None),
    ({"embedding": "x"}, None),
    ({"linear": "x"}, "x"),
    ({"linear": "x", "*": "y", "*@layers.0.mlp": "z"}, "x"),
    ({"*": "y", "*@layers.*": "z"}, "z"),
    ({"linear": "x", "linear@layers.*": "y"}, "y"),
    ({"linear@layers.*": "y", "linear@layers.0.*": "z", "linear": "x"}, "z"),
    ({"linear@layers.1.*": "y", "linear": "x"}, "x"),
    ({"linear@layers.1.*": "y"}, None),
    ({"linear@*.mlp": "y"}, "y"),
    ({"linear@Layers.*": "y"}, None),
]


@pytest.mark.parametrize(("pins", "expected"), PLACES)
def test_the_most_specific_pin_of_a_place_applies(
    pins: dict[str, str], expected: str | None
) -> None:
    request = Request("kernel", "linear", prefix="layers.0.mlp")
    assert policy_for(Config(kernels=pins), request).pin == expected


def test_equal_policies_have_one_key() -> None:
    first = Policy(prefer=("a", "b"), forbid=frozenset({"c", "d"}))
    second = Policy(prefer=("a", "b"), forbid=frozenset({"d", "c"}))
    assert (first, hash(first)) == (second, hash(second))
    assert first != Policy(prefer=("b", "a"), forbid=frozenset({"c", "d"}))


def test_the_emulation_setting_applies_to_every_request() -> None:
    config = Config(emulation=False, kernels={"a": "k"})
    for name in ("a", "b"):
        assert not policy_for(config, Request("kernel", name, "bare")).emulation
    assert policy_for(Config(), Request("kernel", "a", "bare")).emulation
