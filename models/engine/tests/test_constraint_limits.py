"""A constraint of an untrusted client can harm only the client's own request."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

from interposer.errors import ConfigError, RequestError
from interposer_engine import (
    AsyncLanguageModel,
    Constraint,
    ConstraintLimits,
    LanguageModel,
    TextTokenizer,
    load,
)
from interposer_engine._async_engine import TimedCalls
from interposer_engine._constrained_decoding.constraints import Constraints
from interposer_engine._constrained_decoding.mask_thread import MaskThread

SHIPPED = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
# Compiling this schema of 40 bytes takes minutes and gigabytes.
SLOW = Constraint.json_schema({"type": "integer", "multipleOf": 9999991})
LARGE = Constraint.regex("(a{1000}){1000}")
FINE = Constraint.choice(["yes", "no"])


def chained(count: int) -> Constraint:
    """Return a grammar of ``count`` rules, each of which refers to the next."""
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(count))
    return Constraint.grammar(f'start: r0\n{rules}\nr{count}: "a"\n')


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(SHIPPED)


@pytest.fixture
def constraints(tokenizer: TextTokenizer) -> Iterator[Constraints]:
    constraints = Constraints(tokenizer, 4096)
    yield constraints
    constraints.limit(None)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return load(SHIPPED, dtype="float32", cache_tokens=2048, max_sequences=8)


@pytest.mark.process
def test_a_constraint_that_crashes_the_child_process_is_refused(constraints: Constraints) -> None:
    constraints.limit(ConstraintLimits(rules=10_000))
    with pytest.raises(RequestError, match="is nested too deeply for the compiler's stack"):
        constraints.compiled(chained(9000))
    assert constraints.compiled(FINE).num_bytes > 0
    assert constraints.compiled(chained(100)).num_bytes > 0


@pytest.mark.process
def test_a_constraint_that_compiles_too_long_is_refused(constraints: Constraints) -> None:
    constraints.limit(ConstraintLimits(compile_seconds=0.5, compiled_bytes=2**34))
    with pytest.raises(RequestError, match=r"compiling takes longer than the allowed 0\.5 s"):
        constraints.compiled(SLOW)
    assert constraints.compiled(FINE).num_bytes > 0


@pytest.mark.process
def test_a_constraint_that_takes_too_much_memory_is_refused(constraints: Constraints) -> None:
    constraints.limit(ConstraintLimits(compile_seconds=60, compiled_bytes=2**24))
    with pytest.raises(RequestError, match="takes more memory than allowed"):
        constraints.compiled(LARGE)
    large_choice = Constraint.choice([f"v{index}" for index in range(20_000)])
    constraints.limit(ConstraintLimits(compile_seconds=60, compiled_bytes=2**20))
    with pytest.raises(RequestError, match=r"has \d+ bytes; allowed are 1048576"):
        constraints.compiled(large_choice)
    assert constraints.compiled(FINE).num_bytes < 2**20


@pytest.mark.process
def test_a_refused_constraint_is_not_compiled_a_second_time(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraints.limit(ConstraintLimits(rules=10_000))
    for _ in range(2):
        with pytest.raises(RequestError, match="is nested too deeply"):
            constraints.compiled(chained(9000))
        assert constraints._process is not None
        monkeypatch.setattr(constraints._process, "num_bytes", None)  # a second call would fail


@pytest.mark.process
def test_all_compiled_constraints_share_a_memory_limit(constraints: Constraints) -> None:
    choices = [Constraint.choice([f"{letter}{i}" for i in range(3000)]) for letter in "abcd"]
    constraints.limit(ConstraintLimits())
    num_bytes = constraints.compiled(choices[0]).num_bytes
    constraints.limit(ConstraintLimits(total_bytes=round(2.5 * num_bytes)))
    in_use = [constraints.compiled(choices[0]), constraints.compiled(choices[1])]
    with pytest.raises(RequestError, match=r"constraints of running requests take the \d+ bytes"):
        constraints.compiled(choices[2])
    assert constraints.compiled(choices[0]) is in_use[0]
    in_use.clear()
    # No request uses them any more: the least recently used one is evicted.
    constraints.compiled(choices[2])
    assert set(constraints._shared) == {choices[0], choices[2]}


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
def test_a_text_that_exceeds_a_limit_is_refused_before_it_is_compiled(
    constraint: Constraint, reason: str
) -> None:
    with pytest.raises(RequestError) as raised:
        ConstraintLimits(text_bytes=2000, rules=10, depth=3).check(constraint)
    assert reason in str(raised.value)


def test_escaped_brackets_do_not_count_as_nesting() -> None:
    ConstraintLimits(depth=2).check(Constraint.regex(r"\(\(\(\((a)" + "(b)" * 50))


@pytest.mark.parametrize("name", ["compile_seconds", "rules", "mask_seconds", "total_bytes"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} of ConstraintLimits is 0, must be positive"):
        ConstraintLimits(**{name: 0})


@pytest.mark.process
def test_constraints_within_the_limits_are_followed(lm: LanguageModel) -> None:
    async def ask() -> list[Any]:
        async with AsyncLanguageModel(lm, constraint_limits=ConstraintLimits()) as model:
            requests = [
                model.generate("a", constraint=Constraint.choice([text]), max_new_tokens=8)
                for text in ("yes", "no", "maybe")
            ]
            with pytest.raises(RequestError, match="cannot be compiled"):
                await model.generate("a", constraint=LARGE)
            return [(await request)[0] for request in requests]

    answers = asyncio.run(ask())
    assert [(answer.text, answer.finish_reason) for answer in answers] == [
        ("yes", "stop"),
        ("no", "stop"),
        ("maybe", "stop"),
    ]


@pytest.mark.process
def test_a_mask_that_takes_too_long_ends_only_its_own_request(lm: LanguageModel) -> None:
    """Within a nanosecond only masks that compiling has computed are available."""

    async def ask() -> tuple[Any, Any]:
        limits = ConstraintLimits(mask_seconds=1e-9)
        async with AsyncLanguageModel(lm, constraint_limits=limits) as model:
            slow = model.generate("a", constraint=Constraint.regex("[a-z]{400}"), max_new_tokens=99)
            unconstrained = model.generate("a", max_new_tokens=20, ignore_eos=True)
            return (await slow)[0], (await unconstrained)[0]

    slow, unconstrained = asyncio.run(ask())
    assert slow.finish_reason in ("constraint", "length")
    assert unconstrained.text == lm.generate("a", max_new_tokens=20, ignore_eos=True)[0].text


def test_a_mask_that_takes_too_long_is_abandoned_and_the_others_are_computed() -> None:
    may_return, ended = threading.Event(), threading.Event()

    def busy() -> bytes:
        while not may_return.is_set():
            pass
        ended.set()
        return b"late"

    masks = MaskThread(0.01)
    try:
        results = masks.compute([lambda: b"first", busy, lambda: b"last"])
        assert results == [b"first", None, b"last"]
        assert masks.compute([lambda: b"next"]) == [b"next"]
    finally:
        may_return.set()
        masks.close()
    assert ended.wait(60)


def test_an_error_while_computing_a_mask_is_raised_in_the_step() -> None:
    masks = MaskThread(60.0)
    with pytest.raises(ZeroDivisionError):
        masks.compute([lambda: bytes(1 // 0)])
    assert masks.compute([lambda: b"next"]) == [b"next"]
    masks.close()


class Endless:
    """A function that returns only if it is interrupted."""

    def __init__(self) -> None:
        self.started, self.ended = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.started.set()
        try:
            while True:
                pass
        finally:
            self.ended.set()


def test_a_call_that_never_returns_is_interrupted() -> None:
    endless = Endless()

    async def ask() -> str:
        calls = TimedCalls("test", 0.05)
        with pytest.raises(TimeoutError):
            await calls.run(endless)
        return await calls.run(lambda: "next")

    assert asyncio.run(ask()) == "next"
    assert endless.ended.is_set()


def test_a_cancelled_call_is_interrupted_or_does_not_start() -> None:
    endless, second = Endless(), threading.Event()

    async def ask() -> str:
        calls = TimedCalls("test", None)
        first = asyncio.create_task(calls.run(endless))
        await asyncio.to_thread(endless.started.wait)
        waiting = asyncio.create_task(calls.run(second.set))
        await asyncio.sleep(0)
        waiting.cancel()
        first.cancel()
        return await calls.run(lambda: "next")

    assert asyncio.run(ask()) == "next"
    assert endless.ended.is_set()
    assert not second.is_set()


def test_a_chat_template_that_loops_is_interrupted(lm: LanguageModel) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

    async def ask() -> int:
        async with AsyncLanguageModel(lm, template_seconds=0.2) as model:
            messages = [{"role": "user", "content": "a"}]
            with pytest.raises(RequestError, match=r"longer than the allowed 0\.2 s"):
                await model.chat_prompt(messages, template=loop)
            return len(await model.chat_prompt(messages, template="{{ messages[0].content }}"))

    assert asyncio.run(ask()) == 1


@pytest.mark.process
def test_closing_ends_running_compilations(constraints: Constraints) -> None:
    """It would go on for minutes."""
    constraints.limit(ConstraintLimits(compile_seconds=3600, compiled_bytes=2**36))
    assert constraints.compiled(FINE).num_bytes > 0
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(constraints.compiled, SLOW)
        process = constraints._process
        assert process is not None
        wait_until(process._lock.locked)
        constraints.limit(None)
        with pytest.raises(RequestError, match="The model was closed"):
            slow.result()


@pytest.mark.process
def test_a_constraint_is_not_blamed_when_the_child_is_killed_from_outside(
    constraints: Constraints,
) -> None:
    """The kernel kills processes when the machine has no memory."""
    constraints.limit(ConstraintLimits(compile_seconds=3600, compiled_bytes=2**36))
    assert constraints.compiled(FINE).num_bytes > 0
    process = constraints._process
    assert process is not None
    with ThreadPoolExecutor(1) as thread:
        for _ in range(2):  # the second time, the child process compiles the constraint again
            slow = thread.submit(constraints.compiled, SLOW)
            wait_until(process._lock.locked)
            process._process.kill()
            with pytest.raises(RequestError, match="SIGKILL"):
                slow.result()
    assert constraints.compiled(Constraint.choice(["maybe"])).num_bytes > 0


@pytest.mark.process
def test_constraints_are_compiled_beside_a_thousand_connections(constraints: Constraints) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("the process may open fewer than 1,200 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    descriptors = [os.dup(0) for _ in range(1050)]
    try:
        constraints.limit(ConstraintLimits())
        assert constraints.compiled(FINE).num_bytes > 0
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
