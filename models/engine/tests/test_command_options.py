"""Commands that load a model take the options of ``load``, with its defaults."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from interposer_engine import load
from interposer_engine._commands.bench import bench
from interposer_engine._commands.evaluate import evaluate
from interposer_engine._commands.pack import pack
from interposer_engine._commands.run import chat, run
from interposer_engine._commands.transcribe import transcribe
from interposer_engine._load_options import CommandOption, LoadOptions
from interposer_engine.options import load_options

# Arguments that commands take in another form, or not at all.
OTHERWISE = {"config", "adapters", "progress"}
SIZES = {"max_sequences", "max_step_tokens", "cache_tokens", "memory_fraction", "prefix_cache"}
SET_BY_THE_COMMAND: list[tuple[Callable[..., None], set[str]]] = [
    (run, {"max_sequences", "prefix_cache"}),
    (chat, {"max_sequences"}),
    (transcribe, {"max_sequences", "prefix_cache"}),
    (bench, SIZES),
    (evaluate, set()),
]


def test_each_argument_of_load_has_an_option_with_its_default() -> None:
    options = {option.name: option.default for option in load_options()}
    assert set(options) == {field.name for field in fields(LoadOptions)} - OTHERWISE
    parameters = inspect.signature(load).parameters
    assert options == {name: parameters[name].default for name in options}


@pytest.mark.parametrize(("command", "own"), SET_BY_THE_COMMAND)
def test_commands_take_each_option_that_they_do_not_set(
    command: Callable[..., None], own: set[str]
) -> None:
    expected = {option.name for option in load_options()} - own
    assert expected <= set(inspect.signature(command).parameters)


def test_the_page_lists_each_argument_of_load() -> None:
    page = Path(__file__).parents[3] / "docs" / "run-a-model.md"
    section = page.read_text(encoding="utf-8").split("\n## Arguments of load\n")[1]
    cells = " ".join(re.findall(r"^\|([^|]+)\|", section.split("\n## ")[0], re.M))
    listed = re.findall(r"`(\w+)`", cells)
    assert sorted(listed) == sorted(inspect.signature(load).parameters.keys() - {"path"})


def test_pack_takes_the_options_that_change_packed_weights() -> None:
    assert {"dtype", "quantization"} <= set(inspect.signature(pack).parameters)


def test_an_option_without_a_description_is_none() -> None:
    assert CommandOption.of("progress") is None
