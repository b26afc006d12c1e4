"""A step is called and captured on one stream, and a replay returns what it returned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from interposer_ops.devices.graph_recorder import GraphRecorder


class Tape:
    """A graph: what was called while it was captured, and is called again."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


class Part:
    """A part of torch of two devices that notes what happens on which stream, and in which pool."""

    def __init__(self) -> None:
        self.device = 0
        self.notes: list[str] = []
        self.tape: Tape | None = None
        self.current = self.Stream("default")

    class Stream:
        count = 0

        def __init__(self, name: str = "") -> None:
            type(self).count += not name
            self.name = name or f"stream {self.count}"

        def wait_stream(self, other: Any) -> None:
            pass

    def current_device(self) -> int:
        return self.device

    def current_stream(self) -> Any:
        return self.current

    def synchronize(self) -> None:
        self.notes.append("synchronize")

    def graph_pool_handle(self) -> str:
        self.notes.append("pool")
        return "pool"

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: Tape, pool: str, stream: Any) -> Iterator[None]:
        assert pool == "pool"
        self.tape = graph
        with self.stream(stream):
            yield
        self.tape = None

    def queue(self, work: Any) -> None:
        """Do the work, or note it for the graph that is captured."""
        self.notes.append(("captured on " if self.tape else "called on ") + self.current.name)
        if self.tape is None:
            work()
        else:
            self.tape.calls.append(work)


def test_warm_up_and_capture_use_the_same_stream() -> None:
    part, total = Part(), [0]
    part.Stream.count = 0

    def step() -> list[int]:
        part.queue(lambda: total.__setitem__(0, total[0] + 1))
        return total

    recorder = GraphRecorder(part, Tape)
    replay = recorder.record(step)
    called = ["called on stream 1"] * 3
    assert part.notes == [*called, "synchronize", "pool", "captured on stream 1"]
    assert total == [3]
    assert replay() is total
    assert total == [4]
    part.notes.clear()
    recorder.record(step)
    assert part.notes == [*called, "synchronize", "captured on stream 1"], "one stream, one pool"
    part.device = 1
    recorder.record(step)
    assert part.notes[-1] == "captured on stream 2"
