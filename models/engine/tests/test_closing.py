"""A closed model frees its memory, and says that it was closed."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interposer import explain
from interposer.errors import RequestError
from interposer_engine import AsyncLanguageModel, Constraint, LanguageModel, load

CLOSED = r"The model .* was closed\. Try: load it again"


def small(path: Path) -> LanguageModel:
    return load(path, "float32", cache_tokens=256, max_sequences=2)


def test_the_end_of_a_block_frees_weights_and_caches(llama: Path) -> None:
    with small(llama) as lm:
        lm.generate("def", max_new_tokens=2, constraint=Constraint.choice(["ab", "cd"]))
        parts = [weakref.ref(part) for part in (lm.engine, lm.engine.model, lm.engine.runner)]
        parts += [weakref.ref(parameter) for parameter in lm.engine.model.parameters()]
    assert [part() for part in parts] == [None] * len(parts)


CALLS: dict[str, Callable[[LanguageModel], Any]] = {
    "generate": lambda lm: lm.generate("def"),
    "stream": lambda lm: lm.stream([1, 2]),
    "chat": lambda lm: lm.chat([{"role": "user", "content": "x"}]),
    "logits": lambda lm: lm.logits([1, 2]),
    "score": lambda lm: lm.score([1], [[2]]),
    "start": lambda lm: lm.engine.step(),
    "adapters": lambda lm: lm.adapters,
    "load_adapter": lambda lm: lm.load_adapter("x", "y"),
    "update_weights": lambda lm: lm.update_weights({}),
    "explain": explain,
    "asynchronous": AsyncLanguageModel,
    "with": lambda lm: lm.__enter__(),
}


def test_later_calls_are_refused(llama: Path) -> None:
    lm = small(llama)
    lm.close()
    lm.close()  # again does nothing
    for call in CALLS.values():
        with pytest.raises(RequestError, match=CLOSED):
            call(lm)
    assert not any(each.name.startswith("interposer-engine") for each in threading.enumerate())


def test_an_unfinished_stream_ends_with_an_error(llama: Path) -> None:
    lm = small(llama)
    stream = lm.stream("def", max_new_tokens=99, ignore_eos=True)
    unread = lm.stream("def")
    next(stream)
    lm.close()
    with pytest.raises(RequestError, match=CLOSED):
        next(stream)
    del unread  # ends without an error


def test_a_closed_model_fails_asynchronous_requests(llama: Path) -> None:
    lm = small(llama)

    async def run() -> None:
        async with AsyncLanguageModel(lm) as model:
            assert (await model.generate("def", max_new_tokens=1))[0].token_ids
            await model.call(lm.close)
            assert model.trouble == "the model was closed"
            with pytest.raises(RequestError, match=CLOSED):
                await model.generate("def")

    asyncio.run(run())


def test_a_closed_asynchronous_model_cannot_be_entered(llama: Path) -> None:
    async def run() -> None:
        async with AsyncLanguageModel(small(llama)) as model:
            pass
        with pytest.raises(RequestError, match="The model was closed"):
            async with model:
                pass

    asyncio.run(run())


def test_the_representation_names_the_loaded_model(llama: Path) -> None:
    lm = small(llama)
    text = repr(lm)
    assert text.startswith(f"<LanguageModel {llama}: LlamaForCausalLM, 0.")
    for part in ("million weights", "float32 on cpu (cpu: ", "context of "):
        assert part in text
    model = AsyncLanguageModel(lm)
    assert repr(model) == f"<AsyncLanguageModel of {lm!r}: 0 unfinished answers>"
    model.close()
    assert repr(model) == f"<AsyncLanguageModel of {lm!r}: closed>"
    lm.close()
    assert repr(lm).endswith(", closed>")
