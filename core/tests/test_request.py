"""Requests for the same thing are one question, wherever in the model they come from."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
import torch

from interposer import AttentionSpec, Capability, Request
from interposer._examination.inspection import read_request

SPEC = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    dtype=torch.bfloat16,
    cache_dtype=torch.float32,
    page_size=16,
    scale=0.125,
    window_tokens=8,
)


def test_the_prefix_is_not_part_of_equality() -> None:
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
        Request("kernel", "linear", "cpu", dtype="float32", dims={"n": 1, "m": 2}, detail=SPEC),
    ],
)
def test_every_other_field_is_part_of_equality(other: Request) -> None:
    request = Request("kernel", "linear", "cpu", dtype="float32", dims={"m": 2, "n": 1})
    assert request.key != other.key


def test_order_of_dimensions_does_not_matter() -> None:
    first = Request("kernel", "linear", dims={"n": 1, "m": 2})
    assert first.key == Request("kernel", "linear", dims={"m": 2, "n": 1}).key


def test_text_states_dtype_platform_and_dimensions() -> None:
    request = Request("kernel", "linear", "cpu", dtype="float32", dims={"b": 2, "a": 1})
    assert str(request) == "kernel 'linear' [float32 cpu a=1 b=2]"
    assert str(Request("platform", "")) == "platform"


@pytest.mark.parametrize("detail", [None, SPEC])
def test_another_process_gets_the_same_request(detail: AttentionSpec | None) -> None:
    features, formats = frozenset({"b", "a"}), frozenset({"bfloat16"})
    caches_bytes, rates = {"l2": 2**20}, {"flops_per_s": 1e12}
    capability = Capability("x86_64", features, formats, 4, 2**40, caches_bytes, rates)
    assert capability.to_json().keys() == {field.name for field in fields(Capability)}
    request = Request(
        "attention", "decoder", "cpu", capability, "bfloat16", {"n": 1, "wide": True}, detail
    )
    text = json.dumps(request.to_json(), sort_keys=True)
    again = read_request(json.loads(text))
    assert again == request
    assert again.key == request.key
    assert again.capability == capability
