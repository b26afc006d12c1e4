"""Another process of a group in which weights are sent: evaluates what it is told, line by line.

A line is JSON: ``[expression, store, rank, size]``. The expression is evaluated while the process
is in the group, and answered by a line of JSON: ``[value, name of the error, its text]``.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from tests.forks import forks
from tests.waiting import WAIT_SECONDS
from torch import distributed

from interposer_engine import Meeting, WeightsFrom, send_weights
from interposer_engine._weight_transfer.protocol import HEADER_BYTES, Channel

if TYPE_CHECKING:
    from interposer_engine import LanguageModel

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
__all__ = ["Meeting"]  # for expressions

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int32", "uint8", "bool", "complex64", "float64")

Items = Iterator[tuple[str, torch.Tensor]]


class Peer:
    """A process that is started, and lives for as long as tests need it."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._process = subprocess.Popen(
            forks().command("-m", "models.engine.tests.weight_peer"),
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def begin(self, expression: str, store: Path, rank: int, size: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([expression, str(store), rank, size]) + "\n")
        self._process.stdin.flush()

    def end(self) -> list[Any]:
        """Return the value, and the name and text of an error; nothing where the process died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return list(json.loads(line)) if line else []

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.communicate()


def join(store: Path | str, rank: int, size: int) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=WAIT_SECONDS),
    )
    # Gloo fails in a process that still connects while another one leaves the group.
    distributed.barrier()


@cache
def model(path: str, dtype: str) -> LanguageModel:
    from interposer_engine import load  # which takes seconds, and a trainer has no use for it

    return load(path, dtype, cache_tokens=64)


def digest(lm: LanguageModel) -> str:
    """Return the SHA-256 of a model's logits, by which the results of two models are compared."""
    return hashlib.sha256(lm.logits(TOKENS).numpy().tobytes()).hexdigest()


def updated(lm: LanguageModel, **options: Any) -> list[object]:
    """Return an empty text, and what the model computes after an update by rank 0.

    Where that fails: its error, and whether the model computes what it did before.
    """
    before = digest(lm)
    try:
        lm.update_weights(WeightsFrom(**options))
    except Exception as error:  # noqa: BLE001 - the test compares it
        return [type(error).__name__, digest(lm) == before]
    return ["", digest(lm)]


def busy(lm: LanguageModel) -> list[object]:
    """Do as ``updated`` while a request is unfinished."""
    stream = lm.stream([1, 2, 3], max_new_tokens=9)
    next(stream)
    try:
        return updated(lm)
    finally:
        stream.close()  # type: ignore[attr-defined]


def attempts(path: str) -> list[str]:
    """Return the names of the errors of sending weights twice, in one group."""
    return [attempt(path), attempt(path)]


def attempt(path: str) -> str:
    try:
        send_weights(load_file(path), bucket_bytes=10_000)
    except Exception as error:  # noqa: BLE001 - the test compares it
        return type(error).__name__
    return ""


def send_to_ranks(path: str, bucket_bytes: int) -> None:
    """Send weights to what ``received_by_ranks`` does, and die in the midst of the last ones."""
    assert attempt(path) == "RankError"
    send_weights(load_file(path), bucket_bytes=bucket_bytes)
    send_weights(breaking(path, 9, "exit"), bucket_bytes=bucket_bytes)


def received_by_ranks(old: str, new: str, dtype: str, **options: Any) -> list[object]:
    """Return the digests of models of the ranks 1 and 2, and errors of their updates.

    Those of fresh ones of the old and of the new weights; after a refusal, an update from the
    trainer, one that breaks off, and one by tensors.
    """
    from interposer_engine import load

    ranks = distributed.new_group([1, 2], backend="gloo", use_local_synchronization=True)

    def fresh(path: str) -> LanguageModel:
        return load(path, dtype, tensor_parallel=ranks, cache_tokens=64, **options)

    lm, wanted = fresh(old), digest(fresh(new))
    found = [digest(lm), wanted]
    undisturbed = lm.generate([TOKENS], max_new_tokens=9)[0].token_ids
    stream = lm.stream(TOKENS, max_new_tokens=9)
    tokens = [next(stream).token_id]
    results: list[object] = [updated(lm)]
    tokens += [delta.token_id for delta in stream]
    results.append(tokens == [*undisturbed])
    results += [updated(lm), updated(lm, timeout_seconds=WAIT_SECONDS)]
    lm.update_weights(load_file(f"{old}/model.safetensors"))
    return [*found, *results, digest(lm)]


def other_vote() -> None:
    """Take part in what the receivers begin with, in another sense."""
    votes = [torch.zeros(4096, dtype=torch.uint8) for _ in range(2)]
    distributed.all_gather(votes, votes[0])


def other_bucket() -> None:
    """Begin as ``send_weights`` does, and go on with zeros."""
    channel = Channel(None, None, WAIT_SECONDS, 4096)
    channel.vote("ready")
    channel.post(torch.zeros(HEADER_BYTES, dtype=torch.uint8)).wait()


def without(path: str, *names: str) -> dict[str, torch.Tensor]:
    return {name: t for name, t in load_file(path).items() if name not in names}


def breaking(path: str, count: int, how: str) -> Items:
    """Yield some tensors, then fail."""
    for _, item in zip(range(count), load_file(path).items(), strict=False):
        yield item
    if how == "exit":
        os._exit(3)
    elif how == "pause":
        signal.pause()  # until the process is killed
    raise OSError("the disk is full")


def noise(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Return tensors of random names, dtypes, shapes and strides."""
    generator = torch.Generator().manual_seed(seed)

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    tensors = []
    for index in range(number(12)):
        dtype = getattr(torch, DTYPES[number(len(DTYPES))])
        shape = [number(40) for _ in range(number(4))]
        size = torch.Size(shape).numel() * dtype.itemsize
        if dtype is torch.bool:
            tensor = torch.randint(2, shape, generator=generator).bool()
        else:
            codes = torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
            tensor = codes.view(dtype).view(shape)
        tensors.append(
            (
                f"{index}é{'.w' * number(50)}",
                tensor.transpose(0, -1) if tensor.ndim > 1 and number(2) else tensor,
            )
        )
    return tensors


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        expression, store, rank, size = json.loads(line)
        join(store, rank, size)
        answer = [None, "", ""]
        try:
            answer[0] = eval(expression, globals())
        except Exception as error:  # noqa: BLE001 - the test compares it
            answer[1:] = [type(error).__name__, str(error)]
        distributed.destroy_process_group()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
