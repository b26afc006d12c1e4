"""Constraints of clients that nobody vouches for cost their client alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

from interposer.errors import ConfigError, RequestError
from interposer_models import (
    AsyncLanguageModel,
    Constraint,
    ConstraintLimits,
    LanguageModel,
    TextTokenizer,
    load,
)
from interposer_models._asynchronous.timed_calls import TimedCalls
from interposer_models._engine.constraints import Constraints
from interposer_models._engine.mask_thread import MaskThread

SHIPPED = Path(__file__).parents[2] / "examples" / "models" / "stdlib-lm"
# Compiles for minutes and into gigabytes, by a schema of 40 bytes.
SLOW = Constraint.json_schema({"type": "integer", "multipleOf": 9999991})
LARGE = Constraint.regex("(a{1000}){1000}")
FINE = Constraint.choice(["yes", "no"])


def chained(count: int) -> Constraint:
    """Return a grammar that leads from one rule to the next."""
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(count))
    return Constraint.grammar(f'start: r0\n{rules}\nr{count}: "a"\n')


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(SHIPPED)


@pytest.fixture
def constraints(tokenizer: TextTokenizer) -> Iterator[Constraints]:
    made = Constraints(tokenizer, 4096)
    yield made
    made.limit(None)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return load(SHIPPED, dtype="float32", cache_tokens=2048, max_sequences=8)


@pytest.mark.process
def test_a_constraint_that_ends_its_process_is_refused(constraints: Constraints) -> None:
    constraints.limit(ConstraintLimits(parts=10_000))
    with pytest.raises(RequestError, match="nests deeper than can be compiled"):
        constraints.compiled(chained(9000))
    assert constraints.compiled(FINE).num_bytes > 0
    assert constraints.compiled(chained(100)).num_bytes > 0


@pytest.mark.process
def test_compiling_has_a_time(constraints: Constraints) -> None:
    constraints.limit(ConstraintLimits(seconds=0.5, each_bytes=2**34))
    with pytest.raises(RequestError, match=r"takes longer than the 0\.5 s that are allowed"):
        constraints.compiled(SLOW)
    assert constraints.compiled(FINE).num_bytes > 0


@pytest.mark.process
def test_compiling_has_a_memory(constraints: Constraints) -> None:
    constraints.limit(ConstraintLimits(seconds=60, each_bytes=2**24))
    with pytest.raises(RequestError, match="takes more memory than is allowed"):
        constraints.compiled(LARGE)
    many = Constraint.choice([f"v{index}" for index in range(20_000)])
    constraints.limit(ConstraintLimits(seconds=60, each_bytes=2**20))
    with pytest.raises(RequestError, match=r"compiled, it takes \d+ bytes; allowed are 1048576"):
        constraints.compiled(many)
    assert constraints.compiled(FINE).num_bytes < 2**20


@pytest.mark.process
def test_what_was_refused_is_refused_at_once_the_next_time(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraints.limit(ConstraintLimits(parts=10_000))
    for _ in range(2):
        with pytest.raises(RequestError, match="nests deeper"):
            constraints.compiled(chained(9000))
        assert constraints._process is not None
        monkeypatch.setattr(constraints._process, "num_bytes", None)  # nobody asks it again


@pytest.mark.process
def test_those_that_are_used_and_kept_have_a_memory_together(constraints: Constraints) -> None:
    sized = [Constraint.choice([f"{letter}{i}" for i in range(3000)]) for letter in "abcd"]
    constraints.limit(ConstraintLimits())
    num_bytes = constraints.compiled(sized[0]).num_bytes
    constraints.limit(ConstraintLimits(all_bytes=round(2.5 * num_bytes)))
    used = [constraints.compiled(sized[0]), constraints.compiled(sized[1])]
    with pytest.raises(RequestError, match="that run take the memory"):
        constraints.compiled(sized[2])
    assert constraints.compiled(sized[0]) is used[0]
    used.clear()
    # Nobody uses them any more, so that they make room, the one that was used last but one first.
    constraints.compiled(sized[2])
    assert set(constraints._used) == {sized[0], sized[2]}


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint.regex("a" * 2001), "The regex has 2001 bytes; allowed are 2000"),
        (chained(11), "The grammar has 13 rules; allowed are 10"),
        (Constraint.grammar("root ::= a\n" + "a ::= a\n" * 10), "The grammar has 11 rules"),
        (Constraint.json_schema({"anyOf": [{"$ref": "#"}] * 11}), "has 11 $ref; allowed are 10"),
        (Constraint.json_schema({"not": {"not": {"not": {}}}}), "The JSON schema has 4 levels"),
        (Constraint.regex("((((a))))"), "The regex has 4 levels of brackets; allowed are 3"),
        (Constraint.choice(["a"] * 321), "The choice has 321 texts; allowed are 320"),
    ],
)
def test_a_text_is_measured_before_it_is_compiled(constraint: Constraint, reason: str) -> None:
    with pytest.raises(RequestError) as raised:
        ConstraintLimits(text_bytes=2000, parts=10, depth=3).check(constraint)
    assert reason in str(raised.value)


def test_brackets_that_stand_for_themselves_nest_nothing() -> None:
    ConstraintLimits(depth=2).check(Constraint.regex(r"\(\(\(\((a)" + "(b)" * 50))


@pytest.mark.parametrize("name", ["seconds", "parts", "mask_seconds", "all_bytes"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} of ConstraintLimits is 0, must be positive"):
        ConstraintLimits(**{name: 0})


@pytest.mark.process
def test_answers_have_the_form_within_limits_too(lm: LanguageModel) -> None:
    async def ask() -> list[Any]:
        async with AsyncLanguageModel(lm, constraint_limits=ConstraintLimits()) as model:
            asked = [
                model.generate("a", constraint=Constraint.choice([text]), max_new_tokens=8)
                for text in ("yes", "no", "maybe")
            ]
            with pytest.raises(RequestError, match="more memory than is allowed"):
                await model.generate("a", constraint=LARGE)
            return [(await each)[0] for each in asked]

    answers = asyncio.run(ask())
    assert [(each.text, each.finish_reason) for each in answers] == [
        ("yes", "stop"),
        ("no", "stop"),
        ("maybe", "stop"),
    ]


@pytest.mark.process
def test_a_request_whose_tokens_take_too_long_to_find_ends_alone(lm: LanguageModel) -> None:
    """No mask is found within a nanosecond but those that are known before the request begins."""

    async def ask() -> tuple[Any, Any]:
        limits = ConstraintLimits(mask_seconds=1e-9)
        async with AsyncLanguageModel(lm, constraint_limits=limits) as model:
            slow = model.generate("a", constraint=Constraint.regex("[a-z]{400}"), max_new_tokens=99)
            free = model.generate("a", max_new_tokens=20, ignore_eos=True)
            return (await slow)[0], (await free)[0]

    slow, free = asyncio.run(ask())
    assert slow.finish_reason in ("constraint", "length")
    assert free.text == lm.generate("a", max_new_tokens=20, ignore_eos=True)[0].text


def test_a_mask_that_takes_too_long_is_given_up_and_the_others_are_not() -> None:
    goes_on, ended = threading.Event(), threading.Event()

    def busy() -> bytes:
        while not goes_on.is_set():
            pass
        ended.set()
        return b"late"

    masks = MaskThread(0.01)
    try:
        found = masks.compute([lambda: b"first", busy, lambda: b"last"])
        assert found == [b"first", None, b"last"]
        assert masks.compute([lambda: b"next"]) == [b"next"]
    finally:
        goes_on.set()
        masks.close()
    assert ended.wait(60)


def test_an_error_of_a_mask_reaches_the_step() -> None:
    masks = MaskThread(60.0)
    with pytest.raises(ZeroDivisionError):
        masks.compute([lambda: bytes(1 // 0)])
    assert masks.compute([lambda: b"next"]) == [b"next"]
    masks.close()


def test_a_call_that_never_ends_is_ended() -> None:
    ended = threading.Event()

    def endless() -> None:
        try:
            while True:
                pass
        finally:
            ended.set()

    async def ask() -> str:
        calls = TimedCalls("test", 0.05)
        with pytest.raises(TimeoutError):
            await calls.run(endless)
        return await calls.run(lambda: "next")

    assert asyncio.run(ask()) == "next"
    assert ended.is_set()


def test_a_call_whose_caller_left_is_ended_or_never_begins() -> None:
    begun, ended, second = threading.Event(), threading.Event(), threading.Event()

    def endless() -> None:
        begun.set()
        try:
            while True:
                pass
        finally:
            ended.set()

    async def ask() -> str:
        calls = TimedCalls("test", None)
        first = asyncio.create_task(calls.run(endless))
        await asyncio.to_thread(begun.wait)
        waiting = asyncio.create_task(calls.run(second.set))
        await asyncio.sleep(0)
        waiting.cancel()
        first.cancel()
        return await calls.run(lambda: "next")

    assert asyncio.run(ask()) == "next"
    assert ended.is_set()
    assert not second.is_set()


def test_a_template_that_loops_is_ended(lm: LanguageModel) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

    async def ask() -> int:
        async with AsyncLanguageModel(lm, template_seconds=0.2) as model:
            messages = [{"role": "user", "content": "a"}]
            with pytest.raises(
                RequestError, match=r"longer than the 0\.2 s that the chat template"
            ):
                await model.chat_prompt(messages, template=loop)
            return len(await model.chat_prompt(messages, template="{{ messages[0].content }}"))

    assert asyncio.run(ask()) == 1


@pytest.mark.process
def test_closing_ends_what_is_being_compiled(constraints: Constraints) -> None:
    """It would go on for minutes."""
    constraints.limit(ConstraintLimits(seconds=3600, each_bytes=2**36))
    assert constraints.compiled(FINE).num_bytes > 0
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(constraints.compiled, SLOW)
        process = constraints._process
        assert process is not None
        wait_until(process._lock.locked)
        constraints.limit(None)
        with pytest.raises(RequestError, match="The model was closed"):
            slow.result()
