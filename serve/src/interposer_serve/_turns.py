"""Conversations in the form that all chat templates accept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from interposer_serve._attachments import joined_contents

_SYSTEM_ROLES = ("system", "developer")


def joined_turns(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield chat messages; consecutive messages of the user, or for the system, become one.

    Many chat templates refuse two messages of the user in a row, and write only one message of the
    system, at the start. A later message of the system becomes a part of the user's message, in the
    tags of Anthropic's clients: the position in the conversation can matter, and the prompt before
    it stays in the prefix cache.

    Args:
        messages: Messages whose contents are texts or lists of parts.
    """
    placed: list[dict[str, Any]] = []
    for message in messages:
        is_later = bool(placed) and placed[-1]["role"] not in _SYSTEM_ROLES
        if message["role"] in _SYSTEM_ROLES and is_later:
            reminder = ["<system-reminder>\n", message["content"], "\n</system-reminder>"]
            placed.append({"role": "user", "content": joined_contents(reminder, "")})
        else:
            placed.append(message)
    for kind, group in groupby(placed, _kind):
        if kind in ("system", "user"):
            joined = [*group]
            content = joined_contents((message["content"] for message in joined), "\n\n")
            yield {"role": joined[0]["role"], "content": content}
        else:
            yield from group


def _kind(message: dict[str, Any]) -> str:
    role: str = message["role"]
    return "system" if role in _SYSTEM_ROLES else role
