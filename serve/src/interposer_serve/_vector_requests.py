"""Pydantic models of the request bodies for an encoder's endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from interposer_serve._requests import (
    INT64_MAX,
    SOME,
    Body,
    BodyPart,
    Flag,
    Positive,
    Prompt,
    Text,
)

__all__ = ["ClassifyBody", "EmbeddingBody", "PoolingBody", "RerankBody", "ScoreBody"]

_Texts = Annotated[
    Text | Annotated[list[str], SOME], Field(description="a text or a list of texts, not empty")
]
_Encoding = Annotated[Literal["float", "base64"], Field(description="'float' or 'base64'")]


class _InputBody(Body):
    """Base of the request bodies with texts or token ids as ``input``."""

    input: Prompt

    @property
    def texts(self) -> list[Any]:
        """The texts of the request, each as a text or as token ids."""
        value: Any = self.input
        return [value] if isinstance(value, str) or isinstance(value[0], int) else value


class EmbeddingBody(_InputBody):
    """Request body of ``/v1/embeddings``."""

    encoding_format: _Encoding = "float"
    dimensions: Positive | None = Field(None, description="an integer of at least 1")


class PoolingBody(_InputBody):
    """Request body of ``/pooling``."""

    encoding_format: _Encoding = "float"
    task: Literal["embed", "token_embed", "classify"] | None = Field(
        None, description="'embed', 'token_embed' or 'classify'"
    )


class ClassifyBody(_InputBody):
    """Request body of ``/v1/classify``."""


class ScoreBody(Body):
    """Request body of ``/v1/score``."""

    text_1: _Texts
    text_2: _Texts

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs to score; a single first text is paired with each second text.

        Raises: ValueError: the numbers of texts do not match.
        """
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise ValueError(
                f"text_1 has {len(first)} texts and text_2 has {len(second)}. "
                "Try: one text in text_1, or as many as in text_2"
            )
        return [*zip(first, second, strict=True)]


class RerankDocument(BodyPart):
    """A document of a rerank request, as an object."""

    text: str


class RerankBody(Body):
    """Request body of ``/v1/rerank``."""

    query: Text = Field(description="a text")
    documents: Annotated[list[str | RerankDocument], SOME] = Field(
        description="a list of texts or of objects with a text, not empty"
    )
    top_n: Annotated[int, Field(ge=0, le=INT64_MAX)] = Field(
        0, description="an integer of at least 0; 0 returns all documents"
    )
    return_documents: Flag = True

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [
            document if isinstance(document, str) else document.text for document in self.documents
        ]
