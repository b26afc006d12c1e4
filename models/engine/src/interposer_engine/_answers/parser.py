"""The incremental parser of answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from string import ascii_letters, digits
from typing import Any

from interposer_engine._answers.calls import CallReader
from interposer_engine._answers.channels import ChannelReader
from interposer_engine._answers.formats import (
    AnswerFormat,
    CallFormat,
    JsonBody,
    ReasoningFormat,
)
from interposer_engine._answers.output import Output
from interposer_engine._answers.parts import ParsedAnswer, Part
from interposer_engine._answers.source import Malformed, Source, Steps
from interposer_engine._answers.tools import ToolSchemas

_RANDOM = Random()


class AnswerParser:
    """Parses an answer, token by token, into text, reasoning and tool calls.

    The parser returns text and reasoning at once, and holds back only a possible beginning of a
    marker and white space that a marker may follow. Malformed calls and calls of unknown tools are
    returned as text. If the name of a malformed call was returned before the error, the rest of
    the call is dropped, and ``answer.calls`` lacks the call. ``answer.note`` has the reason.

    Args:
        format: How the checkpoint writes answers.
        tools: Tools of the request, as chat templates read them. Without tools, calls of any name
            are accepted, but only after a marker.
        markers_by_id: Texts of the special tokens of the format by token id.
        starts_in_reasoning: Whether the prompt ends with the marker that opens reasoning.
        random: Generator of ids for calls that begin without one.
        starts_in_call: Whether the prompt ends with the marker that opens a call.
    Raises: RequestError: a tool has no name.
    """

    def __init__(
        self,
        format: AnswerFormat,
        tools: Iterable[Mapping[str, Any]] = (),
        markers_by_id: Mapping[int, str] | None = None,
        starts_in_reasoning: bool = False,
        random: Random = _RANDOM,
        starts_in_call: bool = False,
    ) -> None:
        self._format = format
        self._tools = ToolSchemas(tools)
        self._markers_by_id = markers_by_id or {}
        self._source = Source()
        self._output = Output()
        id_length = format.calls.id_length if format.calls else 0
        self._reader = CallReader(
            self._source,
            self._output,
            self._tools,
            lambda: "".join(random.choices(ascii_letters + digits, k=id_length)),
        )
        self._steps = self._read(starts_in_reasoning, starts_in_call)
        self._has_ended = False

    def push(self, token_id: int, text: str) -> list[Part]:
        """Append a token and return the parts that it completes.

        Args:
            token_id: The token.
            text: Text that the token completes, without special tokens.
        """
        return self.push_text(text + self._markers_by_id.get(token_id, ""))

    def push_text(self, text: str) -> list[Part]:
        """Append text, with the markers of the format, and return the parts that it completes."""
        if text:
            self._source.push(text)
            self._advance()
        return self._output.drain()

    def end(self) -> list[Part]:
        """End the answer and return the parts that were held back."""
        if not self._has_ended:
            self._has_ended = True
            self._source.end()
            self._advance()
            self._output.end()
        return self._output.drain()

    @property
    def answer(self) -> ParsedAnswer:
        """The answer so far."""
        return self._output.answer

    def _advance(self) -> None:
        next(self._steps, None)

    def _read(self, starts_in_reasoning: bool, starts_in_call: bool) -> Steps[None]:
        answer = self._format
        if answer.channels is not None:
            yield from ChannelReader(
                answer.channels, self._source, self._output, self._reader
            ).read()
            return
        calls, reasoning = answer.calls, answer.reasoning
        markers = (answer.text_open, answer.text_close, *answer.ignored)
        text_markers = {marker.strip() for marker in markers} - {""}
        opens = {reasoning.open.strip()} if reasoning else set()
        stops = {*text_markers, *opens, *_call_markers(calls)}
        if starts_in_reasoning and reasoning:
            yield from self._read_reasoning(reasoning)
        if starts_in_call and calls:
            # Some models repeat the marker at the end of their prompt.
            yield from self._source.read_literal(calls.first_marker)
            yield from self._read_call(calls, calls.first_marker, "")
        stop = ""
        while True:
            is_at_start = self._output.text.is_empty or stop in text_markers
            if calls and calls.may_be_bare and self._tools and is_at_start:
                yield from self._read_bare_call(calls)
            stop = yield from self._source.read_until(stops, self._output.text.push)
            if not stop:
                return
            if reasoning and stop in opens:
                yield from self._read_reasoning(reasoning)
            elif stop in text_markers:
                self._output.text.marker()
            elif calls and stop == calls.section_open.strip():
                yield from self._read_section(calls, stop)
            elif calls:
                # Such as the prompt of Python, ">>> ", where the marker of calls is ">>>".
                is_prompt = calls.text_name and (yield from self._source.peek()).isspace()
                yield from self._read_call(calls, stop, stop, is_bare=bool(is_prompt))

    def _read_reasoning(self, reasoning: ReasoningFormat) -> Steps[None]:
        source, output = self._source, self._output
        output.text.marker()
        output.reasoning.marker()
        yield from source.read_space()
        # Some models repeat the marker at the end of their prompt.
        yield from source.read_literal(reasoning.open.strip())
        call_markers = _call_markers(self._format.calls) if reasoning.calls_end_it else set[str]()
        stop = yield from source.read_until(
            {reasoning.close.strip(), *call_markers}, output.reasoning.push
        )
        if stop in call_markers:
            source.unread(len(stop))

    def _read_bare_call(self, calls: CallFormat) -> Steps[None]:
        """Read a call without a marker, if one comes next."""
        space = yield from self._source.read_space()
        is_object = isinstance(calls.body, JsonBody) and calls.body.layout != "list"
        bracket = "{" if is_object else "["
        if (yield from self._source.peek()) == bracket:
            yield from self._read_call(calls, "", space, is_bare=True)
        else:
            self._output.text.push(space)

    def _read_section(self, calls: CallFormat, opened: str) -> Steps[None]:
        """Read the calls and texts between the two markers of a section."""
        text, close = self._output.text, calls.section_close.strip()
        # The opening marker, which is returned as text if no call follows.
        section_start = [opened]
        has_calls = False

        def push(piece: str) -> None:
            if section_start and piece.isspace():
                section_start.append(piece)
            else:
                text.push("".join([*section_start, piece]))
                section_start.clear()

        while True:
            stop = yield from self._source.read_until((calls.first_marker, close), push)
            if stop in ("", close):
                break
            prefix = "".join(section_start)
            has_calls |= yield from self._read_call(calls, stop, prefix + stop)
            section_start.clear()
        if not has_calls:
            text.push("".join(section_start) + stop)
            if section_start:
                self._output.note("calls were announced, and none came")

    def _read_call(
        self, calls: CallFormat, opened: str, text: str, is_bare: bool = False
    ) -> Steps[bool]:
        """Read a call, or return it as text; return whether a call was begun.

        Args:
            calls: How calls are written.
            opened: Marker that was read.
            text: Text to return before the rest if the call is malformed.
            is_bare: Whether nothing but its form shows that the text is a call.
        """
        source, output = self._source, self._output
        source.start_record(text)
        try:
            yield from self._reader.read(calls, opened)
        except Malformed as error:
            if not output.has_open_call:
                output.text.push(source.stop_record())
                if not is_bare:
                    output.note(f"a call was returned as text: {error}")
                return False
            output.drop_call(str(error))
            yield from self._skip_call(calls)
        source.stop_record()
        return True

    def _skip_call(self, calls: CallFormat) -> Steps[None]:
        """Drop the rest of a malformed call."""
        close, section_close = calls.close.strip(), calls.section_close.strip()
        stop = yield from self._source.read_until(
            (close, section_close, calls.first_marker, *_call_markers(calls)), lambda _: None
        )
        if stop and stop != close:
            self._source.unread(len(stop))


def _call_markers(calls: CallFormat | None) -> set[str]:
    """Return the markers with which calls begin in an answer."""
    if calls is None:
        return set()
    markers = {calls.section_open.strip() or calls.first_marker}
    if calls.open_is_optional and not isinstance(calls.body, JsonBody):
        markers.add(getattr(calls.body, "name_open", "").strip())
    return markers - {""}
