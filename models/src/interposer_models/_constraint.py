"""The form that the text of a request is to have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from interposer.errors import RequestError

Kind = Literal["JSON schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A language whose texts alone a request may produce; its class methods make one.

    Whether the text of a constraint is well formed is found out where a model compiles it.

    Attributes:
        kind: of language.
        text: a JSON schema, a pattern, a JSON list of texts or a grammar.
    """

    kind: Kind
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Constraint:
        """Return the constraint to JSON that a schema describes.

        Between two parts of the JSON is nothing, a space, or a new line with up to 24 characters
        of indentation. The schema's own ``"x-guidance": {"whitespace_flexible": false}`` leaves
        nothing.

        Args:
            schema: an object, or its text; keywords that cannot be held are refused later.
        Raises: RequestError: it is no JSON object.
        """
        try:
            read = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(read, Mapping):
                raise RequestError(
                    f"schema is {schema!r:.200}, must be a JSON object. Try: {{'type': 'object'}}"
                )
            return cls("JSON schema", json.dumps(read, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"schema is {schema!r:.200}, which is no JSON: {error}") from None

    @classmethod
    def json_object(cls) -> Constraint:
        """Return the constraint to any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Return the constraint to texts that a regular expression matches from end to end.

        Its syntax is that of Rust's crate regex, without look-around and back references.

        Raises: RequestError: it is no text, or an empty one.
        """
        return cls("regex", _text("pattern", pattern, r"'[0-9]+'"))

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Constraint:
        """Return the constraint to one of some texts.

        Raises: RequestError: there are none, or one is no text or an empty one.
        """
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise RequestError(f"choice is {texts!r:.200}, must be a list. Try: ['yes', 'no']")
        listed = [_text("choice", text, "['yes', 'no']") for text in texts]
        if not listed:
            raise RequestError("choice is empty. Try: ['yes', 'no']")
        return cls("choice", json.dumps(listed, ensure_ascii=False))

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """Return the constraint to a context-free grammar.

        Args:
            text: in Lark's syntax with the rule ``start``, or in GBNF with ``root``; the latter has
                ``::=``.
        Raises: RequestError: it is no text, or an empty one.
        """
        return cls("grammar", _text("grammar", text, """'start: "yes" | "no"'"""))


def _text(name: str, text: object, example: str) -> str:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name} holds {text!r:.200}, must be a text. Try: {example}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} has {text[error.start]!r} at {error.start}, which is no character"
        ) from None
    return text
