"""How checkpoints write reasoning and tool calls, as data.

Each field that holds a text gives it as the model writes it, with white space. The parser ignores
the white space around markers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from interposer_engine._answers.literals import JSON, Notation

JsonType = Literal["string", "number", "integer", "boolean", "null", "array", "object"]
ValueKind = Literal["text", "json", "schema"] | JsonType
"""What a tagged value is: text, JSON, one of them by the parameter's JSON schema, or JSON of a
type."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning.

    Attributes:
        name: Name of the format, for overrides.
        open: Marker before the reasoning.
        close: Marker after the reasoning.
        calls_end_it: Whether a tool call ends the reasoning without ``close``.
    """

    name: str
    open: str
    close: str
    calls_end_it: bool = False


@dataclass(frozen=True, slots=True)
class JsonBody:
    """Calls as JSON objects that hold name, arguments and possibly an id.

    Attributes:
        name_key: Key of the name; "" if each object has the name as its only key.
        arguments_keys: Keys of the arguments; the first one is written.
        id_key: Key of the id; "" if there is none.
        is_id_first: True if the id comes before the name, False if it comes after the arguments.
            The parser ignores an id that comes after the arguments, because a stream must send the
            id with the first piece of a call.
        layout: Whether a pair of markers holds one object, a list, or objects in lines.
    """

    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    id_key: str = ""
    is_id_first: bool = False
    layout: Literal["object", "list", "lines"] = "object"


@dataclass(frozen=True, slots=True)
class NamedBody:
    """A name, then an object of arguments.

    Attributes:
        name_end: Marker between name and arguments; "" if the opening brace ends the name.
        id_before: Marker between an id and the name that follows; "" if no id precedes the name.
        id_after: Marker between the name and an optional id that follows; "" for none.
        number_prefix: If set, the model writes an id in place of the name, such as
            ``functions.look:0``: this prefix, the name, a colon and the number of the call.
        text_name: Name that stands for the user: text follows instead of arguments. "" for none.
        notation: Notation of the arguments.
    """

    name_end: str
    id_before: str = ""
    id_after: str = ""
    number_prefix: str = ""
    text_name: str = ""
    notation: Notation = JSON


@dataclass(frozen=True, slots=True)
class TaggedBody:
    """A name, then each parameter between tags of its own.

    Attributes:
        name_open: Marker before the name; "" if the name directly follows the marker of the call.
        name_end: Marker after the name; if it is white space, the first tag ends the name as well.
        number_end: Marker after the number of the call, which then follows ``name_end`` and counts
            from 1; "" if calls have no number.
        key_open: Marker before the key of a parameter.
        key_ends: Markers after the key, with the kind of the value that follows.
        value_open: Marker before the value, in formats with a pair of tags for the value.
        value_end: Marker after the value.
        end: Marker after the last parameter; "" if the closing marker of the call takes its place.
        quotes: Texts around a string that has one of ``quoted``; "" if there are none.
        quoted: Characters that may appear only in a string with quotes.
    """

    name_open: str
    name_end: str
    key_open: str
    key_ends: tuple[tuple[str, ValueKind], ...]
    value_end: str
    value_open: str = ""
    end: str = ""
    number_end: str = ""
    quotes: tuple[str, str] = ("", "")
    quoted: str = ""

    def quotes_of(self, text: str, *, is_ambiguous: bool = False) -> tuple[str, str]:
        """Return the quotes around a string, which are empty if it needs none.

        Args:
            text: The string.
            is_ambiguous: Whether the string without quotes would be read as another JSON value.
        """
        is_quoted = is_ambiguous or any(character in text for character in self.quoted)
        return self.quotes if is_quoted else ("", "")


@dataclass(frozen=True, slots=True)
class NestedBody:
    """A name, then each parameter in tags of its name; tags inside are members and items.

    Attributes:
        prefix: Text before each tag.
        name_open: Marker before the name.
        name_end: Marker after the name.
        end: Marker after the last parameter.
        item: Name of the tags around the items of a list.
    """

    prefix: str
    name_open: str
    name_end: str
    end: str
    item: str = "item"

    def tag(self, key: str) -> str:
        """Return the opening tag of a parameter, a member or an item."""
        return f"{self.prefix}<{key}>"

    def end_tag(self, key: str) -> str:
        """Return the closing tag."""
        return f"{self.prefix}</{key}>"


@dataclass(frozen=True, slots=True)
class PythonBody:
    """A list of calls in the syntax of Python, with keyword arguments.

    Attributes:
        is_list: Whether brackets enclose the calls; else each call is a line.
    """

    is_list: bool = True


CallBody = JsonBody | NamedBody | TaggedBody | NestedBody | PythonBody


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How tool calls are written.

    Attributes:
        name: Name of the format, for overrides.
        body: What stands between the markers.
        open: Marker before a call, or before a list of calls.
        close: Marker after a call or list.
        section_open: Marker before all calls.
        section_close: Marker after all calls.
        separator: Text between two calls.
        may_be_bare: Whether a call may appear without ``open`` at the start of the answer, or next
            to ``text_open`` or ``text_close``. Such a call counts only if it names a given tool.
        writes_open: Whether ``writer`` writes ``open`` before bare calls.
        open_is_optional: Whether models sometimes leave ``open`` out before ``body.name_open``.
        id_length: Length of the ids that the chat template accepts; 0 if it accepts any. A call
            that begins without an id gets a random one of this length.
    """

    name: str
    body: CallBody
    open: str = ""
    close: str = ""
    section_open: str = ""
    section_close: str = ""
    separator: str = ""
    may_be_bare: bool = False
    writes_open: bool = True
    open_is_optional: bool = False
    id_length: int = 0

    @property
    def first_marker(self) -> str:
        """The marker with which a call begins, without white space."""
        if self.open.strip() or not isinstance(self.body, TaggedBody | NestedBody):
            return self.open.strip()
        return self.body.name_open.strip()

    @property
    def text_name(self) -> str:
        """The name that stands for the user in a call; "" if there is none."""
        return self.body.text_name if isinstance(self.body, NamedBody) else ""

    @property
    def carries_ids(self) -> bool:
        """Whether the model writes the id of a call before the arguments."""
        if isinstance(self.body, JsonBody):
            return bool(self.body.id_key) and self.body.is_id_first
        if isinstance(self.body, NamedBody):
            return bool(self.body.id_before or self.body.id_after or self.body.number_prefix)
        return False


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """Answers as a sequence of messages that are addressed to channels and tools.

    The arguments of a call are JSON, and the header of the message has the name of the tool. If
    ``calls`` is set, the message of a call holds the whole call instead.

    Attributes:
        name: Name of the format, for overrides.
        start: Marker before the header of a message, with the role of the model.
        channel: Marker before the name of the channel.
        message: Marker between header and body.
        constrain: Marker before the type of a body; "" if headers have no type.
        ends: Markers after a message that is not the last, after a call, and after the answer.
        reasoning_channel: Channel of reasoning.
        call_channel: Channel of calls; "" if the name of the tool is the channel.
        text_channel: Channel of text for the user. Other channels hold such text, too.
        recipient_prefix: Text before the name of a tool in the header.
        calls: Form of the calls inside a message; None if the message is the arguments.
    """

    name: str
    start: str
    channel: str
    message: str
    constrain: str
    ends: tuple[str, str, str]
    reasoning_channel: str
    call_channel: str
    text_channel: str
    recipient_prefix: str
    calls: CallFormat | None = None

    def header(self, name: str) -> str:
        """Return the header of a call, up to the message."""
        if not self.call_channel:
            return f"{self.channel}{name}"
        recipient = f"to={self.recipient_prefix}{name}"
        return f"{self.channel}{self.call_channel} {recipient} {self.constrain}json"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a family of checkpoints writes answers.

    Attributes:
        name: Name of the family.
        reasoning: Markers of reasoning; None if the family does not reason.
        calls: Form of tool calls; None if the family makes none.
        channels: Messages in channels, which replace ``reasoning`` and ``calls``.
        text_open: Marker before the text for the user.
        text_close: Marker after the text for the user.
        ignored: Further markers that are no text for the user.
        detected_by: Texts of the chat template that identify the family. Each group is enough; all
            texts of a group must appear.
        not_by: Texts that must not appear.
        builds_markers: Whether chat templates build the markers from pieces, so that no marker
            appears in the template.
    """

    name: str
    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    channels: ChannelFormat | None = None
    text_open: str = ""
    text_close: str = ""
    ignored: tuple[str, ...] = ()
    detected_by: tuple[tuple[str, ...], ...] = ()
    not_by: tuple[str, ...] = ()
    builds_markers: bool = False

    def markers(self) -> Iterator[str]:
        """Yield all markers of the format."""
        yield from (self.text_open, self.text_close, *self.ignored)
        for part in (self.reasoning, self.calls, self.channels):
            if part is not None:
                yield from _texts(part)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a dataclass or tuple."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _texts(item)
    elif hasattr(value, "__dataclass_fields__"):
        for field in fields(value):
            if field.name not in ("name", "layout", "escapes", "quoted", "item"):
                yield from _texts(getattr(value, field.name))


THINK = ReasoningFormat("think", "<think>\n", "\n</think>\n\n")
COMPACT_THINK = ReasoningFormat("compact_think", "<think>", "</think>")
CALLS_END_THINK = ReasoningFormat("deepseek", "<think>", "</think>", calls_end_it=True)
SEED_THINK = ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>\n")
MISTRAL_THINK = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
COMMAND_THINK = ReasoningFormat("command", "<|START_THINKING|>", "<|END_THINKING|>")
GEMMA4_THINK = ReasoningFormat("gemma4", "<|channel>thought\n", "\n<channel|>")
APRIEL_THINK = ReasoningFormat(
    "apriel", "Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n"
)
MINIMAX_M3_THINK = ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>")
KIMI_K3_THINK = ReasoningFormat("kimi_k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>")
HY3_THINK = ReasoningFormat("hy3", "<think:opensource>", "</think:opensource>")
MINICPM3_THINK = ReasoningFormat("minicpm3", "<|thought_start|>\n", "\n<|thought_end|>\n")
SOLAR_THINK = ReasoningFormat("solar", "<|think|>", "<|end|><|begin|>assistant")

HERMES = CallFormat("hermes", JsonBody(), "<tool_call>\n", "\n</tool_call>", separator="\n")
LLAMA3 = CallFormat(
    "llama3",
    JsonBody(arguments_keys=("parameters", "arguments")),
    open="<|python_tag|>",
    separator="; ",
    may_be_bare=True,
    writes_open=False,
)
LLAMA4 = CallFormat(
    "llama4",
    JsonBody(arguments_keys=("parameters", "arguments")),
    separator="\n",
    may_be_bare=True,
)
PYTHONIC = CallFormat(
    "pythonic",
    PythonBody(),
    open="<|python_start|>",
    close="<|python_end|>",
    may_be_bare=True,
    writes_open=False,
)
LFM2 = CallFormat("lfm2", PythonBody(), open="<|tool_call_start|>", close="<|tool_call_end|>")
MINICPM3 = CallFormat(
    "minicpm3",
    PythonBody(is_list=False),
    open="<|tool_call_start|>\n```python\n",
    close="\n```\n<|tool_call_end|>",
    separator="\n",
)
OLMO3 = CallFormat(
    "olmo3",
    PythonBody(is_list=False),
    open="<function_calls>\n",
    close="\n</function_calls>",
    separator="\n",
)
GEMMA3 = CallFormat(
    "gemma3", PythonBody(is_list=False), open="```tool_code\n", close="\n```", separator="\n"
)
QWEN3_CODER = CallFormat(
    "qwen3_coder",
    TaggedBody(
        name_open="<function=",
        name_end=">\n",
        key_open="<parameter=",
        key_ends=((">\n", "schema"),),
        value_end="\n</parameter>\n",
        end="</function>",
    ),
    open="<tool_call>\n",
    close="\n</tool_call>",
    separator="\n",
    open_is_optional=True,
)
SEED_OSS = CallFormat(
    "seed_oss",
    TaggedBody(
        name_open="<function=",
        name_end=">\n",
        key_open="<parameter=",
        key_ends=((">", "schema"),),
        value_end="</parameter>\n",
        end="</function>",
    ),
    open="<seed:tool_call>\n",
    close="\n</seed:tool_call>",
    separator="\n",
)
MINIMAX_M2 = CallFormat(
    "minimax_m2",
    TaggedBody(
        name_open='<invoke name="',
        name_end='">\n',
        key_open='<parameter name="',
        key_ends=(('">', "schema"),),
        value_end="</parameter>\n",
        end="</invoke>",
    ),
    section_open="<minimax:tool_call>\n",
    section_close="\n</minimax:tool_call>",
    separator="\n",
)

MINIMAX_NAMESPACE = "]<]minimax[>["
MINIMAX_M3 = CallFormat(
    "minimax_m3",
    NestedBody(
        prefix=MINIMAX_NAMESPACE,
        name_open=f'{MINIMAX_NAMESPACE}<invoke name="',
        name_end='">',
        end=f"{MINIMAX_NAMESPACE}</invoke>",
    ),
    section_open=f"{MINIMAX_NAMESPACE}<tool_call>\n",
    section_close=f"\n{MINIMAX_NAMESPACE}</tool_call>",
    separator="\n",
)
MINICPM5 = CallFormat(
    "minicpm5",
    TaggedBody(
        name_open='<function name="',
        name_end='">',
        key_open='<param name="',
        key_ends=(('">', "schema"),),
        value_end="</param>",
        end="</function>",
        quotes=("<![CDATA[", "]]>"),
        quoted="<&\n",
    ),
    separator="\n",
)


_JSON_TYPES: tuple[JsonType, ...] = ("number", "integer", "boolean", "null", "array", "object")
KIMI_K3 = CallFormat(
    "kimi_k3",
    TaggedBody(
        name_open=' tool="',
        name_end='" index="',
        number_end='"<|sep|>',
        key_open='<|open|>argument key="',
        key_ends=(
            ('" type="string"<|sep|>', "text"),
            *((f'" type="{name}"<|sep|>', name) for name in _JSON_TYPES),
        ),
        value_end="<|close|>argument<|sep|>",
    ),
    open="<|open|>call",
    close="<|close|>call<|sep|>",
    section_open="<|open|>tools<|sep|>",
    section_close="<|close|>tools<|sep|>",
)
HY3 = CallFormat(
    "hy3",
    TaggedBody(
        name_open="",
        name_end="<tool_sep:opensource>\n",
        key_open="<arg_key:opensource>",
        key_ends=(("</arg_key:opensource>\n", "schema"),),
        value_open="<arg_value:opensource>",
        value_end="</arg_value:opensource>\n",
    ),
    open="<tool_call:opensource>",
    close="</tool_call:opensource>",
    section_open="<tool_calls:opensource>\n",
    section_close="\n</tool_calls:opensource>",
    separator="\n",
)


_BAR = "\N{FULLWIDTH VERTICAL LINE}"


def _dsml(name: str, section: str, language: str = "DSML") -> CallFormat:
    """Return a format of DeepSeek or GigaChat whose calls are in a section of the given name."""
    prefix = f"{_BAR}{language}{_BAR}"
    return CallFormat(
        name,
        TaggedBody(
            name_open=f'<{prefix}invoke name="',
            name_end='">\n',
            key_open=f'<{prefix}parameter name="',
            key_ends=(('" string="true">', "text"), ('" string="false">', "json")),
            value_end=f"</{prefix}parameter>\n",
            end=f"</{prefix}invoke>",
        ),
        section_open=f"<{prefix}{section}>\n",
        section_close=f"\n</{prefix}{section}>",
        separator="\n",
    )


def _deepseek(token: str) -> str:
    """Return a special token of DeepSeek."""
    return f"<{_BAR}{token}{_BAR}>"


DEEPSEEK_V3_2 = _dsml("deepseek_v3_2", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek_v4", "tool_calls")
GIGACHAT3_5 = _dsml("gigachat3_5", "tool_calls", "GCML")
DEEPSEEK_V3 = CallFormat(
    "deepseek_v3",
    NamedBody(name_end="\n```json\n"),
    open=_deepseek("tool▁call▁begin") + "function" + _deepseek("tool▁sep"),
    close="\n```" + _deepseek("tool▁call▁end"),
    section_open=_deepseek("tool▁calls▁begin"),
    section_close=_deepseek("tool▁calls▁end"),
    separator="\n",
)
DEEPSEEK_V3_1 = CallFormat(
    "deepseek_v3_1",
    NamedBody(name_end=_deepseek("tool▁sep")),
    open=_deepseek("tool▁call▁begin"),
    close=_deepseek("tool▁call▁end"),
    section_open=_deepseek("tool▁calls▁begin"),
    section_close=_deepseek("tool▁calls▁end"),
)
KIMI_K2 = CallFormat(
    "kimi_k2",
    NamedBody(name_end="<|tool_call_argument_begin|>", number_prefix="functions."),
    open="<|tool_call_begin|>",
    close="<|tool_call_end|>",
    section_open="<|tool_calls_section_begin|>",
    section_close="<|tool_calls_section_end|>",
)
SOLAR = CallFormat(
    "solar",
    NamedBody(name_end="<|tool_call:args|>", id_before="<|tool_call:name|>"),
    open="<|tool_call:begin|>",
    close="<|tool_call:end|>",
    section_open="<|tool_calls|>",
    section_close="<|calls|>",
)
GLM = CallFormat(
    "glm4",
    TaggedBody(
        name_open="",
        name_end="\n",
        key_open="<arg_key>",
        key_ends=(("</arg_key>\n", "schema"),),
        value_open="<arg_value>",
        value_end="</arg_value>\n",
    ),
    open="<tool_call>",
    close="</tool_call>",
    separator="\n",
)
MISTRAL_LIST = CallFormat(
    "mistral_list", JsonBody(id_key="id", layout="list"), open="[TOOL_CALLS]", id_length=9
)
MISTRAL = CallFormat(
    "mistral", NamedBody(name_end="[ARGS]", id_after="[CALL_ID]"), open="[TOOL_CALLS]", id_length=9
)
XLAM = CallFormat("xlam", JsonBody(layout="list"), may_be_bare=True)
GRANITE3 = CallFormat("granite3", JsonBody(layout="list"), open="<|tool_call|>")
FUNCTOOLS = CallFormat("functools", JsonBody(layout="list"), open="functools")
PHI4 = CallFormat("phi4", JsonBody(layout="list"), open="<|tool_call|>", close="<|/tool_call|>")
NEMOTRON = CallFormat("nemotron", JsonBody(layout="list"), open="<TOOLCALL>", close="</TOOLCALL>")
APRIEL = CallFormat("apriel", JsonBody(layout="list"), open="<tool_calls>", close="</tool_calls>")
MINIMAX_M1 = CallFormat(
    "minimax_m1", JsonBody(layout="lines"), "<tool_calls>\n", "\n</tool_calls>", separator="\n"
)
APERTUS = CallFormat(
    "apertus",
    JsonBody(name_key="", layout="list"),
    open="<|tools_prefix|>",
    close="<|tools_suffix|>",
)
COMMAND = CallFormat(
    "command",
    JsonBody("tool_name", ("parameters",), "tool_call_id", is_id_first=True, layout="list"),
    open="<|START_ACTION|>",
    close="<|END_ACTION|>",
)
COMMAND_R = CallFormat(
    "command_r",
    JsonBody("tool_name", ("parameters",), layout="list"),
    open="Action:\n```json\n",
    close="```",
)
GIGACHAT = CallFormat("gigachat", JsonBody(), open="<|function_call|>", close="<|message_sep|>")
GIGACHAT3 = CallFormat(
    "gigachat3", JsonBody(), open="function call<|role_sep|>\n", close="<|message_sep|>"
)
INTERNLM2 = CallFormat(
    "internlm2", JsonBody(), open="<|action_start|><|plugin|>\n", close="<|action_end|>"
)
GRANITE_20B = CallFormat("granite_20b", JsonBody(), open="<function_call> ", separator=" ")
FUNCTIONARY = CallFormat(
    "functionary", NamedBody(name_end=">"), open="<function=", close="</function>"
)
FUNCTIONARY3_2 = CallFormat("functionary3_2", NamedBody(name_end="\n", text_name="all"), open=">>>")
FUNCTION_GEMMA = CallFormat(
    "function_gemma",
    NamedBody(name_end="", notation=Notation(("<escape>",), "none", has_bare_keys=True)),
    open="<start_function_call>call:",
    close="<end_function_call>",
)
GEMMA4 = CallFormat(
    "gemma4",
    NamedBody(name_end="", notation=Notation(('<|"|>',), "none", has_bare_keys=True)),
    open="<|tool_call>call:",
    close="<tool_call|>",
)
HARMONY = ChannelFormat(
    "harmony",
    start="<|start|>assistant",
    channel="<|channel|>",
    message="<|message|>",
    constrain="<|constrain|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    reasoning_channel="analysis",
    call_channel="commentary",
    text_channel="final",
    recipient_prefix="functions.",
)
ATEM = ChannelFormat(
    "atem",
    start="<|start|>assistant",
    channel=" to=",
    message="<|message|>",
    constrain="",
    ends=("<|eom|>", "<|eot|>", "<|eot|>"),
    reasoning_channel="self",
    call_channel="",
    text_channel="user",
    recipient_prefix="",
    calls=CallFormat(
        "atem",
        TaggedBody(
            name_open='<atem:invoke name="',
            name_end='">\n',
            key_open='<atem:parameter name="',
            key_ends=(('">', "schema"),),
            value_end="</atem:parameter>\n",
            end="</atem:invoke>",
        ),
        section_open="<atem:function_calls>\n",
        section_close="\n</atem:function_calls>",
        separator="\n",
    ),
)

# Families whose markers are more specific come first.
FORMATS: tuple[AnswerFormat, ...] = (
    AnswerFormat(
        "gpt_oss",
        channels=HARMONY,
        detected_by=(
            ("<|channel|>", "<|message|>", "analysis", "to=functions."),
            ("<|channel|>", "<|message|>", "analysis", "functions."),
        ),
    ),
    AnswerFormat("muse", channels=ATEM, detected_by=(("<atem:function_calls>",),)),
    AnswerFormat(
        "deepseek_v4",
        CALLS_END_THINK,
        DEEPSEEK_V4,
        detected_by=(("DSML", "tool_calls>"),),
        not_by=("function_calls>",),
    ),
    AnswerFormat(
        "gigachat3_5",
        COMPACT_THINK,
        GIGACHAT3_5,
        ignored=("<|message_sep|>",),
        detected_by=(("GCML", "tool_calls>"),),
    ),
    AnswerFormat("deepseek_v3_2", CALLS_END_THINK, DEEPSEEK_V3_2, detected_by=(("DSML",),)),
    AnswerFormat(
        "deepseek_v3",
        CALLS_END_THINK,
        DEEPSEEK_V3,
        detected_by=(("tool▁calls▁begin", "```json"),),
    ),
    AnswerFormat(
        "deepseek_v3_1",
        CALLS_END_THINK,
        DEEPSEEK_V3_1,
        detected_by=(("tool▁calls▁begin",),),
    ),
    AnswerFormat(
        "kimi_k2",
        ReasoningFormat("kimi_k2", "<think>", "</think>", calls_end_it=True),
        KIMI_K2,
        detected_by=(("<|tool_call_argument_begin|>",),),
    ),
    AnswerFormat(
        "kimi_k3",
        KIMI_K3_THINK,
        KIMI_K3,
        text_open="<|open|>response<|sep|>",
        text_close="<|close|>response<|sep|>",
        ignored=("<|close|>message<|sep|>", "<|end_of_msg|>"),
        detected_by=(("<|open|>", "<|close|>", "<|sep|>", "argument"),),
        builds_markers=True,
    ),
    AnswerFormat(
        "hy3",
        HY3_THINK,
        HY3,
        detected_by=(("<tool_sep{}>", ":opensource"), ("<tool_sep:opensource>",)),
        builds_markers=True,
    ),
    AnswerFormat(
        "solar",
        SOLAR_THINK,
        SOLAR,
        text_open="<|content|>",
        text_close="<|end|><|begin|>assistant",
        ignored=("<|end|>",),
        detected_by=(("<|tool_call:begin|>",),),
    ),
    AnswerFormat("gemma4", GEMMA4_THINK, GEMMA4, detected_by=(("<|tool_call>call:",),)),
    AnswerFormat("function_gemma", None, FUNCTION_GEMMA, detected_by=(("<start_function_call>",),)),
    AnswerFormat("minimax_m3", MINIMAX_M3_THINK, MINIMAX_M3, detected_by=((MINIMAX_NAMESPACE,),)),
    AnswerFormat(
        "minicpm5",
        THINK,
        MINICPM5,
        detected_by=(('<function name="', '<param name="'),),
    ),
    AnswerFormat("minimax_m2", THINK, MINIMAX_M2, detected_by=(("minimax:tool_call",),)),
    AnswerFormat("seed_oss", SEED_THINK, SEED_OSS, detected_by=(("seed:tool_call",),)),
    AnswerFormat(
        "glm4",
        ReasoningFormat("glm4", "<think>", "</think>\n"),
        GLM,
        detected_by=(("<arg_key>", "<arg_value>", "<tool_call>"),),
    ),
    AnswerFormat(
        "qwen3_coder",
        THINK,
        QWEN3_CODER,
        detected_by=(("<tool_call>", "<function=", "<parameter="),),
    ),
    AnswerFormat(
        "command",
        COMMAND_THINK,
        COMMAND,
        text_open="<|START_RESPONSE|>",
        text_close="<|END_RESPONSE|>",
        detected_by=(("<|START_ACTION|>",),),
        not_by=("<|START_TEXT|>",),
    ),
    AnswerFormat(
        "command_a2",
        COMMAND_THINK,
        COMMAND,
        text_open="<|START_TEXT|>",
        text_close="<|END_TEXT|>",
        detected_by=(("<|START_ACTION|>", "<|START_TEXT|>"),),
    ),
    AnswerFormat(
        "command_r", None, COMMAND_R, detected_by=(("Action:", "```json", '"tool_name": '),)
    ),
    AnswerFormat("mistral", MISTRAL_THINK, MISTRAL, detected_by=(("[TOOL_CALLS]", "[ARGS]"),)),
    AnswerFormat("mistral_list", MISTRAL_THINK, MISTRAL_LIST, detected_by=(("[TOOL_CALLS]",),)),
    AnswerFormat("nemotron", THINK, NEMOTRON, detected_by=(("<TOOLCALL>",),)),
    AnswerFormat("apertus", None, APERTUS, detected_by=(("<|tools_prefix|>",),)),
    AnswerFormat("minicpm3", MINICPM3_THINK, MINICPM3, detected_by=(("<|thought_start|>",),)),
    AnswerFormat(
        "lfm2",
        COMPACT_THINK,
        LFM2,
        detected_by=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)),
    ),
    AnswerFormat("phi4", None, PHI4, detected_by=(("<|/tool_call|>",), ("<|/tool|>",))),
    AnswerFormat(
        "granite3",
        COMPACT_THINK,
        GRANITE3,
        text_open="<response>",
        text_close="</response>",
        detected_by=(("<|tool_call|>",),),
    ),
    AnswerFormat(
        "gigachat",
        None,
        GIGACHAT,
        ignored=("<|message_sep|>",),
        detected_by=(("<|function_call|>", "<|role_sep|>"),),
    ),
    AnswerFormat(
        "gigachat3",
        None,
        GIGACHAT3,
        text_close="<|message_sep|>\n\n",
        ignored=("<|message_sep|>",),
        detected_by=(("function call", "<|role_sep|>"),),
    ),
    AnswerFormat("internlm2", None, INTERNLM2, detected_by=(("<|action_start|><|plugin|>",),)),
    AnswerFormat("granite_20b", None, GRANITE_20B, detected_by=(("<function_call> ",),)),
    AnswerFormat(
        "apriel",
        APRIEL_THINK,
        APRIEL,
        text_close="\n[END FINAL RESPONSE]",
        detected_by=(("[BEGIN FINAL RESPONSE]", "<tool_calls>"),),
    ),
    AnswerFormat(
        "hunyuan",
        THINK,
        APRIEL,
        text_open="<answer>\n",
        text_close="\n</answer>",
        detected_by=(("<tool_calls>[{",),),
    ),
    AnswerFormat("minimax_m1", THINK, MINIMAX_M1, detected_by=(("<tool_calls>",),)),
    AnswerFormat("hermes", THINK, HERMES, detected_by=(("<tool_call>",),)),
    AnswerFormat("olmo3", THINK, OLMO3, detected_by=(("<function_calls>", "pythonic"),)),
    AnswerFormat("functionary3_2", None, FUNCTIONARY3_2, detected_by=((">>>all",),)),
    AnswerFormat("functools", None, FUNCTOOLS, detected_by=(("functools[",),)),
    AnswerFormat(
        "functionary",
        None,
        FUNCTIONARY,
        detected_by=(("<function=", "</function>"),),
        not_by=("<parameter=",),
    ),
    AnswerFormat("xlam", None, XLAM, detected_by=(("make calls in a single JSON array",),)),
    AnswerFormat("pythonic", None, PYTHONIC, detected_by=(("[func_name1(",),)),
    AnswerFormat(
        "llama4",
        None,
        LLAMA4,
        text_open="<|python_start|>",
        text_close="<|python_end|>",
        detected_by=(("<|header_start|>", '"parameters": '),),
    ),
    AnswerFormat(
        "llama3",
        None,
        LLAMA3,
        detected_by=(("<|start_header_id|>", '"parameters": '), ("<|python_tag|>",)),
    ),
    AnswerFormat("gemma3", None, GEMMA3, detected_by=(("```tool_code",),)),
    AnswerFormat("think", THINK, None, detected_by=(("<think>",), ("</think>",))),
)
