"""Adapters that are loaded, replaced and removed while requests run."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapter_files import write_adapter
from tests.landing import num_examples

from interposer import explain
from interposer.errors import CheckpointError, ConfigError, RequestError, UnknownNameError
from interposer_engine import LanguageModel, SamplingParams, Stream, load

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1] * 9, [7], [2, 7, 1] * 6]
NAMES = ("sql", "shell")
FOLDERS = range(3)
LENGTH = 5
MODULES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def folders(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of which no two have the same modules and rank."""
    config = load(llama, cache_tokens=32).engine.model.config
    hidden, inner = config.hidden_size, config.intermediate_size
    head = hidden // config.num_attention_heads
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (head * config.num_key_value_heads, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    root = tmp_path_factory.mktemp("versions")
    found = []
    for number in FOLDERS:
        modules = {
            f"model.layers.{layer}.{module}": sizes[module]
            for layer in range(config.num_hidden_layers)
            for module in MODULES[number:]
        }
        found.append(write_adapter(root / str(number), modules, rank=2 + number, seed=number))
    return found


@pytest.fixture(scope="module")
def alone(llama: Path, folders: list[Path]) -> Callable[[int, int | None], tuple[int, ...]]:
    """Return the tokens of a request that runs alone, by prompt and folder."""
    lm = load(llama, cache_tokens=256, max_sequences=1)
    for number, folder in enumerate(folders):
        lm.load_adapter(str(number), folder)
    known: dict[tuple[int, int | None], tuple[int, ...]] = {}

    def run(prompt: int, folder: int | None) -> tuple[int, ...]:
        if (prompt, folder) not in known:
            adapter = None if folder is None else str(folder)
            how: dict[str, Any] = {"max_new_tokens": LENGTH, "ignore_eos": True}
            found = lm.generate([PROMPTS[prompt]], adapter=adapter, **how)
            known[prompt, folder] = found[0].token_ids
        return known[prompt, folder]

    return run


@pytest.fixture(scope="module")
def lm(llama: Path) -> LanguageModel:
    """A model that shares beginnings, and computes prompts in pieces."""
    return load(llama, cache_tokens=512, max_sequences=3, max_step_tokens=19, prefix_cache=True)


def start(lm: LanguageModel, prompt: int, adapter: str | None) -> Stream:
    params = SamplingParams(adapter=adapter, max_new_tokens=LENGTH, ignore_eos=True)
    return lm.start(PROMPTS[prompt], params)


def finish(lm: LanguageModel) -> None:
    while lm.engine.busy:
        lm.engine.step()


MOVES = st.one_of(
    st.tuples(st.just("load"), st.sampled_from(NAMES), st.sampled_from(FOLDERS)),
    st.tuples(st.just("remove"), st.sampled_from(NAMES)),
    st.tuples(
        st.just("request"), st.sampled_from(range(len(PROMPTS))), st.sampled_from([None, *NAMES])
    ),
    st.tuples(st.just("request"), st.just(1), st.sampled_from(NAMES)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
)


@settings(max_examples=num_examples(20), deadline=None)
@given(moves=st.lists(MOVES, min_size=3, max_size=22))
def test_a_request_keeps_the_version_it_started_with(
    lm: LanguageModel,
    folders: list[Path],
    alone: Callable[[int, int | None], tuple[int, ...]],
    moves: list[tuple[Any, ...]],
) -> None:
    loaded: dict[str, int] = {}
    started: list[tuple[Stream, int, int | None]] = []
    for kind, *given_ in moves:
        match kind, given_:
            case "load", (name, folder):
                lm.load_adapter(name, folders[folder], replace=name in loaded)
                loaded[name] = folder
            case "remove", (name,) if name in loaded:
                try:
                    lm.remove_adapter(name)
                    del loaded[name]
                except RequestError:
                    unfinished = [s for s, _, _ in started if not s.sequence.finish_reason]
                    assert any(s.sequence.params.adapter == name for s in unfinished)
            case "request", (prompt, name) if name is None or name in loaded:
                folder = None if name is None else loaded[name]
                started.append((start(lm, prompt, name), prompt, folder))
            case "step", (count,):
                for _ in range(count):
                    lm.engine.step()
            case "cancel", (number,) if number < len(started):
                lm.engine.cancel(started[number][0].sequence)
        assert set(lm.adapters) == set(loaded)
    finish(lm)
    for stream, prompt, folder in started:
        sequence, expected = stream.sequence, alone(prompt, folder)
        count = len(sequence.output) if sequence.finish_reason == "cancelled" else LENGTH
        assert tuple(sequence.output) == expected[:count]
    for name in loaded:
        lm.remove_adapter(name)
    assert lm.adapters == ()
    assert not any(module._forward_hooks for module in lm.engine.model.modules())


def test_a_new_version_replaces_one_in_use(
    lm: LanguageModel,
    folders: list[Path],
    alone: Callable[[int, int | None], tuple[int, ...]],
) -> None:
    lm.load_adapter("sql", folders[0])
    old = start(lm, 1, "sql")
    lm.engine.step()
    with pytest.raises(ConfigError, match=r"'sql' already\. Try: replace=True"):
        lm.load_adapter("sql", folders[1])
    lm.load_adapter("sql", folders[1], replace=True)
    assert lm.adapters == ("sql",)
    new = start(lm, 1, "sql")
    lm.engine.step()
    # The name is free again, though requests still have the version before.
    finish(lm)
    assert tuple(old.sequence.output) == alone(1, 0)
    assert tuple(new.sequence.output) == alone(1, 1)
    # The version after it finds nothing of the versions before.
    lm.load_adapter("sql", folders[2], replace=True)
    again = start(lm, 1, "sql")
    finish(lm)
    assert again.sequence.num_shared == 0
    assert tuple(again.sequence.output) == alone(1, 2)
    lm.remove_adapter("sql")
    with pytest.raises(UnknownNameError, match="Unknown adapter 'sql'"):
        start(lm, 1, "sql")


def test_requests_keep_an_adapter_version_after_its_name_is_removed(
    lm: LanguageModel,
    folders: list[Path],
    alone: Callable[[int, int | None], tuple[int, ...]],
) -> None:
    lm.load_adapter("sql", folders[0])
    old = start(lm, 0, "sql")
    lm.engine.step()
    lm.load_adapter("sql", folders[1], replace=True)
    lm.remove_adapter("sql")
    assert lm.adapters == ()
    finish(lm)
    assert tuple(old.sequence.output) == alone(0, 0)


def matrices() -> int:
    """Return the bytes of all matrices of such adapters that are alive."""
    gc.collect()
    ranks = {2 + number for number in FOLDERS}
    found = [o for o in gc.get_objects() if type(o) is torch.Tensor]
    return sum(t.nbytes for t in found if t.ndim == 3 and ranks & {*t.shape})


@pytest.mark.slow
def test_a_version_is_freed_when_its_last_request_ends(
    lm: LanguageModel, folders: list[Path]
) -> None:
    before = matrices()
    lm.load_adapter("sql", folders[2])
    alone_bytes = matrices()
    lm.load_adapter("sql", folders[0], replace=True)
    old = start(lm, 0, "sql")
    lm.engine.step()
    lm.load_adapter("sql", folders[2], replace=True)
    assert matrices() > alone_bytes
    lm.engine.cancel(old.sequence)
    assert matrices() == alone_bytes
    lm.remove_adapter("sql")
    assert matrices() == before < alone_bytes


def test_adapters_of_load_have_reserved_memory(
    llama: Path, folders: list[Path], alone: Callable[[int, int | None], tuple[int, ...]]
) -> None:
    given_ = {"sql": folders[0], "shell": folders[1]}
    lm = load(llama, cache_tokens=128, max_sequences=2, adapters=given_)
    assert lm.adapters == ("sql", "shell")
    (told,) = (note for note in explain(lm).notes if "adapters" in note)
    found = re.fullmatch(
        r"(\d+\.\d) MiB are kept for 2 adapters, as much as they take while one is replaced", told
    )
    assert found
    stream = start(lm, 1, "shell")
    finish(lm)
    assert tuple(stream.sequence.output) == alone(1, 1)
    with pytest.raises(ConfigError, match=r"adapters is .*, must be a mapping of names"):
        load(llama, cache_tokens=128, adapters=["sql"])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="does not exist"):
        load(llama, cache_tokens=128, adapters={"sql": llama / "none"})
