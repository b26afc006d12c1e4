"""Constraints on the text of a request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from interposer.errors import RequestError

Kind = Literal["JSON schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A formal language to which the texts of a request are restricted.

    Create a constraint with one of the class methods. The model checks the constraint when it
    compiles the constraint for a request.

    Attributes:
        kind: Kind of language.
        text: A JSON schema, a pattern, a JSON list of texts, or a grammar.
    """

    kind: Kind
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Constraint:
        """Allow JSON that matches a schema.

        Between two parts of the JSON there may be nothing, a space, or a newline with up to 24
        characters of indentation. The field ``"x-guidance": {"whitespace_flexible": false}`` of the
        schema allows nothing.

        Args:
            schema: An object, or its text. Unsupported keywords are refused later.
        Raises: RequestError: the schema is not a JSON object.
        """
        try:
            # Normalize the schema to text, so that equal constraints share a cache entry.
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(parsed, Mapping):
                raise RequestError(
                    f"schema is {schema!r:.200}, must be a JSON object. Try: {{'type': 'object'}}"
                )
            return cls("JSON schema", json.dumps(parsed, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"schema is {schema!r:.200}, which is no JSON: {error}") from None

    @classmethod
    def json_object(cls) -> Constraint:
        """Allow any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Allow texts that a regular expression matches from start to end.

        The syntax is that of Rust's crate regex, without look-around and back references.

        Raises: RequestError: the pattern is not a text, or is empty.
        """
        return cls("regex", _text("pattern", pattern, r"'[0-9]+'"))

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Constraint:
        """Allow exactly one of some texts.

        Raises: RequestError: there is no text, or a text is empty or has another type.
        """
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise RequestError(f"choice is {texts!r:.200}, must be a list. Try: ['yes', 'no']")
        checked_texts = [_text("choice", text, "['yes', 'no']") for text in texts]
        if not checked_texts:
            raise RequestError("choice is empty. Try: ['yes', 'no']")
        return cls("choice", json.dumps(checked_texts, ensure_ascii=False))

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """Allow texts of a context-free grammar.

        Args:
            text: Lark syntax with the rule ``start``, or GBNF with the rule ``root``. A text with
                ``::=`` is GBNF.
        Raises: RequestError: the grammar is not a text, or is empty.
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
