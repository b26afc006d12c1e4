"""Reader of tool calls, with a function for each kind of body."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

from interposer_engine._answers.formats import (
    CallFormat,
    JsonBody,
    NamedBody,
    NestedBody,
    PythonBody,
    TaggedBody,
    ValueKind,
)
from interposer_engine._answers.literals import (
    JSON,
    MAX_DEPTH,
    PYTHON,
    Notation,
    converted,
    escaped,
    read_string,
    read_value,
)
from interposer_engine._answers.output import Output
from interposer_engine._answers.source import Malformed, Source, Steps
from interposer_engine._answers.tools import (
    Element,
    ToolSchemas,
    element_json,
    is_text,
    member_schema,
    value_json,
)

_MAX_NAME = 256
_PYTHON_NAME = re.compile(r"[\w.\-]+")
_KEYWORD = re.compile(r"\w+")


class CallReader:
    """Reads calls from a source and adds them to an output.

    A call begins in the output when its name is complete and its arguments begin. Until then, the
    source records the text of the call, so that the parser can return a malformed call as text.
    """

    def __init__(
        self,
        source: Source,
        output: Output,
        tools: ToolSchemas,
        new_id: Callable[[], str] = str,
    ) -> None:
        """Create a reader.

        Args:
            source: Text of the answer.
            output: Receives the calls.
            tools: Tools of the request.
            new_id: Returns the id of a call that begins without one.
        """
        self._source = source
        self._output = output
        self._tools = tools
        self._new_id = new_id

    def read(self, calls: CallFormat, opened: str) -> Steps[None]:
        """Read what follows the marker ``opened``: one call, or all calls up to the closing marker.

        Raises: Malformed: the text is no call of a tool.
        """
        body = calls.body
        space = ""
        if isinstance(body, JsonBody):
            space = yield from self._read_json(calls, body)
        elif isinstance(body, NamedBody):
            yield from self._read_named(body)
        elif isinstance(body, PythonBody):
            space = yield from self._read_python(calls)
        elif isinstance(body, NestedBody):
            yield from self._read_nested(body, opened == body.name_open.strip())
        else:
            is_inside = opened == body.name_open.strip()
            ended_by = yield from self._read_tagged(calls, body, is_inside)
            if ended_by == calls.close.strip():
                return
        yield from self._read_close(calls.close.strip(), space)

    def read_arguments(
        self, name: str, call_id: str = "", notation: Notation = JSON
    ) -> Steps[None]:
        """Read the object of arguments of the call of ``name``, and begin the call.

        Raises: Malformed: the text is no object, or the tool is unknown.
        """
        yield from self._source.read_space()
        character = yield from self._source.peek()
        if character == '"' and notation is JSON:
            # Some models write the arguments as a string that holds JSON.
            text = yield from read_string(self._source)
            self._begin_with(name, call_id, converted(text or "", JSON))
        elif character == "{":
            self._begin(name, call_id)
            yield from read_value(self._source, notation, self._output.arguments)
        else:
            raise Malformed(f"the arguments of {name!r} are no object")

    def _begin(self, name: str, call_id: str) -> None:
        self._check_name(name)
        self._source.stop_record()
        self._output.begin_call(name, call_id or self._new_id())

    def _begin_with(self, name: str, call_id: str, arguments: str) -> None:
        if not arguments.lstrip().startswith("{"):
            raise Malformed(f"the arguments of {name!r} are no object")
        self._begin(name, call_id)
        self._output.arguments(arguments)

    def _check_name(self, name: str) -> None:
        if not name:
            raise Malformed("a call has no name")
        if self._tools and name not in self._tools.names:
            raise Malformed(f"there is no tool {name!r:.100}")

    def _read_close(self, close: str, space: str) -> Steps[None]:
        """Read the closing marker, which a model may leave out.

        Args:
            close: The marker.
            space: White space that was read before it.
        """
        space += yield from self._source.read_space()
        if not close or not (yield from self._source.read_literal(close)):
            self._output.text.push(space)

    def _read_name(self, stops: Iterable[str]) -> Steps[tuple[str, str]]:
        """Read text up to one of ``stops``, and return the text and that stop."""
        pieces: list[str] = []
        stop = yield from self._source.read_until(stops, pieces.append, _MAX_NAME)
        if not stop:
            raise Malformed("the answer ends before the name of a call is complete")
        return "".join(pieces).strip(), stop

    # JSON

    def _read_json(self, calls: CallFormat, body: JsonBody) -> Steps[str]:
        """Read calls as JSON; return any white space that was read after the last call."""
        source = self._source
        yield from source.read_space()
        if (yield from source.read_literal("[")):
            yield from self._read_list("]", lambda: self._read_object(calls, body))
            return ""
        while True:
            yield from self._read_object(calls, body)
            if body.layout != "lines" and not calls.may_be_bare:
                return ""
            space = yield from source.read_space()
            if calls.may_be_bare and (yield from source.read_literal(";")):
                space = yield from source.read_space()
            if (yield from source.peek()) != "{":
                return space
            source.start_record()

    def _read_list(self, end: str, read_item: Callable[[], Steps[None]]) -> Steps[None]:
        """Read calls that commas separate, up to ``end``.

        Raises: Malformed: there is no call.
        """
        source = self._source
        while True:
            yield from source.read_space()
            yield from read_item()
            source.start_record()
            yield from source.read_space()
            yield from source.read_literal(",")
            yield from source.read_space()
            character = yield from source.peek()
            if character == end:
                source.take()
            if character in (end, ""):
                source.stop_record()
                return

    def _read_object(self, calls: CallFormat, body: JsonBody) -> Steps[None]:
        source = self._source
        if not (yield from source.read_literal("{")):
            raise Malformed("a call does not begin with '{'")
        name: str | None = None
        call_id = ""
        early_arguments: list[str] = []
        has_begun = False
        while True:
            yield from source.read_space()
            key = yield from read_string(source)
            if key is None:
                raise Malformed("a call has no name")
            yield from source.read_space()
            if not (yield from source.read_literal(":")):
                raise Malformed("':' is missing after a key")
            yield from source.read_space()
            if not body.name_key:
                yield from self.read_arguments(key)
                has_begun = True
            elif key == body.name_key and name is None:
                name = yield from read_string(source)
                self._check_name(name or "")
            elif key in body.arguments_keys and not has_begun and name:
                yield from self.read_arguments(name, call_id)
                has_begun = True
            elif key in body.arguments_keys and not has_begun and not early_arguments:
                yield from read_value(source, JSON, early_arguments.append)
            elif key == body.id_key:
                pieces: list[str] = []
                yield from read_value(source, JSON, pieces.append)
                value = json.loads("".join(pieces))
                call_id = value if isinstance(value, str) else "".join(pieces)
            else:
                yield from read_value(source, JSON, lambda _: None)
            yield from source.read_space()
            if (yield from source.read_literal("}")):
                break
            if not (yield from source.read_literal(",")):
                raise Malformed("',' or '}' is missing in a call")
        if not has_begun:
            self._begin_late(calls, name, call_id, "".join(early_arguments))
        self._output.finish_call()

    def _begin_late(
        self, calls: CallFormat, name: str | None, call_id: str, arguments: str
    ) -> None:
        """Begin a call at its end, because the arguments came before the name or are missing."""
        # Without a marker, an object that has only a name may well be an ordinary JSON answer.
        if calls.may_be_bare and not arguments:
            raise Malformed("a call has no arguments")
        if arguments.startswith('"'):
            arguments = converted(json.loads(arguments), JSON)
        self._begin_with(name or "", call_id, arguments or "{}")

    # A name, then arguments

    def _read_named(self, body: NamedBody) -> Steps[None]:
        call_id = ""
        if body.id_before:
            call_id, _ = yield from self._read_name((body.id_before.strip(),))
        name_end = body.name_end.strip() or body.name_end
        name, stop = yield from self._read_name((name_end, body.id_after, "{"))
        if body.text_name and name == body.text_name and stop == name_end:
            self._source.stop_record()
            self._output.text.marker()
            return
        if stop == body.id_after and stop:
            call_id, stop = yield from self._read_name((name_end, "{"))
        if stop == "{":
            # Some models leave the marker out; in other formats, the brace ends the name.
            self._source.unread(1)
        if body.number_prefix:
            call_id = name
            name = re.sub(r":\d+$", "", name.removeprefix(body.number_prefix))
        yield from self.read_arguments(name, call_id, body.notation)
        self._output.finish_call()

    # Tagged parameters

    def _read_tagged(self, calls: CallFormat, body: TaggedBody, is_inside: bool) -> Steps[str]:
        """Read a call with tagged parameters, and return the marker that ends it."""
        source, output = self._source, self._output
        if not is_inside:
            yield from self._read_name_open(body.name_open.strip())
        key_open, end = body.key_open.strip(), (body.end or calls.close).strip()
        name_end = body.name_end.strip()
        stops = (name_end,) if name_end else ("\n", key_open, end)
        yield from source.read_space()
        name, stop = yield from self._read_name(stops)
        self._begin(name, "")
        output.arguments("{")
        separator = ""
        while True:
            if stop not in (key_open, end):
                # Models write remarks between parameters, which no argument can carry.
                stop = yield from source.read_until((key_open, end), lambda _: None)
            if stop == end:
                break
            if not stop:
                raise Malformed("the answer ends before the call does")
            kinds = {marker.strip(): kind for marker, kind in body.key_ends}
            key, key_end = yield from self._read_name(kinds)
            output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator, stop = ", ", ""
            yield from self._read_tagged_value(body, name, key, kinds[key_end])
        output.arguments("}")
        output.finish_call()
        return end

    def _read_name_open(self, marker: str) -> Steps[None]:
        """Read the marker before the name of a call, if the format has one."""
        if marker:
            yield from self._source.read_space()
            if not (yield from self._source.read_literal(marker)):
                raise Malformed(f"a call does not begin with {marker!r}")

    def _read_tagged_value(
        self, body: TaggedBody, name: str, key: str, kind: ValueKind
    ) -> Steps[None]:
        source, output = self._source, self._output
        end = body.value_end.strip()
        stops = [end]
        if body.value_end.startswith("\n"):
            # The newline before the closing tag belongs to the format, not to the value.
            stops.append("\n" + end)
        if body.value_open:
            yield from source.read_space()
            if not (yield from source.read_literal(body.value_open)):
                raise Malformed(f"the parameter {key!r:.100} has no value")
        elif body.key_ends[0][0].endswith("\n"):
            yield from source.read_literal("\n")
        types = self._tools.types(name, key)
        if kind not in ("text", "json", "schema"):
            types = frozenset({"number", "integer"} if kind == "integer" else {kind})
        if body.quotes[0] and (yield from source.read_literal(body.quotes[0])):
            stops = [body.quotes[1] + end]
            kind = "text" if "string" in types else kind
        if kind == "text" or (kind == "schema" and is_text(types)):
            output.arguments('"')
            stop = yield from source.read_until(stops, lambda text: output.arguments(escaped(text)))
            output.arguments('"' if stop else "")
        else:
            pieces: list[str] = []
            stop = yield from source.read_until(stops, pieces.append)
            if stop:
                output.arguments(value_json("".join(pieces), types))
        if not stop:
            raise Malformed("the answer ends before the call does")

    # Nested tags

    def _read_nested(self, body: NestedBody, is_inside: bool) -> Steps[None]:
        source, output = self._source, self._output
        if not is_inside:
            yield from self._read_name_open(body.name_open)
        name, _ = yield from self._read_name((body.name_end,))
        self._begin(name, "")
        output.arguments("{")
        separator = ""
        while True:
            # Models write remarks between parameters, which no argument can carry.
            stop = yield from source.read_until((body.end, f"{body.prefix}<"), lambda _: None)
            if stop == body.end:
                break
            if not stop:
                raise Malformed("the answer ends before the call does")
            key, _ = yield from self._read_name((">",))
            output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if is_text(self._tools.types(name, key)):
                output.arguments('"')
                if not (
                    yield from source.read_until(
                        (body.end_tag(key),), lambda text: output.arguments(escaped(text))
                    )
                ):
                    raise Malformed("the answer ends before the call does")
                output.arguments('"')
            else:
                element = yield from self._read_element(body, key)
                root = self._tools.schema(name)
                output.arguments(element_json(element, member_schema(root, root, key), root))
        output.arguments("}")
        output.finish_call()

    def _read_element(self, body: NestedBody, key: str) -> Steps[Element]:
        """Read up to the closing tag of ``key``, and return the element with the tags inside."""
        open_elements = [Element(key, body.item)]
        while True:
            element = open_elements[-1]
            stop = yield from self._source.read_until(
                (f"{body.prefix}</", f"{body.prefix}<"), element.texts.append
            )
            if not stop:
                raise Malformed("the answer ends before the call does")
            tag, _ = yield from self._read_name((">",))
            if not stop.endswith("/"):
                open_elements.append(Element(tag, body.item))
                element.members.append(open_elements[-1])
                if len(open_elements) > MAX_DEPTH:
                    raise Malformed(f"the arguments are nested deeper than {MAX_DEPTH}")
            elif tag != element.key:
                raise Malformed(f"the tag {tag!r:.100} closes {element.key!r:.100}")
            else:
                open_elements.pop()
                if not open_elements:
                    return element

    # Python

    def _read_python(self, calls: CallFormat) -> Steps[str]:
        """Read calls in Python; return any white space that was read after the last call."""
        source = self._source
        yield from source.read_space()
        if (yield from source.read_literal("[")):
            yield from self._read_list("]", self._read_python_call)
            return ""
        if calls.may_be_bare:
            raise Malformed("a call does not begin with '['")
        while True:
            yield from self._read_python_call()
            space = yield from source.read_space()
            if not _PYTHON_NAME.match((yield from source.peek())):
                return space
            source.start_record()

    def _read_python_call(self) -> Steps[None]:
        source, output = self._source, self._output
        name = yield from source.read_run(_PYTHON_NAME, _MAX_NAME)
        if not (yield from source.read_literal("(")):
            raise Malformed("a call has no '(' after its name")
        self._begin(name, "")
        output.arguments("{")
        separator = ""
        while True:
            yield from source.read_space()
            if (yield from source.read_literal(")")):
                break
            if separator and not (yield from source.read_literal(",")):
                raise Malformed("',' or ')' is missing in a call")
            yield from source.read_space()
            keyword = yield from source.read_run(_KEYWORD, _MAX_NAME)
            if separator and not keyword and (yield from source.read_literal(")")):
                break
            yield from source.read_space()
            if not keyword or not (yield from source.read_literal("=")):
                raise Malformed("an argument of a call has no keyword")
            yield from source.read_space()
            output.arguments(f"{separator}{json.dumps(keyword, ensure_ascii=False)}: ")
            yield from read_value(source, PYTHON, output.arguments)
            separator = ", "
        output.arguments("}")
        output.finish_call()
