"""Requests for the same thing are one question, wherever in the model they come from."""

from __future__ import annotations

import pytest

from interposer import Request


def test_place_is_not_part_of_the_question() -> None:
    first = Request("kernel", "linear", dims={"n": 1}, prefix="layers.0")
    second = Request("kernel", "linear", dims={"n": 1}, prefix="layers.1")
    assert first == second
    assert first.key == second.key
    assert hash(first) == hash(second)


@pytest.mark.parametrize(
    "other",
    [
        Request("layer", "linear", "cpu", dtype="float32", dims={"n": 1, "m": 2}),
        Request("kernel", "embedding", "cpu", dtype="float32", dims={"n": 1, "m": 2}),
        Request("kernel", "linear", "tpu", dtype="float32", dims={"n": 1, "m": 2}),
        Request("kernel", "linear", "cpu", dtype="bfloat16", dims={"n": 1, "m": 2}),
        Request("kernel", "linear", "cpu", dtype="float32", dims={"n": 1, "m": 3}),
        Request("kernel", "linear", "cpu", dtype="float32", dims={"n": 1}),
        Request("kernel", "linear", "cpu", dtype="float32", dims={"n": 1, "m": 2}, detail="x"),
    ],
)
def test_everything_else_is(other: Request) -> None:
    request = Request("kernel", "linear", "cpu", dtype="float32", dims={"m": 2, "n": 1})
    assert request.key != other.key


def test_order_of_dimensions_does_not_matter() -> None:
    first = Request("kernel", "linear", dims={"n": 1, "m": 2})
    assert first.key == Request("kernel", "linear", dims={"m": 2, "n": 1}).key


def test_text_states_dtype_platform_and_dimensions() -> None:
    request = Request("kernel", "linear", "cpu", dtype="float32", dims={"b": 2, "a": 1})
    assert str(request) == "kernel 'linear' [float32 cpu a=1 b=2]"
    assert str(Request("platform", "")) == "platform"
