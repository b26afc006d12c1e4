"""Reading of request bodies, with limits on size, time, nesting and prompt length.

All of this is checked before a body is validated and its prompts are tokenized.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from itertools import chain
from math import isfinite
from typing import Any

from starlette.requests import ClientDisconnect, Request

from interposer_serve._errors import ApiError
from interposer_serve._forms import MEDIA_TYPE as FORM_TYPE
from interposer_serve._forms import parse_form
from interposer_serve._limits import Limits

_MAX_CONTAINERS = 50_000
_MAX_DEPTH = 128
_LARGE_CHARACTERS = 100_000
# Fields with a text, texts, token ids or lists of token ids.
_PROMPT_FIELDS = ("prompt", "input", "text_1", "text_2", "query", "documents")
# An escaped half of a surrogate pair: json.loads accepts it, but no tokenizer or encoder does.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class BodyReader:
    """Reads request bodies, with a limit on the memory of all bodies that are being read."""

    def __init__(self, limits: Limits, origins: Collection[str] = ()) -> None:
        """Create a reader.

        Args:
            origins: Origins whose web pages may use the server; "*" for all.
        """
        self._limits = limits
        self._origins = origins
        self._seconds = min(limits.body_seconds, limits.deadline_seconds)
        self._num_bytes = 0

    @asynccontextmanager
    async def reading(
        self, request: Request, media_type: str = "application/json"
    ) -> AsyncIterator[dict[str, Any]]:
        """Read the fields in the body of a request, which counts in a ``with`` block.

        Args:
            media_type: ``"application/json"`` for a JSON object, or that of a form.
        Raises: ApiError: the body is of another type, is malformed, is too large or arrives too
            slowly, the bodies of other requests leave no memory for it, or a web page of an origin
            that is not allowed has sent a form.
        """
        content_type = request.headers.get("content-type", "")
        sent_type = content_type.partition(";")[0].strip().lower()
        if sent_type != media_type:
            # Browsers send some other types from any web page without a CORS preflight.
            message = f"content-type is {sent_type!r:.100}; allowed is {media_type!r}"
            raise ApiError(415, message)
        is_form = media_type == FORM_TYPE
        max_bytes = self._limits.audio_bytes if is_form else self._limits.body_bytes
        if is_form:
            self._check_origin(request)
        chunks: list[bytes] = []
        try:
            await self._read_chunks(request, chunks, max_bytes)
            content = b"".join(chunks)
            yield parse_form(content, content_type) if is_form else parse_object(content)
        finally:
            self._num_bytes -= sum(map(len, chunks))

    def _check_origin(self, request: Request) -> None:
        """Refuse a form of a web page elsewhere, which browsers send without a CORS preflight."""
        origin = request.headers.get("origin")
        host = request.headers.get("host", "")
        if origin is None or not {origin, "*"}.isdisjoint(self._origins):
            return
        if origin.partition("://")[2] != host:
            message = f"origin is {origin!r:.100}, whose web pages may not use this server"
            raise ApiError(403, message, code="wrong_origin")

    async def _read_chunks(self, request: Request, chunks: list[bytes], max_bytes: int) -> None:
        num_bytes = 0
        try:
            async with asyncio.timeout(self._seconds):
                async for chunk in request.stream():
                    num_bytes += len(chunk)
                    self._num_bytes += len(chunk)
                    chunks.append(chunk)
                    self._check_sizes(request, num_bytes, max_bytes)
        except ClientDisconnect:
            raise ApiError(400, "The client disconnected before it had sent the body") from None
        except TimeoutError:
            raise ApiError(
                408,
                f"The body was incomplete after {self._seconds:g} s",
                code="body_too_slow",
                headers={"connection": "close"},
            ) from None

    def _check_sizes(self, request: Request, num_bytes: int, max_bytes: int) -> None:
        length = request.headers.get("content-length", "")
        # 19 digits exceed any limit, and int() of a very long text is slow.
        content_length = int(length[:19]) if length.isdecimal() else 0
        if max(num_bytes, content_length) > max_bytes:
            raise ApiError(
                413,
                f"The body has more than the allowed {max_bytes} bytes",
                code="body_too_large",
            )
        if self._num_bytes > self._limits.total_body_bytes:
            raise ApiError(
                503,
                "The bodies of other requests take all memory for bodies. Try: again later",
                code="bodies_full",
                headers={"retry-after": "1"},
            )


def parse_object(content: bytes) -> dict[str, Any]:
    """Parse a JSON object from the bytes of a request body.

    Raises: ApiError: the content is not a JSON object, is nested too deeply, or holds a text that
        is not valid Unicode.
    """
    try:
        body = _parse(content.decode())
        if _SURROGATE.search(content):
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        message = f"The body holds {half!r}, one half of a surrogate pair and not a character"
        raise ApiError(400, message) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"The body is a {type(body).__name__}; allowed is an object")
    _check_shape(body)
    return body


def parse_within_limits(text: str) -> Any:
    """Parse JSON text inside of a request body, within the limits on the body itself.

    Raises:
        ApiError: there are too many or too deeply nested objects and lists.
        ValueError: the text is not valid JSON.
        RecursionError: the text is nested too deeply for the parser.
    """
    value = _parse(text)
    _check_shape({"value": value})
    return value


def _parse(text: str) -> Any:
    """Parse JSON, with Python's garbage collector disabled for large texts.

    While a million small lists are created, the garbage collector scans all lists several times,
    which takes longer than their creation.
    """
    if len(text) < _LARGE_CHARACTERS or not gc.isenabled():
        return json.loads(text)
    gc.disable()
    try:
        return json.loads(text)
    finally:
        gc.enable()


def _check_shape(body: dict[str, Any]) -> None:
    """Refuse a request body with too many or too deeply nested objects and lists, or with NaN.

    Raises: ApiError: there are more than 50,000, or more than 128 levels, or a number is not finite
        as a float. A response could not repeat such a number, because JSON has no infinity.
    """
    level: list[Any] = [body]
    num_containers, depth = 1, 1
    while level:
        values = [*chain.from_iterable(v.values() if type(v) is dict else v for v in level)]
        # set(map(type, ...)) runs in C: skip the slow Python loop for a long list of numbers.
        types = set(map(type, values))
        if float in types and not all(map(isfinite, (v for v in values if type(v) is float))):
            raise ApiError(400, "The body holds NaN, or a number that is too large for a float")
        has_containers = not {dict, list}.isdisjoint(types)
        level = [v for v in values if type(v) in (dict, list)] if has_containers else []
        num_containers += len(level)
        depth += bool(level)
        if num_containers > _MAX_CONTAINERS:
            message = f"The body has more than {_MAX_CONTAINERS} objects and lists"
            raise ApiError(400, message, code="body_too_complex")
        if depth > _MAX_DEPTH:
            message = f"Objects and lists of the body nest more than {_MAX_DEPTH} levels deep"
            raise ApiError(400, message, code="body_too_complex")


class PromptSizes:
    """The largest prompts that a model accepts, in characters and tokens.

    Attributes:
        num_tokens: Tokens of one prompt.
        num_characters: Characters of one prompt: ``num_tokens`` times the length of the longest
            token. A longer text always has too many tokens. None if the vocabulary is unknown.
        num_prompts: Prompts of one request.
    """

    def __init__(self, num_tokens: int, num_prompts: int, vocabulary: Collection[str]) -> None:
        longest = max(map(len, vocabulary), default=0)
        self.num_tokens = num_tokens
        self.num_prompts = num_prompts
        self.num_characters = num_tokens * longest or None  # 0 would refuse every text

    def check(self, body: dict[str, Any]) -> None:
        """Check the sizes of the prompts in a request body before the body is validated.

        Raises: ApiError: there are too many prompts, tokens or characters.
        """
        for name in _PROMPT_FIELDS:
            value = body.get(name)
            if isinstance(value, str):
                self._check_text(name, value)
            elif isinstance(value, list):
                self._check_list(name, value)
        tokens = body.get("tokens")
        if isinstance(tokens, list):
            self._check_tokens("tokens", tokens)
        for name in ("messages", "system", "instructions", "tools"):
            value = body.get(name)
            if value is not None and self.num_characters is not None:
                self._check_characters(name, _num_characters([value]))

    def _check_list(self, name: str, value: list[Any]) -> None:
        if value and isinstance(value[0], int | float):
            self._check_tokens(name, value)
            return
        if value and isinstance(value[0], dict) and name == "input":  # items of a conversation
            self._check_characters(name, _num_characters(value))
            return
        if len(value) > self.num_prompts:
            raise ApiError(
                400,
                f"{name} has {len(value)} items; allowed are {self.num_prompts} in one request",
                param=name,
                code="too_many_items",
            )
        for prompt in value:
            if isinstance(prompt, str):
                self._check_text(name, prompt)
            elif isinstance(prompt, list):
                self._check_tokens(name, prompt)
            elif isinstance(prompt, dict) and self.num_characters is not None:
                self._check_characters(name, _num_characters([prompt]))

    def _check_tokens(self, name: str, value: list[Any]) -> None:
        # Leave slightly long prompts to a later check, whose message has more detail.
        if len(value) > 2 * self.num_tokens:
            raise ApiError(
                400,
                f"{name} has {len(value)} tokens; allowed are {self.num_tokens}",
                param=name,
                code="context_length_exceeded",
            )

    def _check_text(self, name: str, text: str) -> None:
        self._check_characters(name, len(text))

    def _check_characters(self, name: str, count: int) -> None:
        if self.num_characters is not None and count > self.num_characters:
            raise ApiError(
                400,
                f"{name} has {count} characters; the allowed {self.num_tokens} tokens have at most "
                f"{self.num_characters} characters",
                param=name,
                code="context_length_exceeded",
            )


def _num_characters(value: list[Any]) -> int:
    """Return the number of characters of all texts in a JSON value, except field names."""
    count = 0
    level: list[Any] = [value]
    while level:
        values = [*chain.from_iterable(v.values() if type(v) is dict else v for v in level)]
        # set(map(type, ...)) runs in C: skip the slow Python loops for a long list of numbers.
        types = set(map(type, values))
        if str in types:
            count += sum(len(v) for v in values if type(v) is str)
        has_containers = not types.isdisjoint((dict, list))
        level = [v for v in values if type(v) in (dict, list)] if has_containers else []
    return count
