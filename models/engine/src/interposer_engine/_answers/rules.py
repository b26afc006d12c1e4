"""Terms and rules of grammars in the Lark syntax of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from interposer.errors import RequestError
from interposer_engine._answers.literals import PYTHON, Notation
from interposer_engine._answers.tools import referenced

# If any white space were allowed, a weak model could write white space without end.
_WHITE_SPACE = r"(?: |\n[ \t]{0,24})"
_SPECIAL_IN_REGEX = re.compile(r"[.^$*+?()\[\]{}|\\/]")
_PYTHON_STRING = r"""/'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"/"""


def joined(*terms: str) -> str:
    """Return terms in a row, without empty ones."""
    return " ".join(term for term in terms if term)


class Grammar:
    """Rules of a grammar, and terms to be used in rules."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        names = sorted(filter(None, special_ids), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)")
        self._rules: dict[str, str] = {}  # names by body
        self._named_rules: dict[str, str] = {}  # bodies by name
        # Names by kind and id of the schema, with the schema, so that no other one gets its id.
        self._schema_rules: dict[tuple[Hashable, int], tuple[str, Any]] = {}

    def text(self, start: str) -> str:
        """Return the whole grammar."""
        rules = "".join(f"{name}: {body}\n" for body, name in self._rules.items())
        rules += "".join(f"{name}: {body}\n" for name, body in self._named_rules.items())
        return f"start: {start}\n{rules}"

    def rule(self, body: str, attribute: str = "") -> str:
        """Return the name of a rule, which is added unless an equal one is there."""
        if body not in self._rules:
            self._rules[body] = f"r{len(self._rules)}{attribute}"
        return self._rules[body].removesuffix(attribute)

    def define(self, name: str, body: str) -> None:
        """Add a rule with a given name. The body may use the name."""
        self._named_rules[name] = body

    def reserve(self, name: str) -> bool:
        """Return whether a rule of that name is still to be defined, and reserve the name."""
        if name in self._named_rules:
            return False
        self._named_rules[name] = ""
        return True

    def schema_rule(self, kind: Hashable, schema: Any, body: Callable[[], str]) -> str:
        """Return the name of the rule of a schema, which may contain itself.

        Args:
            kind: Kind of the rule; a schema can have a rule of each kind.
            schema: The schema.
            body: Returns the body of the rule. Not called if the rule is there.
        """
        key = (kind, id(schema))
        if key not in self._schema_rules:
            name = f"s{len(self._schema_rules)}"
            self._schema_rules[key] = (name, schema)
            self.define(name, body())
        return self._schema_rules[key][0]

    def literal(self, text: str) -> str:
        """Return the terms that match a text, with special tokens by id."""
        return " ".join(self._terms(text))

    def _terms(self, text: str) -> Iterator[str]:
        for part in self._special.split(text):
            if part in self._special_ids:
                yield f"<[{self._special_ids[part]}]>"
            elif part:
                yield json.dumps(part)

    def json(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """Return the term of a JSON value of ``schema``; ``root`` holds referenced definitions."""
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        guided = {**definitions, **schema, "x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
        try:
            return f"%json {json.dumps(guided, allow_nan=False)}"
        except (TypeError, ValueError) as error:
            raise RequestError(f"A tool's parameters are no JSON schema: {error}") from None

    def text_until(self, end: str) -> str:
        """Return the terms of any text up to and including the marker ``end``."""
        marker = end.rstrip()
        space = end[len(marker) :]
        parts = [part for part in self._special.split(marker) if part]
        at = next((i for i, part in enumerate(parts) if part in self._special_ids), None)
        if at is None:
            body = self.rule(rf"/(?s:.*){in_regex(marker)}/", "[lazy]")
            return f"{body} {json.dumps(space)}" if space else body
        # Only tokens of text match a pattern, so the special token ends it.
        before = "".join(parts[:at])
        text = rf"/(?s:.*){in_regex(before)}/"
        return f"{text} {self.literal(''.join(parts[at:]) + space)}"

    def sequence(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the term of items in order, with separators; items may be optional.

        Args:
            items: Term of each item, and whether it must appear.
            separator: Term between two items; "" for none.
        """
        terms = [(self.rule(term), is_required) for term, is_required in items]
        if not separator:
            return joined(*(name if required else f"{name}?" for name, required in terms))
        # Items from some index on, if an item precedes them, and if none does.
        following = first = ""
        for name, is_required in reversed(terms):
            with_separator = joined(separator, name, following)
            alone = joined(name, following)
            if is_required:
                following, first = self.rule(with_separator), self.rule(alone)
            else:
                options = (
                    f"({with_separator} | {following})" if following else f"({with_separator})?"
                )
                following = self.rule(options)
                first = self.rule(f"({alone} | {first})" if first else f"({alone})?")
        return first


class NotationGrammar:
    """Terms of values in a notation other than JSON.

    Args:
        grammar: Grammar to which rules are added.
        notation: Notation of the values.
        root: Schema that resolves references.
    """

    def __init__(self, grammar: Grammar, notation: Notation, root: Mapping[str, Any]) -> None:
        self._grammar = grammar
        self._notation = notation
        self._root = root
        self._comma = json.dumps("," if notation.has_bare_keys else ", ")

    def value(self, schema: Any) -> str:
        """Return the term of a value of ``schema``."""
        schema = referenced(schema, self._root)
        if not isinstance(schema, Mapping):
            return self._free_value()
        if any(key in schema for key in ("anyOf", "oneOf", "items", "properties")):
            # Such a schema may refer to itself.
            return self._grammar.schema_rule(self._notation, schema, lambda: self._value(schema))
        return self._value(schema)

    def _value(self, schema: Mapping[str, Any]) -> str:
        if (choices := choices_of(schema)) is not None:
            return self._either(
                self._grammar.literal(self._notation.write(choice)) for choice in choices
            )
        for key in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(key), list):
                return self._either(map(self.value, options))
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._either(self._value({**schema, "type": option}) for option in kind)
        if kind in ("integer", "number"):
            return self._grammar.json(schema, self._root)
        if kind == "array":
            item = self._grammar.rule(self.value(schema.get("items")))
            return f'"[" ({item} ({self._comma} {item})*)? "]"'
        if kind == "object" and isinstance(schema.get("properties"), Mapping):
            items = [
                (f"{self._grammar.literal(self._key(key))} {self.value(item)}", required)
                for key, item, required in properties_of(schema)
            ]
            return joined('"{"', self._grammar.sequence(items, self._comma), '"}"')
        return self._of_type(kind)

    def _of_type(self, kind: Any) -> str:
        """Return the term of any value of a type."""
        if kind == "string":
            return self._string()
        if kind == "boolean":
            return self._either(map(json.dumps, self._notation.words[:2]))
        if kind == "null":
            return json.dumps(self._notation.words[2])
        if kind == "object":
            return self._free_object()
        return self._free_value()

    def _either(self, terms: Iterable[str]) -> str:
        return f"({' | '.join(terms)})"

    def _string(self) -> str:
        if self._notation is PYTHON:
            return _PYTHON_STRING
        (quote,) = self._notation.quotes
        return joined(self._grammar.literal(quote), self._grammar.text_until(quote))

    def _key(self, key: str) -> str:
        return f"{key}:" if self._notation.has_bare_keys else f"{self._notation.write(key)}: "

    def _free_value(self) -> str:
        """Return the name of a rule of any value."""
        name = f"any_{'bare' if self._notation.has_bare_keys else 'python'}"
        if self._grammar.reserve(name):
            number = self._grammar.json({"type": "number"}, {})
            words = map(json.dumps, self._notation.words)
            array = f'"[" ({name} ({self._comma} {name})*)? "]"'
            options = [self._string(), number, *words, array, self._free_object()]
            self._grammar.define(name, self._either(options))
        return name

    def _free_object(self) -> str:
        any_value = self._free_value()
        key = '/[A-Za-z_][A-Za-z0-9_]*/ ":"'
        if not self._notation.has_bare_keys:
            key = f'{self._string()} ": "'
        item = f"{key} {any_value}"
        return f'"{{" ({item} ({self._comma} {item})*)? "}}"'


def properties_of(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return key, schema and necessity of each property of a JSON schema.

    Raises: RequestError: a required property has no schema.
    """
    required, properties = schema.get("required"), schema.get("properties")
    required = required if isinstance(required, list) else []
    properties = properties if isinstance(properties, Mapping) else {}
    for key in required:
        if key not in properties:
            raise RequestError(
                f"The required parameter {key!r:.100} has no schema, so it cannot be enforced. "
                "Try: add it to 'properties'"
            )
    return [(key, item, key in required) for key, item in properties.items()]


def choices_of(schema: Any) -> list[Any] | None:
    """Return the values of a schema's ``enum`` or ``const``; None without these keywords."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) and values else None


def in_regex(text: str) -> str:
    """Return ``text`` as a pattern of Lark."""
    return _SPECIAL_IN_REGEX.sub(r"\\\g<0>", text).replace("\n", "\\n")
