"""Responses that clients can continue or read again, bounded in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from interposer_serve._errors import ApiError
from interposer_serve._format import to_json


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A complete response with what a later request needs to continue from it.

    Attributes:
        response: The response as the client got it.
        input_items: Input items of the request.
        messages: Chat messages of the conversation, up to the answer.
    """

    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    messages: list[dict[str, Any]]


class StoredResponses:
    """The newest responses of all clients; each client sees its own only.

    The oldest responses are dropped beyond the bound. Methods may be called from any thread.
    """

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._num_characters = 0
        self._responses: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, client: str, stored: StoredResponse) -> None:
        """Store a response of a client, and drop the oldest responses beyond the bound."""
        num_characters = len(to_json([stored.response, stored.input_items, stored.messages]))
        with self._lock:
            self._responses[client, stored.response["id"]] = stored, num_characters
            self._num_characters += num_characters
            while self._num_characters > self._max_characters:
                _, (_, num_characters) = self._responses.popitem(last=False)
                self._num_characters -= num_characters

    def get(self, client: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response of a client.

        Args:
            param: Request field that names the response, for the error.
        Raises: ApiError: the client has no such response.
        """
        with self._lock:
            stored = self._responses.get((client, response_id))
        if stored is None:
            raise ApiError(
                404,
                f"There is no stored response {response_id!r:.100}: it was never stored, or the "
                "server has restarted or dropped it for newer ones. Try: the whole conversation "
                "as input",
                param=param,
                code="response_not_found",
            )
        return stored[0]

    def remove(self, client: str, response_id: str) -> None:
        """Remove a response of a client.

        Raises: ApiError: the client has no such response.
        """
        self.get(client, response_id)
        with self._lock:
            if (stored := self._responses.pop((client, response_id), None)) is not None:
                self._num_characters -= stored[1]
