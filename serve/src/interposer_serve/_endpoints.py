"""Base class of the endpoints of one model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from interposer_serve._errors import ApiError
from interposer_serve._requests import Body

Answer = Callable[[Any, Request, dict[str, Any]], Awaitable[Response]]
"""Method of ``Endpoints`` that answers a request, from its parsed body."""


class Endpoints(ABC):
    """The endpoints of one loaded model.

    Attributes:
        paths: Method and type of the request body, by path.
        name: Name of the model for clients.
        context: Number of tokens of the longest input.
        capabilities: Names of the model's tasks, for clients.
    """

    paths: ClassVar[Mapping[str, tuple[Answer, type[Body]]]]
    name: str
    context: int
    capabilities: Collection[str]

    @property
    def available(self) -> Collection[str]:
        """The paths that this model can serve: all, unless a subclass says otherwise."""
        return self.paths

    async def answer(self, path: str, request: Request, content: dict[str, Any]) -> Response:
        """Answer a request.

        Args:
            path: Key of ``paths``.
            content: Parsed body of the request.
        Raises: ApiError: this model cannot serve the path, or the request is unusable.
        """
        if path not in self.available:
            allowed = ", ".join(sorted(self.available))
            message = f"The model {self.name!r} has no endpoint {path}; it has {allowed}"
            raise ApiError(404, message, param="model", code="unknown_url")
        method, _ = self.paths[path]
        return await method(self, request, content)

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """Names under which the model and its adapters are served."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Number of answers that run or wait."""

    @property
    @abstractmethod
    def trouble(self) -> str:
        """Reason why requests would fail; "" if no reason is known."""

    @property
    @abstractmethod
    def details(self) -> Mapping[str, Any]:
        """Further fields of the model's entry in ``/v1/models``."""

    @abstractmethod
    async def start(self) -> None:
        """Start the model's threads, and load everything that a first request would load."""

    @abstractmethod
    async def stop(self) -> None:
        """End the model's threads."""

    @abstractmethod
    def end_answers(self) -> None:
        """End every unfinished answer with an error."""

    @abstractmethod
    async def explanation(self) -> dict[str, Any]:
        """Return the explanation of the kernels that the model uses."""
