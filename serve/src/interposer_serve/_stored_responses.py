"""Responses that clients can continue or read again, bounded in memory."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from interposer_serve._attachments import original_part
from interposer_serve._errors import ApiError, ascii_json


class StoredResponses:
    """The newest responses of all clients; each client sees its own only.

    Responses are kept as JSON, whose size is known. Methods may be called from any thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._contents: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def add(
        self,
        client: str,
        response: Mapping[str, Any],
        input_items: Sequence[Mapping[str, Any]],
        messages: Sequence[Mapping[str, Any]],
    ) -> None:
        """Store a response of a client, and drop the oldest responses beyond the bound.

        Args:
            response: The response as the client got it.
            input_items: Input items of the request.
            messages: Chat messages of the conversation, up to the answer.
        """
        content = ascii_json(
            {"response": response, "input_items": input_items, "messages": messages},
            default=original_part,
        )
        with self._lock:
            self._contents[client, response["id"]] = content
            self._num_bytes += len(content)
            while self._num_bytes > self._max_bytes:
                _, oldest = self._contents.popitem(last=False)
                self._num_bytes -= len(oldest)

    def get(self, client: str, response_id: str, param: str | None = None) -> dict[str, Any]:
        """Return a copy of the arguments of ``add`` for a response of a client.

        Args:
            param: Request field that names the response, for the error.
        Raises: ApiError: the client has no such response.
        """
        with self._lock:
            content = self._contents.get((client, response_id))
        if content is None:
            raise ApiError(
                404,
                f"There is no stored response {response_id!r:.100}: it was never stored, or the "
                "server has restarted or dropped it for newer ones. Try: the whole conversation "
                "as input",
                param=param,
                code="response_not_found",
            )
        stored: dict[str, Any] = json.loads(content)
        return stored

    def remove(self, client: str, response_id: str) -> None:
        """Remove a response of a client.

        Raises: ApiError: the client has no such response.
        """
        self.get(client, response_id)
        with self._lock:
            if (content := self._contents.pop((client, response_id), None)) is not None:
                self._num_bytes -= len(content)


class StoredResponseEndpoints:
    """The endpoints with which clients read and delete their stored responses."""

    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored

    @property
    def routes(self) -> list[Route]:
        """The HTTP routes of the endpoints."""
        return [
            Route("/v1/responses/{id}", self.stored_response),
            Route("/v1/responses/{id}", self.delete_response, methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", self.input_items),
        ]

    async def stored_response(self, request: Request) -> Response:
        """Return a stored response: ``/v1/responses/{id}``."""
        stored = self._stored.get(request.state.client, request.path_params["id"])
        return JSONResponse(stored["response"])

    async def delete_response(self, request: Request) -> Response:
        """Delete a stored response: ``/v1/responses/{id}``."""
        response_id = request.path_params["id"]
        self._stored.remove(request.state.client, response_id)
        return JSONResponse({"id": response_id, "object": "response.deleted", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        """List the input items of a stored response: ``/v1/responses/{id}/input_items``."""
        stored = self._stored.get(request.state.client, request.path_params["id"])
        content = {"object": "list", "data": stored["input_items"], "has_more": False}
        return JSONResponse(content)
