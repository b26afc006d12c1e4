"""A compiled model has a name of its own for each set of choices, and one name for equal ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

from interposer import use
from interposer_ops.linear import linear
from interposer_vllm import _session
from interposer_vllm._compiled_with import compiled_with
from interposer_vllm._patching import VERDICTS
from interposer_vllm._session import Session, closed_session, opened_session, session

PLACES = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
REFERENCE = {"linear": "reference"}
NATIVE = {"linear": "linear_native"}


@pytest.fixture
def processors(no_policy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a session be one for processors, without vLLM, which would say so."""
    monkeypatch.setattr(_session, "_cached_session", cache(lambda: Session("cpu")))


def bind(places: tuple[str, ...]) -> None:
    """Bind kernels for layers at places of the session, as their loading does."""
    for place in places:
        site = session().site(place, torch.float32)
        site.bind_kernel(linear, in_features=8, out_features=4, biased=False)
        session().taken.append(place)


def factor(kernels: Mapping[str, Any], places: tuple[str, ...] = PLACES) -> str:
    with use(kernels=kernels), closed_session():
        bind(places)
        return json.dumps(compiled_with(), sort_keys=True)


def test_computing_the_key_selects_no_kernel(processors: None) -> None:
    key = compiled_with()
    assert set(key) == {"version", "seams"}
    assert opened_session() is None


@pytest.mark.slow
@pytest.mark.process
def test_other_kernels_or_layers_change_the_key(processors: None) -> None:
    keys = {
        factor(REFERENCE),
        factor(NATIVE),
        factor(REFERENCE, PLACES[:1]),
        factor({**REFERENCE, f"linear@{PLACES[0]}": NATIVE["linear"]}),
    }
    assert len(keys) == 4


@pytest.mark.process
def test_equal_choices_give_equal_keys_under_any_policy(processors: None) -> None:
    pinned = factor(REFERENCE)
    assert factor({"linear": {"prefer": ["reference"]}}) == pinned
    assert factor(REFERENCE, PLACES[::-1]) == pinned
    assert factor(REFERENCE, PLACES * 2) == pinned


# torch's compiler, which vLLM imports, warns of what it uses itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.vllm
def test_vllms_cache_key_contains_the_choices(
    no_policy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import envs
    from vllm.compilation.caching import aot_compile_hash_factors
    from vllm.config import VllmConfig

    from interposer_vllm.register import register

    config = VllmConfig()
    register()
    assert VERDICTS["compiled"]
    names = []
    for kernels in (REFERENCE, NATIVE, REFERENCE):
        with use(kernels=kernels), closed_session():
            bind(PLACES)
            assert kernels["linear"] in str(envs.compile_factors()["interposer"])
            names.append(str(aot_compile_hash_factors(config)))
    monkeypatch.delitem(envs.environment_variables, "interposer")
    names.append(str(aot_compile_hash_factors(config)))
    assert names[0] == names[2]
    assert len(set(names)) == 3
