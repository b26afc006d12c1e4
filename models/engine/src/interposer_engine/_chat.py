"""Chat templates, which render messages in the prompt format a model was trained with.

A template is a program of the model's publisher. transformers renders templates in a sandbox. A
response template is the reverse: it defines how an answer is parsed, and in simple cases also how a
tool call must be written, so that a constraint can enforce a call.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from interposer.errors import RequestError
from interposer_engine._answer_reader import (
    AnswerReader,
    FormatReader,
    PlainReader,
    TemplateReader,
)
from interposer_engine._answers.detection import (
    detect,
    format_by_name,
    is_in_reasoning,
    parser_for,
)
from interposer_engine._answers.formats import AnswerFormat
from interposer_engine._answers.grammar import call_grammar
from interposer_engine._content_parts import read_part
from interposer_engine._media import Media
from interposer_engine._sampling_params import Constraint

Message = Mapping[str, Any]
"""``role``, ``content`` and further fields that the template reads, such as ``tool_calls``.

The content is a text, or a list of text parts and ``Media``.
"""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TAIL_TOKENS = 32  # holds the longest marker that opens reasoning
_EXAMPLE = "Try: [{'role': 'user', 'content': 'Hello'}]"
_NAME = re.compile(r"\(\?P<name>(?:[^()\\]|\\.)*\)")
# Conversations in which a role has its usual place.
_CONVERSATIONS = {
    "user": ("user",),
    "system": ("system", "user"),
    "assistant": ("user", "assistant", "user"),
}
_PROBE = "interposer-probe"
_TAG = re.compile(r"{[%{](.*?)[%}]}", re.DOTALL)
_SPACE = re.compile(r"\\s[*+?]|\\n[*?]")
_WHITE_SPACE = r"(?: |\n[ \t]{0,24})"


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt of a conversation before its media are encoded.

    Attributes:
        token_ids: Token ids, with one placeholder token for each medium.
        media: Pictures and sounds of all messages, in order.
    """

    token_ids: list[int]
    media: list[Media]


class ChatRenderer:
    """Renders messages as a prompt, and parses answers as messages.

    Args:
        tokenizer: Tokenizer of transformers, which holds the template.
        path: Path of the model, for error texts.
    """

    def __init__(self, tokenizer: Any, path: Path) -> None:
        self._tokenizer = tokenizer
        self._path = path
        self._roles_with_lists: dict[str, frozenset[str]] = {}

    def token_ids(
        self,
        messages: Iterable[Message],
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
        template: str | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        """Return the token ids of the prompt for the next message of the assistant.

        Raises: RequestError: as ``render``; or a message has a picture or a sound.
        """
        return self.render(messages, tools, template, options).token_ids

    def render(
        self,
        messages: Iterable[Message],
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
        template: str | None,
        options: Mapping[str, Any],
        kinds: Collection[str] = (),
    ) -> RenderedChat:
        """Return the prompt for the next message of the assistant.

        Texts of control tokens inside messages are tokenized as normal text, so that no message can
        end itself and begin another one, or add the placeholder of a medium; transformers does so
        from 5.23 on.

        Args:
            kinds: Kinds of media that the model takes.
        Raises: RequestError: a message is malformed; there is no template; the template refuses the
            messages; or the template does not name an unusual role.
        """
        read_template = self._template_text(template)
        plain = plain_messages(messages, read_template, kinds)
        if template is None and not self._tokenizer.chat_template:
            raise RequestError(
                f"{self._path} holds no chat template, so messages cannot be written as the "
                "prompt that it was trained with. Try: generate() with a text, or template=..."
            )
        render = self._tokenizer.apply_chat_template
        # Options become keyword arguments, so they must not shadow parameters of transformers.
        parameters = inspect.signature(render).parameters.keys() - {"documents", "self"}
        if reserved := sorted(parameters & options.keys()):
            # One of these settings would let messages end themselves.
            raise RequestError(
                f"{reserved[0]!r} is a setting of transformers and no variable of a chat template. "
                "Try: leave it out"
            )
        sanitizing = (
            {"sanitize_control_tokens": True} if "sanitize_control_tokens" in parameters else {}
        )
        with_lists = self._list_roles(template)
        try:
            prompt_ids = render(
                [_with_parts(message, with_lists) for message in plain],
                tools=None if tools is None else list(tools),
                chat_template=template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **sanitizing,
                **options,
            )
        except Exception as error:  # templates can raise any error, and call functions in options
            raise RequestError(
                f"The chat template of {self._path} refuses these messages: "
                f"{type(error).__name__}: {error}"
            ) from error
        check_roles(plain, read_template)
        # A template that ignores tools renders the same prompt without tools.
        without_tools = self.render(plain, None, template, options, kinds) if tools else None
        if without_tools is not None and list(prompt_ids) == without_tools.token_ids:
            raise RequestError(
                f"The chat template of {self._path} does not write tools, so the model would "
                "not know of them. Try: leave tools out, or template=... that writes them"
            )
        return RenderedChat(list(prompt_ids), [*media_of(plain)])

    def plain(
        self, messages: Iterable[Message], kinds: Collection[str] = ()
    ) -> list[dict[str, Any]]:
        """Return messages as ``plain_messages`` does, for the checkpoint's template.

        Raises: RequestError: a message is malformed.
        """
        return plain_messages(messages, self._template_text(None), kinds)

    def _list_roles(self, template: str | None) -> frozenset[str]:
        """Return the roles of which the template ignores or refuses contents that are texts.

        Templates of some vision models write only the parts of a list.
        """
        key = self._template_text(template)
        if key not in self._roles_with_lists:
            found: frozenset[str] = frozenset()
            for role in _CONVERSATIONS:
                if not self._writes(role, template, found) and self._writes(
                    role, template, found | {role}
                ):
                    found |= {role}
            self._roles_with_lists[key] = found | ({"tool"} if "user" in found else set())
        return self._roles_with_lists[key]

    def _writes(self, role: str, template: str | None, with_lists: frozenset[str]) -> bool:
        """Return whether the template writes the text of a message."""
        messages = [
            {"role": name, "content": _PROBE if name == role else "Hello"}
            for name in _CONVERSATIONS[role]
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                [_with_parts(message, with_lists) for message in messages],
                chat_template=template,
                tokenize=False,
            )
        except Exception:  # noqa: BLE001 - templates can raise any error
            return False
        return _PROBE in text

    def reasoning_options(self, effort: str) -> dict[str, Any]:
        """Return the variables of the chat template that set how much the model reasons.

        Args:
            effort: "none" for no reasoning, or a word such as "low" or "high".
        Raises: RequestError: the template has no such variable.
        """
        if self._reads("reasoning_effort"):
            return {"reasoning_effort": effort}
        switches = [name for name in ("enable_thinking", "thinking") if self._reads(name)]
        if switches or effort == "none":
            return dict.fromkeys(switches, effort != "none")
        raise RequestError(
            f"reasoning_effort is {effort!r:.100}, but the chat template of {self._path} has no "
            "variable for reasoning. Try: leave reasoning_effort out"
        )

    def _reads(self, variable: str) -> bool:
        """Return whether the chat template of the checkpoint reads a variable."""
        tags = " ".join(_TAG.findall(self._template_text(None)))
        # Not a text or an attribute of the same name.
        return re.search(rf"(?<![\w.'\"]){variable}(?![\w'\"])", tags) is not None

    def _template_text(self, template: str | None) -> str:
        """Return ``template``, or all templates of the checkpoint joined to one text."""
        templates = self._tokenizer.chat_template if template is None else template
        return "\n".join(templates.values()) if isinstance(templates, Mapping) else templates or ""

    def reader(
        self,
        prompt: Sequence[int],
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
    ) -> AnswerReader:
        """Create a reader of the answer to a prompt.

        Args:
            prompt: Tokens of the prompt.
            tools: Tools of the prompt; their schemas give the types of call arguments. Without
                tools, calls stay text.
        """
        if (form := self.answer_format) is not None:
            # Slow to import, and only needed here.
            from transformers.utils.chat_template_utils import get_json_schema

            schemas = [
                tool if isinstance(tool, Mapping) else get_json_schema(tool) for tool in tools or ()
            ]
            answer_format = form if tools else replace(form, calls=None)
            return FormatReader(
                parser_for(answer_format, self._tokenizer, self._tail(prompt), schemas)
            )
        if getattr(self._tokenizer, "response_template", None) is not None and tools:
            return TemplateReader(lambda token_ids: self.parsed(token_ids, prompt, tools))
        return PlainReader()

    @cached_property
    def answer_format(self) -> AnswerFormat | None:
        """Format in which the model writes reasoning and tool calls; None if it is not known.

        It follows from the chat template, see ``use_formats``.
        """
        return detect(self._template_text(None))

    def use_formats(
        self,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
        *,
        response_template: bool = False,
    ) -> None:
        """Choose the formats of tool calls and reasoning, instead of those of the chat template.

        Args:
            tool_format: Name of a format, or "none"; None for that of the chat template.
            reasoning_format: Name of a format, or "none"; None for that of the chat template.
            response_template: Whether to read answers by the checkpoint's response template, which
                needs complete answers.
        Raises:
            UnknownNameError: there is no format of that name.
            RequestError: the checkpoint has no response template, or a format is named as well.
        """
        if not response_template:
            if tool_format is not None or reasoning_format is not None:
                detected = self.answer_format
                self.answer_format = format_by_name(tool_format, reasoning_format, detected)
            return
        if tool_format is not None or reasoning_format is not None:
            raise RequestError("A response template and a format are both chosen. Try: one of them")
        if getattr(self._tokenizer, "response_template", None) is None:
            raise RequestError(
                f"{self._path} has no response template. Try: a tool format or a reasoning format"
            )
        self.answer_format = None

    def _tail(self, prompt: Sequence[int]) -> str:
        """Return the text of the end of a prompt, with special tokens."""
        last_tokens = list(prompt[-_TAIL_TOKENS:])
        return str(self._tokenizer.decode(last_tokens, skip_special_tokens=False))

    def parsed(
        self,
        token_ids: Sequence[int],
        prompt: Sequence[int],
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
    ) -> dict[str, Any]:
        """Parse an answer as a message, with the response template of the checkpoint.

        Args:
            token_ids: Tokens of the answer, including an end token.
            prompt: Tokens of the prompt.
            tools: Tools of the prompt; the schemas give the types of call arguments.
        Returns: ``content`` and other parts that the template distinguishes, such as
            ``tool_calls``.
        Raises: RequestError: the answer does not match the template.
        """
        try:
            message = self._tokenizer.parse_response(
                list(token_ids), prefix=list(prompt), tools=None if tools is None else list(tools)
            )
        except Exception as error:  # the template is untrusted data of the model's publisher
            raise RequestError(
                f"The response template of {self._path} does not read the answer: "
                f"{type(error).__name__}: {error}"
            ) from error
        return dict(message)

    def call_constraint(
        self, tools: Sequence[Mapping[str, Any]], prompt: Sequence[int]
    ) -> Constraint:
        """Return the constraint that allows exactly one call of one of ``tools``.

        Args:
            prompt: Tokens of the prompt, which may end within reasoning.
        Raises: RequestError: it is not known how the model writes calls.
        """
        added_tokens = self._tokenizer.added_tokens_decoder
        special_ids = {
            token.content: index
            for index, token in added_tokens.items()
            # llguidance takes other added tokens of this form for special ones, too.
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        if (form := self.answer_format) is not None:
            in_reasoning = is_in_reasoning(form, self._tail(prompt))
            return call_grammar(form, tools, special_ids, in_reasoning=in_reasoning)
        template = getattr(self._tokenizer, "response_template", None)
        return call_constraint(template, tools, special_ids)


def plain_messages(
    messages: Iterable[Message], template: str, kinds: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Convert messages to dicts whose contents are texts, or lists of text parts and ``Media``.

    Text parts of a content without media are joined. The role ``developer``, OpenAI's newer name,
    becomes ``system`` if ``template`` does not name ``developer``.

    Args:
        kinds: Kinds of media that the model takes.
    Raises: RequestError: there are no messages, a message has no role, or a content is neither text
        nor media of these kinds.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(
            f"messages is of the type {type(messages).__name__}, must be a list of messages. "
            f"{_EXAMPLE}"
        )
    plain = [_plain(index, message, kinds) for index, message in enumerate(messages)]
    if not plain:
        raise RequestError(f"messages is empty. {_EXAMPLE}")
    for message in plain:
        if message["role"] == "developer" and "developer" not in template:
            message["role"] = "system"
    return plain


def check_roles(messages: Iterable[Message], template: str) -> None:
    """Raise RequestError if a role is neither common nor named by the template.

    Many templates would copy an unknown role into the prompt.
    """
    for index, message in enumerate(messages):
        role = message["role"]
        # A template names a role as a quoted text.
        if role not in _ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise RequestError(
                f"messages[{index}].role is {role!r:.100}, which the chat template does not name. "
                f"Try: {', '.join(_ROLES[:-1])} or {_ROLES[-1]}"
            )


def media_of(plain: Iterable[Message]) -> Iterator[Media]:
    """Yield the media of messages that ``plain_messages`` returned."""
    for message in plain:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, Media))


def _plain(index: int, message: Any, kinds: Collection[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"Message {index} is {message!r:.200}, must have a 'role', which is a text. "
            "Try: {'role': 'user', 'content': 'Hello'}"
        )
    content = message.get("content")
    place = f"messages[{index}].content"
    if isinstance(content, list | tuple):
        parts = [read_part(f"{place}[{at}]", part, kinds) for at, part in enumerate(content)]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return {**message, "content": "".join(texts)}
        plain_parts = [
            {"type": "text", "text": part} if isinstance(part, str) else part for part in parts
        ]
        return {**message, "content": plain_parts}
    if not (content is None or isinstance(content, str)):
        raise RequestError(
            f"{place} is {content!r:.100} of the type {type(content).__name__}; "
            "allowed is a text or a list of text parts. Try: json.dumps(content)"
        )
    return dict(message)


def _with_parts(message: Mapping[str, Any], with_lists: Collection[str]) -> dict[str, Any]:
    """Return a message as the template reads it: media have no content, only their kind.

    Args:
        with_lists: Roles whose contents are always lists of parts.
    """
    content = message.get("content")
    if isinstance(content, list):
        parts = [{"type": part.kind} if isinstance(part, Media) else part for part in content]
        return {**message, "content": parts}
    if message["role"] in with_lists and isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}] if content else []}
    return dict(message)


def call_constraint(
    template: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
    specials: Mapping[str, int],
) -> Constraint:
    """Return the constraint that allows exactly one call of one of ``tools``.

    Args:
        template: Response template of the checkpoint; None without one.
        tools: Tools as chat templates read them, with JSON schemas.
        specials: Ids of control tokens by text, because a grammar must name such tokens by id.
    Raises: RequestError: the template does not define how calls are written, or uses unsupported
        features.
    """
    if template is None:
        raise _unsupported("it has no response template")
    field = template.get("fields", {}).get("tool_calls")
    if not isinstance(field, Mapping):
        raise _unsupported("its response template reads no calls")
    if field.get("content", "text") != "json" or field.get("content_args"):
        raise _unsupported("its calls are not plain JSON")
    calls = [_call(field, tool, specials) for tool in tools]
    return Constraint.grammar("start: " + "\n     | ".join(calls) + "\n")


def _call(field: Mapping[str, Any], tool: Mapping[str, Any], specials: Mapping[str, int]) -> str:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"The tool {tool!r:.200} has no name. Try: {{'name': 'look', ...}}")
    schema = {**(function.get("parameters") or {}), "x-guidance": _guidance()}
    schema.setdefault("type", "object")
    try:
        arguments = f"%json {json.dumps(schema, allow_nan=False)}"
    except (TypeError, ValueError) as error:
        raise RequestError(f"The parameters of {name!r} are no JSON schema: {error}") from None
    opening = _literal(field, "open", name)
    shape = field.get("transform", "{content}")
    if isinstance(shape, Mapping) and shape.get("type") == "function":
        shape = shape.get("function")
    if shape == {"name": "{name}", "arguments": "{content}"}:
        parts = [*_terms(opening, specials), arguments]
    elif shape == "{content}":
        prefix = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        parts = [
            *_terms(opening, specials),
            r'"\n"?',
            *_terms(prefix, {}),
            arguments,
            '"}"',
            r'"\n"?',
        ]
    else:
        raise _unsupported(f"its calls become {field.get('transform')!r:.200}")
    return " ".join([*parts, *_terms(_literal(field, "close", name), specials)])


def _guidance() -> dict[str, str]:
    return {"whitespace_pattern": _WHITE_SPACE}


def _literal(field: Mapping[str, Any], side: str, name: str) -> str:
    """Return the text that opens or closes a call of the function ``name`` in an answer."""
    literal = field.get(side)
    if literal is not None:
        return str(literal if isinstance(literal, str) else literal[0])
    pattern = str(field.get(f"{side}_pattern", ""))
    # Derive a candidate text from the pattern, and let the pattern confirm it below.
    candidate = re.sub(r"\\(.)", r"\1", _NAME.sub(lambda _: name, _SPACE.sub("", pattern)))
    for text in (candidate, ""):
        try:
            match = re.fullmatch(pattern, text, re.DOTALL)
        except re.error:
            break
        if match is not None and match.groupdict() in ({}, {"name": name}):
            return text
    raise _unsupported(f"calls {side} with the pattern {pattern!r:.200}")


def _terms(text: str, specials: Mapping[str, int]) -> Iterator[str]:
    """Yield grammar terms that match a text: literals, and control tokens by id."""
    if not text:
        return
    pattern = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
    for part in re.split(f"({pattern})", text) if pattern else [text]:
        if part in specials:
            yield f"<[{specials[part]}]>"
        elif part:
            yield json.dumps(part)


def _unsupported(reason: str) -> RequestError:
    return RequestError(
        "A call cannot be required of this model, because the format of its calls is unknown: "
        f"{reason}. Try: tool_choice 'auto'"
    )
