"""The messages between ranks: values cross as they are, and nothing else is made of bytes."""

from __future__ import annotations

import hmac
import math
import random
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from interposer import Config
from interposer.errors import ConfigError, RankError
from interposer.tooling import gather_bytes
from interposer_engine import (
    Constraint,
    EncoderFeatures,
    ExpertParallel,
    Meeting,
    PrefixCache,
    SamplingParams,
    Speculation,
    WeightsFrom,
)
from interposer_engine._distributed.codec import CodecError, decode, encode
from interposer_engine._distributed.estimate import ExpertLoads
from interposer_engine._distributed.protocol import Channel
from interposer_engine.parts import TranscriptRules
from interposer_ops.layers.moe.placement import ExpertPlacement

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, 10**40, 1.5, math.inf, b"\x00\xff"),
    *("", "Zoë", "half of a pair: \ud800", [], (), [1, 2, 3], (4, 5), [1, True], [1.0, 2]),
    *({}, {"a": {"b": [None]}}, {1: 2.5, (3,): "x"}, {1, 2}, frozenset({"a"}), Path("a/b")),
    *(torch.bfloat16, [2**70, 1]),
    ("load", ("path",), {"dtype": torch.float32, "adapters": {"a": Path("b")}}),
    Config(),
    Config(kernels={"linear": "reference"}, disable=["a"], seed=7, plugins="none", platform="cpu"),
    SamplingParams(temperature=0.5, stop=("a", "b"), logit_bias={5: 1.5}, seed=3),
    SamplingParams(constraint=Constraint.regex("[0-9]+"), adapter="a", prompt_logprobs=2),
    SamplingParams(transcript=TranscriptRules(((1, 2), (3,)), suppressed=(4,), no_speech=5)),
    PrefixCache(offload_bytes=5),
    Speculation("ngram", tokens=3),
    ExpertParallel(redundant_experts=2),
    WeightsFrom(Meeting("tcp://127.0.0.1:1", 1, 3), keeps_memory=True),
    {"layer": ExpertLoads((3, 4), ExpertPlacement(2, ((0,), (1,))))},
]
TENSORS = [
    torch.arange(6).view(2, 3).t(),
    torch.tensor(3.5, dtype=torch.bfloat16),
    torch.empty(0, 4),
    torch.tensor([True, False]),
    torch.arange(4).to(torch.float8_e4m3fn),
    torch.nn.Parameter(torch.ones(2)),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_survive_encoding(value: Any) -> None:
    crossed = decode(encode(value))
    assert type(crossed) is type(value)
    assert crossed == value
    assert repr(crossed) == repr(value)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}")
def test_tensors_survive_encoding(tensor: torch.Tensor) -> None:
    ((name, crossed),) = decode(encode([("weight", tensor)]))
    assert name == "weight"
    assert (crossed.dtype, crossed.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(crossed.float(), tensor.float())


def test_features_survive_encoding() -> None:
    features = EncoderFeatures(torch.rand(3, 4), (5, 6))
    crossed = decode(encode(features))
    assert torch.equal(crossed.values, features.values)
    assert crossed.decoder_ids == features.decoder_ids


class Other:
    """A class that crosses nowhere."""


@pytest.mark.parametrize(
    "value",
    [Other(), [lambda: None], {"a": Other}, torch.empty(1, device="meta"), 1j],
    ids=["object", "function", "class", "meta tensor", "complex number"],
)
def test_errors_name_the_type_that_cannot_be_sent(value: Any) -> None:
    with pytest.raises(ConfigError, match="to other ranks"):
        encode(value)


def test_deep_nesting_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ConfigError, match="64 levels"):
        encode(value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it ends at byte 0"),
        (b"?", "no kind of value"),
        (b"\x80\x04N.", "no kind of value"),  # a pickle of None
        (b"l" + b"\xff" * 8, "do not lie in 0 bytes"),
        (b"u" + b"\xff" * 7 + b"\x7f", "do not lie in 0 bytes"),
        (b"l\x01" + b"\0" * 7, "do not lie"),
        ((b"l\x01" + b"\0" * 7) * 80 + b"n", "64 levels"),
        (b"nn", "1 bytes follow the value"),
        (
            encode("subprocess.Popen").replace(b"u", b"o", 1) + encode({}),
            "is no class that crosses",
        ),
        (
            encode("SamplingParams").replace(b"u", b"o", 1) + encode({"top_p": 7}),
            "no SamplingParams",
        ),
        (encode(b"torch.load").replace(b"b", b"D", 1), "is no dtype"),
        (encode([[1]]).replace(b"l", b"s", 1), "a set"),
        (b"x" + encode(["torch.int64", [2**40]]) + encode(b"12345678"), "has 8 bytes"),
        (b"x" + encode(["torch.int64", [-1]]) + encode(b"12345678"), "no shape"),
    ],
)
def test_bytes_that_no_rank_sends_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        decode(content)


def test_damaged_bytes_are_refused_or_are_another_value() -> None:
    encoded = encode([*VALUES, *TENSORS])
    draws = random.Random(1)
    for _ in range(600):
        damaged = bytearray(encoded)
        damaged[draws.randrange(len(encoded))] = draws.randrange(256)
        try:
            decode(bytes(damaged[: draws.choice([len(encoded), draws.randrange(len(encoded))])]))
        except CodecError:
            continue


@pytest.mark.process
def test_a_channel_refuses_kinds_that_no_rank_sends() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\x63\0\0\0\0\0")
        with pytest.raises(ValueError, match="99 is no kind of message"):
            Channel(theirs).receive(5.0)


class Wire:
    """The collectives of two ranks, of which the other one says what a test lets it say."""

    def __init__(self, secret: bytes, content: bytes) -> None:
        self._message = signed(content, 1, secret)

    def all_gather(self, outs: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        outs[0].copy_(own)
        if own.dtype == torch.int64:
            outs[1].fill_(len(self._message))
        else:
            content = torch.frombuffer(bytearray(self._message), dtype=torch.uint8)
            outs[1].zero_()[: len(content)] = content


def signed(content: bytes, rank: int, secret: bytes) -> bytes:
    return hmac.digest(secret, b"%d of 2 " % rank + content, "sha256") + content


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> Any:
    def connect(secret: bytes, content: bytes = b"of the other rank") -> None:
        monkeypatch.setattr(dist, "get_rank", lambda group: 0)
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        monkeypatch.setattr(dist, "all_gather", Wire(secret, content).all_gather)

    return connect


def test_messages_of_the_launch_are_gathered(wired: Any) -> None:
    wired(b"secret")
    assert gather_bytes(b"own", None, b"secret") == [b"own", b"of the other rank"]


def test_a_message_without_the_secret_is_refused(wired: Any) -> None:
    wired(b"guessed")
    with pytest.raises(RankError, match="a message of rank 1 has not the signature"):
        gather_bytes(b"own", None, b"secret")


def test_a_message_that_is_too_long_is_refused(wired: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interposer._contract.gathering.MOST_BYTES", 100)
    wired(b"secret", b"x" * 100)
    with pytest.raises(RankError, match="rank 1 announced a message of 132 bytes"):
        gather_bytes(b"own", None, b"secret")
