"""Main loop of a follower process, which executes the commands of rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interposer.errors import InterposerError, RankError, described
from interposer_models._engine.sequence import Sequence
from interposer_models._parallel.channel import Channel
from interposer_models._parallel.codec import encode
from interposer_models._parallel.coordination import LocalCoordinator, drifted
from interposer_models._parallel.group import Group
from interposer_models._parallel.language_model import RankedLanguageModel
from interposer_models._parallel.leader import REPORTS, SPECULATES

# Calls in which ranks of other groups can be lost while all ranks of this model live.
_WITH_OTHERS = frozenset({"update_weights"})


class FollowerCoordinator(LocalCoordinator):
    """Receives the decisions of rank 0 from the channel during a step."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def decide(self, flag: bool) -> bool:
        """Receive the flag of rank 0."""
        kind, decision, _ = self._channel.receive()
        if kind != "decision":
            raise ValueError(f"rank 0 decided nothing, but sent a {kind}")
        return bool(decision)


class Follower:
    """Executes the calls that arrive over a channel, until the channel is closed."""

    def __init__(self, channel: Channel, group: Group) -> None:
        self._channel, self._group = channel, group
        self._model: RankedLanguageModel | None = None
        self._running: dict[int, Sequence] = {}
        self._speculation: Any = None
        self._steps = 0
        self._last_error = ""  # of a call that failed here, as it must have on every rank
        self._calls: dict[str, Callable[..., Any]] = {
            "load": self._load,
            "add": self._add,
            "cancel": self._cancel,
            "logits": self._logits,
        }

    def run(self) -> None:
        """Execute commands of rank 0.

        Raises: RankError: this rank computed other tokens than rank 0.
        """
        while True:
            try:
                kind, flags, number = self._channel.receive()
            except EOFError:
                return
            if kind == "step":
                self._step(flags, number)
            elif kind == "call":
                name, arguments, options = self._channel.receive_call(number)
                if name in self._calls:
                    self._calls[name](*arguments, **options)
                else:
                    self._reply(name, arguments, options)
            else:
                raise ValueError(f"rank 0 sent a {kind} outside of a step")

    @property
    def model(self) -> RankedLanguageModel:
        """The model, after rank 0 has loaded it."""
        assert self._model is not None
        return self._model

    def _load(self, path: str, **options: Any) -> None:
        from interposer_models._loader import load

        try:
            model = load(path, tensor_parallel=self._group, **options)
        except Exception:
            # If rank 0 knows of the error, it reports the error to the user.
            if not self._group.is_error_shared:
                raise
            return  # rank 0 ends, and this rank with it
        assert isinstance(model, RankedLanguageModel)
        self._model, self._speculation = model, model.engine.speculation

    def _add(self, prompt: Any, params: Any, source: Any, reads_texts: bool) -> None:
        try:
            sequence = self.model.engine.add(prompt, params, source, reads_texts=reads_texts)
        except InterposerError as error:
            self._last_error = described(error)
        else:
            self._running[sequence.id] = sequence

    def _cancel(self, number: int) -> None:
        self.model.engine.cancel(self._running.pop(number))

    def _logits(self, *arguments: Any) -> None:
        try:
            self.model.engine.logits(*arguments)
        except InterposerError as error:
            self._last_error = described(error)

    def _step(self, flags: int, digest: int) -> None:
        engine = self.model.engine
        self._steps += 1
        if digest != engine.digest:
            rank = self._group.rank
            raise drifted(rank, rank, self._steps, self._last_error)
        if flags & REPORTS:
            self._channel.send("report")
        engine.speculation = self._speculation if flags & SPECULATES else None
        for event in engine.step():
            if event.sequence.finish_reason is not None:
                self._running.pop(event.sequence.id, None)

    def _reply(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        text, value = "", None
        try:
            value = getattr(self.model, name)(*arguments, **options)
        except RankError as error:
            # A lost rank of this model leaves no one to reply to.
            if name not in _WITH_OTHERS:
                raise
            text = described(error)
        except Exception as error:  # noqa: BLE001 - sent to rank 0, which compares errors
            text = described(error)
        self._channel.send_call(encode((text, value)))
