"""Conversion of text to token ids and back, including streamed tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer as FastTokenizer

from interposer.errors import CheckpointError, RequestError
from interposer_engine._added_tokens import TokenizerSettings
from interposer_engine._chat import ChatRenderer
from interposer_engine._checkpoint.files import check_folder

_PARTIAL = "\N{REPLACEMENT CHARACTER}"
_LONG_TEXT = 10_000  # characters; tokenizing them takes some milliseconds
# Files that can hold the vocabulary. For a folder without them, transformers builds an empty
# tokenizer instead of failing.
_VOCABULARIES = (
    "tokenizer.json",
    "*.model",
    "vocab.*",
    "*vocab*.json",
    "*.tiktoken",
    "tekken.json",
)


_ADD = "add the tokenizer.json of the model, or its tokenizer.model or tekken.json"


def has_vocabulary(path: Path) -> bool:
    """Return whether a model directory has a file with a tokenizer's vocabulary."""
    return any(next(path.glob(pattern), None) is not None for pattern in _VOCABULARIES)


class TextTokenizer:
    """The tokenizer of a model directory, loaded at first use.

    The tokenizers library alone reads tokenizer.json, together with tokens and settings from
    neighbouring files. Other formats, and settings for which transformers builds another pipeline,
    go through transformers, which takes seconds to import. A vocabulary of 150,000 tokens takes 40
    MiB and 0.2 seconds, which a model saves if all prompts are token ids.
    """

    def __init__(self, path: Path) -> None:
        """Find the tokenizer's files in the model directory.

        Raises: CheckpointError: the directory has no tokenizer.
        """
        check_folder(path)
        file = path / "tokenizer.json"
        if file.exists():
            self._initialize(path, lambda: _of_folder(path))
        elif has_vocabulary(path):
            self._initialize(path, lambda: _of_library(path))
        else:
            raise CheckpointError(path, "holds no tokenizer", _ADD)

    @classmethod
    def of_json(
        cls,
        content: str | Callable[[], str],
        path: Path,
        settings: Mapping[str, Any] | None = None,
    ) -> TextTokenizer:
        """Create a tokenizer from the content of a tokenizer.json.

        Args:
            content: The content, or a function that returns the content at first use.
            path: The file of the content, for error texts.
            settings: Fields of a tokenizer_config.json. ``content`` must have all tokens already.
        """
        tokenizer = cls.__new__(cls)
        if isinstance(content, str):
            # Parse a given text at once, so that errors appear here.
            parsed = _of_text(content, path)
            tokenizer._initialize(path, lambda: parsed, settings or {})
        else:
            read_text = content
            tokenizer._initialize(path, lambda: _of_text(read_text(), path), settings or {})
        return tokenizer

    @classmethod
    def of_transformers(cls, held: Any) -> TextTokenizer:
        """Create a tokenizer from a loaded tokenizer of transformers."""
        tokenizer = cls.__new__(cls)
        tokenizer._initialize(Path(str(held.name_or_path)), lambda: held)
        return tokenizer

    def _initialize(
        self, path: Path, load: Callable[[], Any], settings: Mapping[str, Any] | None = None
    ) -> None:
        self._path = path
        self._read = load
        self._settings = settings

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy for another thread, although other threads may use this tokenizer."""
        clone = type(self).__new__(type(self))
        # Another thread may add a cached attribute meanwhile: iterate over a copy of the dict.
        vars(clone).update(copy.deepcopy(dict(vars(self)), memo))
        return clone

    def read(self) -> None:
        """Load the tokenizer now, for example before making a copy or starting a server.

        Raises: CheckpointError: the tokenizer is not valid.
        """
        self._backend  # noqa: B018

    @cached_property
    def _backend(self) -> Any:
        """The loaded tokenizer: from the library tokenizers, or from transformers."""
        return self._read()

    @property
    def _fast(self) -> FastTokenizer | None:
        return self._backend if isinstance(self._backend, FastTokenizer) else None

    @cached_property
    def _cleans_up(self) -> bool:
        """Whether spaces before punctuation are removed from texts of the library tokenizers."""
        assert self._fast is not None
        if self._settings is None:
            settings = TokenizerSettings.of_folder(self._path)
        else:
            settings = TokenizerSettings(self._settings, {}, {}, self._path)
        return settings.cleans_up(self._fast)

    @property
    def _slow(self) -> Any:
        return None if isinstance(self._backend, FastTokenizer) else self._backend

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, with the special tokens that the tokenizer adds.

        Raises: RequestError: the text contains half of a surrogate pair, as undecodable bytes do.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"The prompt has {text[error.start]!r} at {error.start}, which is no character. "
                "Try: decode the text from the encoding that it is in"
            ) from None
        if self._fast is not None:
            if len(text) > _LONG_TEXT:
                # The library releases the interpreter lock only in its batch method.
                (encoding,) = self._fast.encode_batch([text])
                return list(encoding.ids)
            return list(self._fast.encode(text).ids)
        return list(self._slow.encode(text))

    @property
    def vocabulary(self) -> dict[str, int]:
        """The token ids by token text; an empty mapping without a tokenizer."""
        return dict((self._fast or self._slow).get_vocab())

    def serialized(self) -> str:
        """Return the tokenizer as the content of a tokenizer.json.

        Raises: RequestError: the tokenizer is not one of the tokenizers library.
        """
        backend = self._fast or getattr(self._slow, "backend_tokenizer", None)
        if not isinstance(backend, FastTokenizer):
            raise RequestError(
                f"The tokenizer of {self._path} is a {type(self._slow).__name__}, whose tokens "
                "have no bytes that are known here. Try: a checkpoint with a tokenizer.json"
            )
        return str(backend.to_str())

    @cached_property
    def transformers_tokenizer(self) -> Any:
        """The tokenizer as one of transformers, which the first use imports."""
        if self._slow is not None:
            return self._slow
        if self._settings is None:
            library = _of_library(self._path)
        else:
            from transformers import PreTrainedTokenizerFast

            library = PreTrainedTokenizerFast(tokenizer_object=self._fast, **self._settings)
        if isinstance(getattr(library, "_tokenizer", None), FastTokenizer):
            library._tokenizer = self._fast  # a chat is split into tokens as any other text
        return library

    @cached_property
    def chat(self) -> ChatRenderer:
        """The renderer of chat templates; the first use imports transformers."""
        return ChatRenderer(self.transformers_tokenizer, self._path)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` without special tokens."""
        if self._fast is not None:
            text = str(self._fast.decode(list(token_ids), skip_special_tokens=True))
            return clean_up(text) if self._cleans_up else text
        return str(self._slow.decode(list(token_ids), skip_special_tokens=True))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token completes, possibly an empty text."""
        detokenizer, last = Detokenizer(self), len(token_ids) - 1
        return [detokenizer.push(token, at == last) for at, token in enumerate(token_ids)]


class MissingTokenizer(TextTokenizer):
    """Placeholder for a model without a tokenizer: prompts must be token ids, texts are empty."""

    def __init__(self, path: Path, advice: str = _ADD) -> None:
        self._path = path
        self._advice = advice

    def read(self) -> None:
        """Do nothing: there is no tokenizer to load."""

    def encode(self, text: str) -> list[int]:
        """Raise RequestError: a model without a tokenizer accepts only token ids."""
        raise RequestError(
            f"{self._path} holds no tokenizer, so texts cannot be read. "
            f"Try: give token ids, or {self._advice}"
        )

    @property
    def vocabulary(self) -> dict[str, int]:
        """An empty mapping, as there is no tokenizer."""
        return {}

    def serialized(self) -> str:
        """Raise RequestError: there is no tokenizer to serialize."""
        raise RequestError(
            f"{self._path} holds no tokenizer, which constraints need. Try: {self._advice}"
        )

    @property
    def transformers_tokenizer(self) -> Any:
        """Raise RequestError: there is no tokenizer to convert."""
        raise RequestError(f"{self._path} holds no tokenizer. Try: {self._advice}")

    @property
    def chat(self) -> ChatRenderer:
        """Raise RequestError: without a tokenizer there is no chat template."""
        raise RequestError(
            f"{self._path} holds no tokenizer, so messages cannot be written as a prompt. "
            f"Try: give token ids to generate(), or {self._advice}"
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return an empty text, as there is no tokenizer."""
        return ""


def _of_library(path: Path) -> Any:
    """Load the tokenizer of a model directory by transformers.

    Raises: CheckpointError: transformers cannot read the directory.
    """
    from transformers import AutoTokenizer

    try:
        # Without an explicit False, transformers may ask for trust on the terminal.
        return AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # as below, for the other formats
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a tokenizer file that transformers cannot read."""
    advice = "add the model's tokenizer.json, which needs no further package"
    files = [file for pattern in _VOCABULARIES for file in sorted(path.glob(pattern))]
    for file in files:
        if missing := [name for name in _readers(file) if not _is_installed(name)]:
            reason = f"needs {' and '.join(missing)} to be read, and there is no tokenizer.json"
            return CheckpointError(file, reason, f"pip install {' '.join(missing)}, or {advice}")
    reason = " ".join(str(error).split())
    return CheckpointError(
        files[0] if files else path,
        f"holds no tokenizer that transformers reads: {type(error).__name__}: {reason:.300}",
        f"copy it again, or {advice}",
    )


def _readers(file: Path) -> tuple[str, ...]:
    """Return the names of the packages that transformers needs to read a vocabulary file."""
    if file.name == "tekken.json":
        return ("mistral-common",)
    if file.suffix == ".tiktoken":
        return ("tiktoken",)
    if file.suffix != ".model":
        return ()
    # A SentencePiece file is a binary message. Llama 3 uses the same name for tiktoken's text file.
    with file.open("rb") as content:
        is_message = content.read(1) == b"\n"
    return ("sentencepiece", "protobuf") if is_message else ("tiktoken",)


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _of_folder(path: Path) -> Any:
    """Load the tokenizer of a model directory with a tokenizer.json.

    Raises: CheckpointError: a file is not valid.
    """
    file = path / "tokenizer.json"
    tokenizer = _fast(lambda: FastTokenizer.from_file(str(file)), file)
    settings = TokenizerSettings.of_folder(path)
    if settings.needs_transformers(tokenizer):
        return _of_library(path)
    settings.apply(tokenizer)
    return tokenizer


def _of_text(content: str, path: Path) -> FastTokenizer:
    return _fast(lambda: FastTokenizer.from_str(content), path)


def _fast(load: Callable[[], FastTokenizer], path: Path) -> FastTokenizer:
    try:
        tokenizer = load()
    except Exception as error:  # the library raises bare Exception for any bad file
        raise CheckpointError(
            path, f"is not a valid tokenizer: {error}", "copy it again, or install newer tokenizers"
        ) from error
    # The file may hold truncation and padding of a training run; prompts must not be changed.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def clean_up(text: str) -> str:
    """Remove the spaces before punctuation and before English contractions from a text."""
    for mark in ".?!,":
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for suffix in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {suffix}", suffix)
    return text


class Detokenizer:
    """Converts a stream of tokens to text, and holds back incomplete characters."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0
        self._context = 0

    def push(self, token_id: int, last: bool = False) -> str:
        """Return the text that ``token_id`` completes; for the last token, the remaining text too.

        Tokens are decoded together with a few tokens before them, because a tokenizer may join
        neighbours in ways that depend on both.
        """
        self._tokens.append(token_id)
        return self._new_text(last)

    def rest(self) -> str:
        """Return the held-back text, after the last token."""
        return self._new_text(last=True)

    def _new_text(self, last: bool) -> str:
        known_text = self._tokenizer.decode(self._tokens[self._context : self._shown])
        full_text = self._tokenizer.decode(self._tokens[self._context :])
        # A replacement character at the end may be the first bytes of a character.
        if len(full_text) <= len(known_text) or (full_text.endswith(_PARTIAL) and not last):
            return ""
        # Decode the next tokens together with the tokens of this piece only.
        self._context, self._shown = self._shown, len(self._tokens)
        return full_text[len(known_text) :]
