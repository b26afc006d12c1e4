"""Reader of answers that consist of messages in channels (harmony)."""

from __future__ import annotations

import re

from interposer_engine._answers.calls import CallReader
from interposer_engine._answers.formats import CallFormat, ChannelFormat
from interposer_engine._answers.output import Flow, Output
from interposer_engine._answers.source import Malformed, Source, Steps

_MAX_HEADER = 512
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class ChannelReader:
    """Reads the messages of an answer after the prompt ``<|start|>assistant``."""

    def __init__(
        self, channels: ChannelFormat, source: Source, output: Output, calls: CallReader
    ) -> None:
        self._channels = channels
        self._source = source
        self._output = output
        self._calls = calls
        self._stops = (*channels.ends, channels.start)
        self._channel_name = re.compile(re.escape(channels.channel) + r"\s*(\w+)")

    def read(self) -> Steps[None]:
        """Read all messages."""
        while (yield from self._source.peek()):
            yield from self._read_message()

    def _read_message(self) -> Steps[None]:
        header = yield from self._read_header()
        if not header:
            yield from self._source.read_until(self._stops, self._output.text.push)
            return
        recipient = _RECIPIENT.search(header)
        channel = self._channel_name.search(header)
        if channel and channel[1] == self._channels.reasoning_channel:
            yield from self._read_body(self._output.reasoning)
        elif recipient and recipient[1] not in ("assistant", "user", "all"):
            yield from self._read_call(recipient[1].removeprefix(self._channels.recipient_prefix))
        else:
            yield from self._read_body(self._output.text)

    def _read_header(self) -> Steps[str]:
        """Read and return a header, and keep recording; return "" for text without a header."""
        source = self._source
        source.start_record()
        pieces: list[str] = []

        try:
            stop = yield from source.read_until(
                (self._channels.message,), pieces.append, _MAX_HEADER
            )
        except Malformed:
            stop = ""
        header = "".join(pieces)
        if not stop:
            source.stop_record()
            # The header of a message that the end of the answer cuts off is no text for the user.
            if self._channels.channel not in header and self._channels.start not in header:
                self._output.text.push(header)
            return ""
        return header

    def _read_body(self, flow: Flow) -> Steps[None]:
        self._source.stop_record()
        if not flow.is_empty:
            flow.marker()
        yield from self._source.read_until(self._stops, flow.push)

    def _read_calls(self, calls: CallFormat) -> Steps[None]:
        """Read the calls of a message that holds whole calls."""
        source = self._source
        yield from source.read_space()
        yield from source.read_literal(calls.section_open.strip())
        while True:
            yield from self._calls.read(calls, "")
            yield from source.read_space()
            if (yield from source.peek()) != calls.first_marker[0]:
                return
            if (yield from source.read_literal(calls.section_close.strip())):
                return

    def _read_call(self, name: str) -> Steps[None]:
        try:
            if self._channels.calls is None:
                yield from self._calls.read_arguments(name)
                self._output.finish_call()
            else:
                yield from self._read_calls(self._channels.calls)
        except Malformed as error:
            if self._output.has_open_call:
                self._output.drop_call(str(error))
            else:
                self._output.note(f"a call was returned as text: {error}")
                self._output.text.marker()
                self._output.text.push(self._source.stop_record())
                stop = yield from self._source.read_until(self._stops, self._output.text.push)
                if stop in self._channels.ends:
                    self._output.text.push(stop)
                return
        yield from self._source.read_until(self._stops, lambda _: None)
