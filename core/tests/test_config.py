"""The policy: where it comes from, which source counts, and what is said about a mistake in it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import WAIT_SECONDS

from interposer import Config, effective_config, use
from interposer._config import config as config_module
from interposer._config.config import Source, config_sources
from interposer._config.rules import Rule, read_rule
from interposer.errors import ConfigError, UnknownNameError

MAPPINGS = ("kernels", "layers", "attention", "quantization")
VARIABLES = "platform kernels layers attention plugins disable strict cache_dir"

some = st.sampled_from(["x", "y", "acme/z", "acme/*"])
lists = st.lists(some, min_size=1, max_size=2, unique=True)
rules = st.one_of(
    st.sampled_from(["x", "acme/z"]),
    st.fixed_dictionaries({"prefer": lists}, optional={"forbid": lists}),
    st.fixed_dictionaries({"forbid": lists}, optional={"pin": some}),
)
mappings = st.dictionaries(st.sampled_from(["a", "b", "a@layers.*", "*"]), rules, max_size=3)
properties = st.lists(st.sampled_from(["deterministic", "traceable"]), unique=True)
fields = {
    "platform": rules,
    **dict.fromkeys(MAPPINGS, mappings),
    "require": properties,
    "disable": st.lists(st.sampled_from(["one", "two"]), min_size=1, unique=True),
    "plugins": st.sampled_from(["all", "none", ["acme"], ["acme", "zeta"]]),
    "strict": st.booleans(),
    "locked": st.booleans(),
    "canary": st.sampled_from(["third_party", "all", "off"]),
    "probe_seconds": st.sampled_from([1.0, 2.5, 600.0]),
    "cache_dir": st.sampled_from(["/caches", "caches"]),
}
configs = st.fixed_dictionaries({}, optional=fields)
environments = st.fixed_dictionaries(
    {}, optional={name: fields[name] for name in VARIABLES.split()}
)


@pytest.fixture(autouse=True)
def _no_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    for variable in os.environ:
        if variable.startswith("INTERPOSER_"):
            monkeypatch.delenv(variable)
    Config.refresh()
    yield
    monkeypatch.undo()
    Config.refresh()


# Precedence


@given(configs, st.lists(configs, max_size=2), configs, configs, environments, st.booleans())
def test_argument_before_context_before_project_before_user_before_environment(
    argument: dict[str, Any],
    blocks: list[dict[str, Any]],
    project: dict[str, Any],
    user: dict[str, Any],
    environment: dict[str, Any],
    shared: bool,
) -> None:
    with (
        written(environment, project, user, shared=shared) as folder,
        contextlib.ExitStack() as stack,
    ):
        for block in blocks:
            stack.enter_context(use(**block))
        config = effective_config(Config(**argument))
        sources = config_sources(Config(**argument))
    files = [placed(project, folder), placed(user, folder / "home" / "interposer")]
    strongest_first = [argument, *reversed(blocks), *files, environment]
    for name in fields:
        stated_names = [source[name] for source in strongest_first if name in source]
        if name in MAPPINGS:
            merged = {key: read_rule(r) for of in reversed(stated_names) for key, r in of.items()}
            assert getattr(config, name) == merged
        else:
            expected = Config(**({name: stated_names[0]} if stated_names else {}))
            assert getattr(config, name) == getattr(expected, name)
    kinds = ["argument", *["use()"] * len(blocks), "project file", "user file", "environment"]
    if not any(value is False or value for value in environment.values()):
        kinds.pop()  # empty variables set nothing
    assert [source.name for source in sources] == kinds
    for source, stated_fields in zip(sources, strongest_first, strict=False):
        if source.name != "environment":
            assert source.config == Config(**stated_fields)


def placed(stated: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings of a file in ``folder``, with the path of ``cache_dir`` resolved."""
    if "cache_dir" not in stated:
        return stated
    return {**stated, "cache_dir": str(folder / stated["cache_dir"])}


@contextlib.contextmanager
def written(
    environment: Mapping[str, Any],
    project: Mapping[str, Any],
    user: Mapping[str, Any],
    shared: bool,
) -> Iterator[Path]:
    """Write all three to where the configuration looks for them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        pytest.MonkeyPatch.context() as patch,
    ):
        home = Path(folder, "home")
        (home / "interposer").mkdir(parents=True)
        (home / "interposer" / "config.toml").write_text(as_toml(user))
        if shared:
            Path("pyproject.toml").write_text("[tool.interposer]\n" + as_toml(project))
        else:
            Path("interposer.toml").write_text(as_toml(project))
        patch.setenv("XDG_CONFIG_HOME", str(home))
        for name, value in environment.items():
            patch.setenv(f"INTERPOSER_{name.upper()}", as_variable(name, value))
        Config.refresh()
        yield Path.cwd()


def as_toml(fields: Mapping[str, Any]) -> str:
    return "\n".join(f"{name} = {toml(value)}" for name, value in fields.items())


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def as_variable(name: str, value: Any) -> str:
    if name == "platform":
        return ",".join(choices(value))
    if isinstance(value, dict):
        return ", ".join(f"{key}={text}" for key, rule in value.items() for text in choices(rule))
    if isinstance(value, bool):
        return str(int(value))
    return value if isinstance(value, str) else ",".join(value)


def choices(rule: Any) -> list[str]:
    if isinstance(rule, str):
        return [rule]
    signs = {"pin": "", "prefer": "+", "forbid": "-"}
    return [
        signs[name] + value
        for name, values in rule.items()
        for value in ([values] if isinstance(values, str) else values)
    ]


def test_an_empty_configuration_is_the_default() -> None:
    assert effective_config() == Config()
    assert effective_config(Config()).kernels == {}
    assert config_sources() == []


def test_none_as_an_argument_overrides_a_weaker_platform() -> None:
    with use(platform="cpu"):
        assert effective_config(Config(platform=None)).platform is None


def test_an_empty_rule_removes_a_weaker_rule() -> None:
    with use(kernels={"a": "x", "b": "y"}):
        config = effective_config(Config(kernels={"a": {}}))
    assert config.kernels == {"a": Rule(), "b": Rule(pin="y")}


def test_the_effective_configuration_as_an_argument_stays_as_it_is() -> None:
    with use(platform="cpu", kernels={"a": "x"}):
        config = effective_config()
        assert effective_config(config) == config


# Values


@given(configs)
def test_a_config_survives_json_and_pickle(fields: dict[str, Any]) -> None:
    config = Config(**fields)
    plain = Source("argument", "", config).fields
    assert plain.keys() == fields.keys()
    restored = Config(**json.loads(json.dumps(plain)))
    assert restored == config
    assert hash(restored) == hash(config)
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_folder_in_the_home_is_relative_to_the_home(tmp_path: Path) -> None:
    (tmp_path / "interposer.toml").write_text("cache_dir = '~/caches'")
    assert Config.refresh().cache_dir == "~/caches"


@pytest.mark.parametrize("bad", [{"platfrom": "cpu"}, {"strict": 3}, {"kernels": 3}, "cpu"])
def test_every_way_to_validate_an_invalid_configuration_raises(bad: Any) -> None:
    with pytest.raises(ConfigError) as validated:
        Config.model_validate(bad)
    with pytest.raises(ConfigError) as restored:
        Config.model_validate_json(json.dumps(bad))
    if isinstance(bad, dict):
        with pytest.raises(ConfigError) as created:
            Config(**bad)
        assert str(created.value) == str(validated.value) == str(restored.value)
    assert Config.model_validate({"strict": True}) == Config(strict=True)


def test_the_rules_of_a_config_are_read_only() -> None:
    config = Config(kernels={"a": "x"})
    for mapping in (config.kernels, config.layers):
        with pytest.raises(TypeError):
            mapping["b"] = Rule(pin="y")  # type: ignore[index]
    assert hash(copy.deepcopy(config)) == hash(config) == hash(pickle.loads(pickle.dumps(config)))
    assert copy.deepcopy(config) == config == config.model_copy()
    assert pickle.loads(pickle.dumps(config)).model_fields_set == {"kernels"}


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().platform = Rule(pin="cpu")


def test_a_config_does_not_change_with_its_arguments() -> None:
    kernels = {"a": "x"}
    config = Config(kernels=kernels)
    kernels["a"] = "y"
    assert config.kernels == {"a": Rule(pin="x")}


def test_a_config_prints_the_fields_that_differ_from_the_default() -> None:
    config = Config(kernels={"a": "x", "b": Rule(forbid={"y"})}, disable=["d", "c"], strict=False)
    text = "Config(kernels={'a': Rule(pin='x'), 'b': Rule(forbid=['y'])}, disable=['c', 'd'])"
    assert (str(config), repr(config)) == (text, text)
    assert str(Config()) == "Config()"


@pytest.mark.parametrize("names", [{"a", "b"}, ["a", "b"], ("b", "a"), frozenset("ab")])
@pytest.mark.parametrize("field", ["disable", "plugins"])
def test_any_collection_of_names_is_accepted(field: str, names: Any) -> None:
    assert getattr(Config(**{field: names}), field) == {"a", "b"}


def test_a_word_can_allow_all_or_no_plugins() -> None:
    assert Config(plugins="none").plugins == frozenset()
    assert Config(plugins="all").plugins is None
    assert Config().plugins is None


def test_a_folder_may_be_a_path(tmp_path: Path) -> None:
    assert Config(cache_dir=tmp_path).cache_dir == str(tmp_path)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"platform": 3}, "platform = 3: must be a name or a rule"),
    ({"kernels": ["a"]}, r"kernels = \['a'\]: "),
    ({"kernels": {"a": 1}}, "kernels.a = 1: must be a name or a rule"),
    ({"kernels": {"a": ""}}, "kernels.a: pin = '': "),
    ({"kernels": {"a": {"prefer": "x"}}}, "kernels.a: prefer = 'x': must be a list of names, the"),
    ({"kernels": {"a": {"pin": "x", "prefer": ["y"]}}}, "kernels.a: a pin leaves nothing to"),
    ({"kernels": {"a@": "x"}}, "kernels: the key 'a@' is none of NAME, NAME@GLOB"),
    ({"kernels": {1: "x"}}, "kernels = 1: "),
    ({"layers": {"a": {"require": ["traceable"]}}}, "layers.a requires traceable, but only kern"),
    ({"platform": {"require": ["traceable"]}}, "platform requires traceable, but only kernels"),
    ({"disable": "a"}, "disable = 'a': must be a list or a set of names"),
    ({"disable": [1]}, "disable.0 = 1: "),
    ({"plugins": "acme"}, "plugins = 'acme': "),
    ({"strict": 1}, "strict = 1: "),
    ({"canary": False}, "canary = False: "),
    ({"probe_seconds": 0}, "probe_seconds = 0: "),
    ({"probe_seconds": 601}, "probe_seconds = 601: "),
    ({"probe_seconds": float("nan")}, "probe_seconds = nan: "),
    ({"cache_dir": ""}, "cache_dir = '': "),
]


@pytest.mark.parametrize(("fields", "text"), WRONG)
def test_a_wrong_value_is_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}"):
        Config(**fields)
    with pytest.raises(ConfigError, match=rf"^use\(\): {text}"), use(**fields):
        pass


UNKNOWN: list[tuple[dict[str, Any], str, str]] = [
    ({"kernel": {}}, "kernel", "kernels"),
    ({"kernels": {"a": {"forbids": []}}}, "forbids", "forbid"),
    ({"kernels": {"a": {3: []}}}, "3", "forbid"),
    ({"kernels": {"a": {"require": ["deterministc"]}}}, "deterministc", "deterministic"),
    ({"require": ["graphsafe"]}, "graphsafe", "graph_safe"),
    ({"require": ["opaque"]}, "opaque", "graph_safe"),
    ({"canary": "of"}, "of", "off"),
    ({"isolation": "proces"}, "proces", "process"),
]


@pytest.mark.parametrize(("fields", "name", "nearest"), UNKNOWN)
def test_an_unknown_key_or_value_lists_the_nearest(
    fields: dict[str, Any], name: str, nearest: str
) -> None:
    with pytest.raises(UnknownNameError) as caught:
        Config(**fields)
    assert (caught.value.name, caught.value.known[0]) == (name, nearest)
    with pytest.raises(UnknownNameError, match=r"(in|of) use\(\)\. Known") as caught, use(**fields):
        pass
    assert (caught.value.name, caught.value.known[0]) == (name, nearest)


def test_an_unknown_key_says_where() -> None:
    wrong: dict[str, Any] = {"kernels": {"a@b.*": {"forbids": []}}}
    with pytest.raises(
        UnknownNameError, match=r"^Unknown key 'forbids' in kernels\.a@b\.\* of use"
    ):
        use(**wrong).__enter__()


# Files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("platform = ", "cannot be read: Invalid value"),
        ("platform = 3", "interposer.toml: platform = 3: "),
        ("[kernels]\nrms_norm = ['x']", r"interposer.toml: kernels.rms_norm = \['x'\]: "),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "interposer.toml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        Config.refresh()
    assert str(tmp_path) in str(caught.value)


def test_an_unknown_key_in_a_file_lists_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "interposer.toml").write_text("platfrom = 'cpu'")
    with pytest.raises(UnknownNameError, match=r"'platfrom' in .*toml.*first: 'platform'"):
        Config.refresh()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs the files of Unix")
@pytest.mark.parametrize("name", ["interposer.toml", "pyproject.toml"])
def test_a_fifo_in_place_of_a_file_is_named(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(
        ConfigError, match=f"{name} cannot be read: it is a FIFO, not a regular file"
    ):
        Config.refresh()


def test_sources_are_read_once_and_again_after_a_refresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = effective_config()
    (tmp_path / "interposer.toml").write_text("[kernels]\na = 'x'")
    monkeypatch.setenv("INTERPOSER_PLATFORM", "cpu")
    assert effective_config() is before
    config = Config.refresh()
    assert config == Config(platform="cpu", kernels={"a": "x"})
    assert effective_config() is config
    assert [(s.name, s.path, s.fields) for s in config_sources()] == [
        ("project file", str(tmp_path / "interposer.toml"), {"kernels": {"a": "x"}}),
        ("environment", "", {"platform": "cpu"}),
    ]


@pytest.mark.parametrize("source", ["_user_file", "_environment", "_external_config"])
def test_a_read_during_a_refresh_does_not_keep_old_sources(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    effective_config()
    reader = getattr(config_module, source)
    forget = reader.forget

    def read_and_forget() -> None:
        effective_config()  # as another thread may do at this moment
        forget()

    monkeypatch.setattr(reader, "forget", read_and_forget)
    monkeypatch.setenv("INTERPOSER_PLATFORM", "cpu")
    assert Config.refresh() == Config(platform="cpu")
    assert effective_config() == Config(platform="cpu")


def test_each_working_directory_has_its_project_file_and_all_share_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "interposer.toml").write_text(f"platform = '{name}'")
    monkeypatch.setenv("INTERPOSER_DISABLE", "before")
    Config.refresh()
    monkeypatch.setenv("INTERPOSER_DISABLE", "after")
    for name in ("one", "two", "one"):
        monkeypatch.chdir(tmp_path / name)
        assert effective_config() == Config(platform=name, disable={"before"})


@pytest.mark.skipif(sys.platform == "win32", reason="needs to remove its working directory")
def test_a_removed_working_directory_has_no_project_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert effective_config() == Config()
    monkeypatch.chdir(tmp_path)


def test_a_bad_source_raises_at_every_use_until_it_is_mended(tmp_path: Path) -> None:
    effective_config()
    (tmp_path / "interposer.toml").write_text("platfrom = 'cpu'")
    with pytest.raises(UnknownNameError):
        Config.refresh()
    with pytest.raises(UnknownNameError):
        effective_config(Config(platform="cpu"))
    with pytest.raises(UnknownNameError), use(platform="cpu"):
        pass
    with pytest.raises(UnknownNameError):
        config_sources()
    (tmp_path / "interposer.toml").write_text("platform = 'cpu'")
    assert Config.refresh() == effective_config() == Config(platform="cpu")


def test_concurrent_first_reads_share_one_result() -> None:
    barrier = threading.Barrier(8, timeout=WAIT_SECONDS)

    def ask(_: int) -> Config:
        barrier.wait()
        return effective_config()

    Config.refresh()
    with ThreadPoolExecutor(8) as pool:
        assert len({id(config) for config in pool.map(ask, range(8))}) == 1


def test_repeated_reads_are_cheap() -> None:
    """Without changes a further question makes few calls, and reads neither files nor variables."""
    first = effective_config()
    calls: list[str] = []

    def note_call(_frame: object, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            calls.append(event)

    sys.setprofile(note_call)
    try:
        again = effective_config()
    finally:
        sys.setprofile(None)
    assert again is first
    assert 0 < len(calls) < 30


# The environment


@pytest.mark.parametrize(
    "variable",
    ["INTERPOSER_PLATFROM", "INTERPOSER_platform", "INTERPOSER_", "INTERPOSER_PLATFORMS"],
)
def test_an_unknown_variable_raises(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "cpu")
    with pytest.raises(UnknownNameError) as caught:
        Config.refresh()
    assert caught.value.name == variable
    assert "INTERPOSER_PLATFORM" in caught.value.known


@pytest.mark.landing(19)
@pytest.mark.parametrize("field", Config.model_fields)
def test_a_few_fields_have_a_variable(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"INTERPOSER_{field.upper()}", "")
    if field in VARIABLES.split():
        assert Config.refresh() == Config()  # an empty variable sets nothing
        assert config_sources() == []
    else:
        with pytest.raises(UnknownNameError):
            Config.refresh()


def test_variables_with_other_prefixes_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERPOSERX", "1")
    assert Config.refresh() == Config()


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", {}),
        (" , ", {}),
        ("a=x", {"a": "x"}),
        (" a = x , b@layers.*=acme/y,", {"a": "x", "b@layers.*": "acme/y"}),
        ("a=x,a=x", {"a": "x"}),
        ("a=+x,a=+y,a=-z", {"a": {"prefer": ["x", "y"], "forbid": ["z"]}}),
        ("*=-acme/*", {"*": {"forbid": ["acme/*"]}}),
        ("a=x,a = - y", {"a": {"pin": "x", "forbid": ["y"]}}),
    ],
)
def test_rules_in_a_variable(
    text: str, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERPOSER_KERNELS", text)
    assert Config.refresh() == Config(kernels=rules)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("cpu", "cpu"),
        (" +one, +two ,-three", {"prefer": ["one", "two"], "forbid": ["three"]}),
        ("-acme/*", {"forbid": ["acme/*"]}),
    ],
)
def test_a_platform_in_a_variable(text: str, rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERPOSER_PLATFORM", text)
    assert Config.refresh() == Config(platform=rule)


@pytest.mark.parametrize("text", ["a", "a=", "=x", "a=x,b", "a=+", "a=-"])
def test_a_malformed_rule_is_named_with_the_form(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERPOSER_KERNELS", text)
    wrong = text.split(",")[-1].replace("+", r"\+")
    with pytest.raises(
        ConfigError, match=f"INTERPOSER_KERNELS: '{wrong}' is not of the form NAME="
    ):
        Config.refresh()


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("KERNELS", "a=x,a=y", "^INTERPOSER_KERNELS: 'a' is set to 'x' and to 'y'"),
        ("PLATFORM", "cpu,tpu", "^INTERPOSER_PLATFORM: 'platform' is set to 'cpu' and to 'tpu'"),
        ("KERNELS", "a=x,a=+y", "^the environment: kernels.a: a pin leaves nothing to prefer"),
        ("KERNELS", "a*=x", "^the environment: kernels: the key 'a[*]' is none of"),
        ("STRICT", "yes", "^INTERPOSER_STRICT is 'yes', must be 1 or 0"),
    ],
)
def test_an_unusable_variable_raises(
    variable: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"INTERPOSER_{variable}", text)
    with pytest.raises(ConfigError, match=message):
        Config.refresh()


def test_names_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERPOSER_DISABLE", " one,, two ")
    monkeypatch.setenv("INTERPOSER_PLUGINS", "none")
    assert Config.refresh() == Config(disable=["one", "two"], plugins=[])


# Blocks


def test_blocks_nest_and_end() -> None:
    with use(platform="cpu", kernels={"a": "x"}) as outer:
        assert outer == effective_config()
        with use(Config(kernels={"b": "y"})) as inner:
            assert inner == Config(platform="cpu", kernels={"a": "x", "b": "y"})
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
    with pytest.raises(UnknownNameError):
        Config.refresh()
    with pytest.raises(UnknownNameError), use(platform="cpu"):
        pass
    monkeypatch.delenv("INTERPOSER_NONSENSE")
    assert Config.refresh() == Config()


@pytest.mark.parametrize("ask", [effective_config, config_sources, lambda c: use(c).__enter__()])
def test_an_argument_of_another_type_is_refused(ask: Any) -> None:
    with pytest.raises(ConfigError, match=r"\{'platform': 'cpu'\}, must be a Config"):
        ask({"platform": "cpu"})


def test_a_config_and_fields_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="not both"), use(Config(), platform="cpu"):
        pass


def pinned() -> str | None:
    platform = effective_config().platform
    return platform.pin if platform is not None else None


def test_threads_see_their_own_blocks_only() -> None:
    seen_by_thread: dict[str, str | None] = {}
    together = threading.Barrier(2, timeout=WAIT_SECONDS)

    def work(name: str) -> None:
        seen_by_thread[f"{name} before"] = pinned()
        with use(platform=name):
            together.wait()
            seen_by_thread[name] = pinned()
            together.wait()

    with use(platform="main"):
        threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pinned() == "main"
    assert seen_by_thread == {"one before": None, "two before": None, "one": "one", "two": "two"}


def test_tasks_see_their_own_blocks_and_the_blocks_around_their_creation() -> None:
    async def work(name: str, entered: asyncio.Event, other: asyncio.Event) -> tuple[Any, ...]:
        before = pinned()
        with use(platform=name):
            entered.set()
            await other.wait()
            return before, pinned()

    async def main() -> list[tuple[Any, ...]]:
        one, two = asyncio.Event(), asyncio.Event()
        with use(platform="main"):
            return list(await asyncio.gather(work("one", one, two), work("two", two, one)))

    assert asyncio.run(main()) == [("main", "one"), ("main", "two")]


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=4), min_size=1, max_size=5), st.data())
def test_interleaved_tasks_each_keep_their_stack_of_blocks(
    stacks: list[list[str]], data: st.DataObject
) -> None:
    """Tasks enter and leave their blocks in an order that hypothesis picks."""

    async def work(names: list[str], turn: asyncio.Queue[None]) -> None:
        await turn.get()
        for name in names[:1]:
            with use(platform=name):
                assert pinned() == name
                await work(names[1:], turn)
                await turn.get()
                assert pinned() == name

    async def main() -> None:
        turns = [asyncio.Queue[None]() for _ in stacks]
        tasks = [
            asyncio.create_task(work(names, turn))
            for names, turn in zip(stacks, turns, strict=True)
        ]
        order = [i for i, names in enumerate(stacks) for _ in range(2 * len(names) + 1)]
        for i in data.draw(st.permutations(order)):
            turns[i].put_nowait(None)
            await asyncio.sleep(0)
            assert pinned() is None
        await asyncio.gather(*tasks)

    asyncio.run(main())


@pytest.mark.process
def test_configuration_and_selection_do_without_torch() -> None:
    code = (
        "import sys, interposer._config.config, interposer._selection.select\n"
        "interposer._config.config.effective_config()\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_SECONDS)
