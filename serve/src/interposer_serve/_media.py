"""Reading of the pictures and sounds of requests, with a limit on their memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from interposer.errors import RequestError
from interposer_engine import Media
from interposer_serve._attachments import Attachment
from interposer_serve._errors import ApiError
from interposer_serve._limits import Limits
from interposer_serve._media_addresses import MediaFetcher


class MediaReader:
    """Reads the attachments of requests: the content of data: addresses, or from the network."""

    def __init__(self, limits: Limits, hosts: Collection[tuple[str, int | None]]) -> None:
        """Allow addresses of some hosts; see ``check_media_hosts``."""
        self._limits = limits
        self._fetcher = MediaFetcher(hosts, limits)
        self._num_bytes = 0

    @asynccontextmanager
    async def reading(
        self, messages: list[dict[str, Any]], param: str
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """Read the attachments of messages, which count in a ``with`` block.

        Args:
            messages: Chat messages.
            param: Name of the field with messages in the client's API.
        Returns: the messages, with ``Media`` in place of attachments.
        Raises: ApiError: a medium cannot be read or is too large, or the media of other requests
            leave no memory for it.
        """
        media: dict[int, Media] = {}
        num_bytes = 0
        try:
            for attachment in _attachments(messages):
                medium = await self._read(attachment, param)
                media[id(attachment)] = medium
                num_bytes += len(medium.content)
                self._num_bytes += len(medium.content)
                self._check_memory()
            yield [_with_media(message, media) for message in messages] if media else messages
        finally:
            self._num_bytes -= num_bytes

    async def _read(self, attachment: Attachment, param: str) -> Media:
        kind, address, place = attachment.kind, attachment.address, attachment.place
        max_bytes = self._limits.media_bytes
        if address[:5].lower() != "data:":
            try:
                content = await self._fetcher.fetch(address)
            except ApiError as error:
                raise ApiError(400, f"{place}: {error}", param=param, code=error.code) from None
            medium = Media(kind, content, place)
        else:
            # Four letters of base64 are three bytes.
            if len(address) * 3 // 4 - 128 > max_bytes:
                raise _too_large(place, max_bytes, param)
            try:
                # In a thread, because decoding megabytes would delay the event loop.
                medium = await asyncio.to_thread(Media.of_data_address, kind, address, place)
            except RequestError as error:
                raise ApiError(400, str(error), param=param, code="invalid_value") from None
        if len(medium.content) > max_bytes:
            raise _too_large(place, max_bytes, param)
        limits = self._limits
        bounds: dict[str, Any] = (
            {"max_pixels": limits.image_pixels}
            if kind == "image"
            else {"max_seconds": limits.audio_seconds}
        )
        return Media(kind, medium.content, place, **bounds)

    def _check_memory(self) -> None:
        if self._num_bytes > self._limits.total_media_bytes:
            raise ApiError(
                503,
                "The pictures and sounds of other requests take all memory for media. "
                "Try: again later",
                code="media_full",
                headers={"retry-after": "1"},
            )


def _attachments(messages: list[dict[str, Any]]) -> Iterator[Attachment]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, Attachment))


def _with_media(message: Mapping[str, Any], media: Mapping[int, Media]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [media.get(id(part), part) for part in content]}


def _too_large(place: str, max_bytes: int, param: str) -> ApiError:
    return ApiError(
        400,
        f"{place} has more than the allowed {max_bytes} bytes. Try: a smaller file",
        param=param,
        code="media_too_large",
    )
