"""The policy: where it comes from, which source counts, and what is said about a mistake in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interposer import Config, effective_config, use
from interposer.errors import ConfigError, UnknownNameError

MAPPINGS = ("kernels", "layers", "attention")
names = st.sampled_from(["a", "b", "c@layers.*"])
mappings = st.dictionaries(names, st.sampled_from(["x", "y", "acme/z"]), max_size=3)
policies = st.fixed_dictionaries(
    {},
    optional={
        "platform": st.sampled_from(["cpu", "tpu"]),
        "kernels": mappings,
        "layers": mappings,
        "attention": mappings,
        "disable": st.sets(st.sampled_from(["one", "two"])).map(sorted),
    },
)


@given(policies, policies, policies, policies)
def test_argument_goes_before_context_before_file_before_environment(
    argument: dict[str, Any],
    context: dict[str, Any],
    file: dict[str, Any],
    environment: dict[str, Any],
) -> None:
    with sources(environment, file), use(**context):
        found = effective_config(Config(**argument))
    by_precedence = (argument, context, file, environment)
    assert found.platform == first("platform", by_precedence, None)
    assert found.disable == frozenset(first("disable", by_precedence, ()))
    for name in MAPPINGS:
        merged: dict[str, str] = {}
        for source in reversed(by_precedence):
            merged |= source.get(name, {})
        assert getattr(found, name) == merged


def first(name: str, by_precedence: tuple[dict[str, Any], ...], default: object) -> Any:
    return next((source[name] for source in by_precedence if name in source), default)


@contextlib.contextmanager
def sources(environment: Mapping[str, Any], file: Mapping[str, Any]) -> Any:
    """Write both to where the configuration looks for them."""
    variables = {}
    for name, value in environment.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}={chosen}" for key, chosen in value.items())
        variables[f"INTERPOSER_{name.upper()}"] = value if name == "platform" else as_text(value)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        lines = [f"{name} = {as_toml(value)}" for name, value in file.items()]
        Path("interposer.toml").write_text("\n".join(lines))
        with mock.patch.dict(os.environ, variables):
            yield


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else ",".join(value)


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def test_nothing_set_is_the_default() -> None:
    assert effective_config() == Config()
    assert effective_config(Config()).kernels == {}


def test_none_as_an_argument_overrides_a_platform_from_below() -> None:
    with use(platform="cpu"):
        assert effective_config(Config(platform=None)).platform is None


def test_the_effective_configuration_as_an_argument_stays_as_it_is() -> None:
    with use(platform="cpu", kernels={"a": "x"}):
        found = effective_config()
        assert effective_config(found) == found


def test_a_policy_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().platform = "cpu"


def test_a_policy_keeps_no_link_to_what_it_was_made_from() -> None:
    kernels = {"a": "x"}
    config = Config(kernels=kernels)
    kernels["a"] = "y"
    assert config.kernels == {"a": "x"}


@pytest.mark.parametrize("names", [{"a", "b"}, ["a", "b"], ("b", "a"), frozenset("ab")])
def test_disable_takes_any_collection_of_names(names: Any) -> None:
    assert Config(disable=names).disable == {"a", "b"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"platform": 3}, "platform = 3: "),
    ({"kernels": ["a"]}, r"kernels = \['a'\]: "),
    ({"kernels": {"a": 1}}, "kernels.a = 1: "),
    ({"disable": "a"}, "disable = 'a': "),
    ({"disable": [1]}, "disable.0 = 1: "),
]


@pytest.mark.parametrize(("fields", "text"), WRONG)
def test_a_wrong_value_is_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}"):
        Config(**fields)
    with pytest.raises(ConfigError, match=rf"^use\(\): {text}"), use(**fields):
        pass


def test_an_unknown_key_lists_the_nearest() -> None:
    wrong: dict[str, Any] = {"kernel": {}}
    with pytest.raises(UnknownNameError) as caught:
        Config(**wrong)
    assert caught.value.known[0] == "kernels"
    with (
        pytest.raises(UnknownNameError, match=r"key 'kernel' in use\(\).*first: 'kernels'"),
        use(**wrong),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("platform = 3", "platform = 3: Input should be a valid string"),
        ("[kernels]\na = true", "kernels.a = True: "),
        ("disable = 'x'", "disable = 'x': "),
        ("platform =", "cannot be read: Invalid value"),
        ("platform = '\udcff'", "cannot be read: "),
    ],
)
def test_a_mistake_in_the_file_names_the_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "interposer.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        effective_config()
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_an_unknown_key_in_the_file_names_the_file_and_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "interposer.toml").write_text("platfrom = 'cpu'")
    with pytest.raises(UnknownNameError, match=r"'platfrom' in .*toml.*first: 'platform'"):
        effective_config()


def test_a_file_that_cannot_be_read_is_not_ignored(tmp_path: Path) -> None:
    (tmp_path / "interposer.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        effective_config()


@pytest.mark.parametrize("variable", ["INTERPOSER_PLATFROM", "INTERPOSER_platform", "INTERPOSER_"])
def test_an_unknown_variable_raises(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "cpu")
    with pytest.raises(UnknownNameError) as caught:
        effective_config()
    assert caught.value.name == variable
    assert "INTERPOSER_PLATFORM" in caught.value.known


def test_variables_of_others_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERPOSERX", "1")
    assert effective_config() == Config()


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("", {}),
        (" , ", {}),
        ("a=x", {"a": "x"}),
        (" a = x , b@layers.*=acme/y,", {"a": "x", "b@layers.*": "acme/y"}),
        ("a=x,a=x", {"a": "x"}),
    ],
)
def test_pairs_in_a_variable(
    text: str, pairs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERPOSER_KERNELS", text)
    assert effective_config().kernels == pairs


@pytest.mark.parametrize("text", ["a", "a=", "=x", "a=x,b"])
def test_a_malformed_pair_is_named_with_the_form(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERPOSER_KERNELS", text)
    wrong = text.split(",")[-1]
    with pytest.raises(
        ConfigError, match=f"INTERPOSER_KERNELS: '{wrong}' is not of the form NAME="
    ):
        effective_config()


def test_two_answers_for_one_name_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERPOSER_KERNELS", "a=x,a=y")
    with pytest.raises(ConfigError, match="'a' is set to 'x' and to 'y'"):
        effective_config()


def test_names_to_disable_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERPOSER_DISABLE", " one,, two ")
    assert effective_config().disable == {"one", "two"}


def test_blocks_nest_and_end() -> None:
    with use(platform="cpu", kernels={"a": "x"}) as outer:
        assert outer == effective_config()
        with use(Config(kernels={"b": "y"})) as inner:
            assert inner.platform == "cpu"
            assert inner.kernels == {"a": "x", "b": "y"}
        assert effective_config() == outer
    assert effective_config() == Config()


def test_a_block_ends_when_it_raises() -> None:
    with pytest.raises(KeyError), use(platform="cpu"):
        raise KeyError
    assert effective_config() == Config()


def test_a_block_that_cannot_be_entered_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INTERPOSER_NONSENSE", "1")
    with pytest.raises(UnknownNameError), use(platform="cpu"):
        pass
    monkeypatch.delenv("INTERPOSER_NONSENSE")
    assert effective_config() == Config()


def test_an_argument_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\{'platform': 'cpu'\}, must be a Config"):
        effective_config({"platform": "cpu"})  # type: ignore[arg-type]


def test_a_config_and_fields_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="not both"), use(Config(), platform="cpu"):
        pass


def test_threads_see_their_own_blocks_only() -> None:
    seen: dict[str, str | None] = {}
    together = threading.Barrier(2, timeout=30)

    def work(name: str) -> None:
        seen[f"{name} before"] = effective_config().platform
        with use(platform=name):
            together.wait()
            seen[name] = effective_config().platform
            together.wait()

    with use(platform="main"):
        threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert effective_config().platform == "main"
    assert seen == {"one before": None, "two before": None, "one": "one", "two": "two"}


def test_tasks_see_their_own_blocks_and_those_they_were_created_in() -> None:
    async def work(name: str, entered: asyncio.Event, other: asyncio.Event) -> tuple[Any, ...]:
        before = effective_config().platform
        with use(platform=name):
            entered.set()
            await other.wait()
            return before, effective_config().platform

    async def main() -> list[tuple[Any, ...]]:
        one, two = asyncio.Event(), asyncio.Event()
        with use(platform="main"):
            return list(await asyncio.gather(work("one", one, two), work("two", two, one)))

    assert asyncio.run(main()) == [("main", "one"), ("main", "two")]
