"""Text to token ids and back, incrementally too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer as FastTokenizer

from interposer.errors import CheckpointError, RequestError
from interposer_models._added_tokens import TokenizerSettings
from interposer_models._chat import ChatRenderer
from interposer_models._checkpoint.regular_files import check_folder

_PARTIAL = "\N{REPLACEMENT CHARACTER}"
_LONG_TEXT = 10_000  # characters, which take some milliseconds
# One of these holds the vocabulary; transformers makes an empty tokenizer of a folder without.
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
    """Say whether a model directory holds a file of a tokenizer's vocabulary."""
    return any(next(path.glob(pattern), None) is not None for pattern in _VOCABULARIES)


class TextTokenizer:
    """The tokenizer of a model directory, which is read when it is first asked for.

    tokenizer.json is read by the tokenizers library alone, with the tokens and settings of the
    files beside it; other formats, and settings by which transformers builds another pipeline, go
    through transformers, which takes seconds to import. A vocabulary of 150,000 tokens takes 40 MiB
    and a fifth of a second, which a model that is given token ids does without.
    """

    def __init__(self, path: Path) -> None:
        """Read nothing yet.

        Raises: CheckpointError: the directory holds no tokenizer.
        """
        check_folder(path)
        file = path / "tokenizer.json"
        if file.exists():
            self._begin(path, lambda: _of_folder(path))
        elif has_vocabulary(path):
            self._begin(path, lambda: _of_library(path))
        else:
            raise CheckpointError(path, "holds no tokenizer", _ADD)

    @classmethod
    def of_json(
        cls,
        content: str | Callable[[], str],
        path: Path,
        settings: Mapping[str, Any] | None = None,
    ) -> TextTokenizer:
        """Return the tokenizer that ``content`` of a tokenizer.json describes.

        Args:
            content: or what returns it, when it is first asked for.
            path: the file that it comes from, for the text of errors.
            settings: what tokenizer_config.json would hold. ``content`` has all tokens already.
        """
        tokenizer = cls.__new__(cls)
        if isinstance(content, str):
            parsed = _of_text(content, path)
            tokenizer._begin(path, lambda: parsed, settings or {})
        else:
            read_text = content
            tokenizer._begin(path, lambda: _of_text(read_text(), path), settings or {})
        return tokenizer

    @classmethod
    def of_transformers(cls, held: Any) -> TextTokenizer:
        """Return the tokenizer that ``held``, one of transformers, is."""
        tokenizer = cls.__new__(cls)
        tokenizer._begin(Path(str(held.name_or_path)), lambda: held)
        return tokenizer

    def _begin(
        self, path: Path, read: Callable[[], Any], settings: Mapping[str, Any] | None = None
    ) -> None:
        self._path = path
        self._read = read
        self._settings = settings

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy for another thread, while threads may still use this tokenizer."""
        clone = type(self).__new__(type(self))
        # Another thread may add a cached attribute meanwhile: iterate over a copy of the dict.
        vars(clone).update(copy.deepcopy(dict(vars(self)), memo))
        return clone

    def read(self) -> None:
        """Read the files now if they were not read yet, before a copy or the start of a server.

        Raises: CheckpointError: it is not valid, as whatever asks for it would.
        """
        self._held  # noqa: B018

    @cached_property
    def _held(self) -> Any:
        """The tokenizer of the tokenizers library, or of transformers."""
        return self._read()

    @property
    def _fast(self) -> FastTokenizer | None:
        return self._held if isinstance(self._held, FastTokenizer) else None

    @cached_property
    def _cleans_up(self) -> bool:
        """Whether spaces before punctuation are removed from the texts of the fast tokenizer."""
        assert self._fast is not None
        if self._settings is None:
            settings = TokenizerSettings.of_folder(self._path)
        else:
            settings = TokenizerSettings(self._settings, {}, {}, self._path)
        return settings.cleans_up(self._fast)

    @property
    def _slow(self) -> Any:
        return None if isinstance(self._held, FastTokenizer) else self._held

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, with the special tokens that the tokenizer adds.

        Raises: RequestError: the text holds half of a surrogate pair, as undecodable bytes do.
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
                # Of several texts the library lets other threads run meanwhile.
                (found,) = self._fast.encode_batch([text])
                return list(found.ids)
            return list(self._fast.encode(text).ids)
        return list(self._slow.encode(text))

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens by their texts; empty where there is no tokenizer."""
        return dict((self._fast or self._slow).get_vocab())

    def serialized(self) -> str:
        """Return the content of a tokenizer.json.

        Raises: RequestError: the tokenizer is none of the tokenizers library.
        """
        backend = self._fast or getattr(self._slow, "backend_tokenizer", None)
        if not isinstance(backend, FastTokenizer):
            raise RequestError(
                f"The tokenizer of {self._path} is a {type(self._slow).__name__}, whose tokens "
                "have no bytes that are known here. Try: a checkpoint with a tokenizer.json"
            )
        return str(backend.to_str())

    @cached_property
    def chat(self) -> ChatRenderer:
        """Return the chat template renderer; this imports transformers."""
        if self._slow is not None:
            return ChatRenderer(self._slow, self._path)
        if self._settings is None:
            library = _of_library(self._path)
        else:
            from transformers import PreTrainedTokenizerFast

            library = PreTrainedTokenizerFast(tokenizer_object=self._fast, **self._settings)
        if isinstance(getattr(library, "_tokenizer", None), FastTokenizer):
            library._tokenizer = self._fast  # a chat is split into tokens as any other text
        return ChatRenderer(library, self._path)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` without special tokens."""
        if self._fast is not None:
            text = str(self._fast.decode(list(token_ids), skip_special_tokens=True))
            return clean_up(text) if self._cleans_up else text
        return str(self._slow.decode(list(token_ids), skip_special_tokens=True))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token completes after the ones before it, perhaps none."""
        detokenizer, last = Detokenizer(self), len(token_ids) - 1
        return [detokenizer.push(token, at == last) for at, token in enumerate(token_ids)]


class MissingTokenizer(TextTokenizer):
    """Stands in where a model directory holds no tokenizer: prompts are token ids, texts empty."""

    def __init__(self, path: Path, mend: str = _ADD) -> None:
        self._path = path
        self._mend = mend

    def read(self) -> None:
        """Read nothing."""

    def encode(self, text: str) -> list[int]:
        """Raise RequestError."""
        raise RequestError(
            f"{self._path} holds no tokenizer, so that texts cannot be read. "
            f"Try: give token ids, or {self._mend}"
        )

    @property
    def vocabulary(self) -> dict[str, int]:
        """Return no tokens."""
        return {}

    def serialized(self) -> str:
        """Raise RequestError."""
        raise RequestError(
            f"{self._path} holds no tokenizer, which constraints need. Try: {self._mend}"
        )

    @property
    def chat(self) -> ChatRenderer:
        """Raise RequestError."""
        raise RequestError(
            f"{self._path} holds no tokenizer, so that messages cannot be written as a prompt. "
            f"Try: give token ids to generate(), or {self._mend}"
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return an empty text."""
        return ""


def _of_library(path: Path) -> Any:
    """Return the tokenizer that transformers makes of a model directory.

    Raises: CheckpointError: it makes none.
    """
    from transformers import AutoTokenizer

    try:
        # Said outright, trust is not asked for on the terminal.
        return AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # as below, for the other formats
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error of a tokenizer that transformers does not read, naming its file."""
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
    """Return the packages with which transformers reads a vocabulary, none for its own formats."""
    if file.name == "tekken.json":
        return ("mistral-common",)
    if file.suffix == ".tiktoken":
        return ("tiktoken",)
    if file.suffix != ".model":
        return ()
    # SentencePiece stores a binary message of pieces; Llama 3 gave a text of tiktoken the name.
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
    """Return the tokenizer of a model directory with a tokenizer.json.

    Raises: CheckpointError: a file of it is not valid.
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


def _fast(read: Callable[[], FastTokenizer], path: Path) -> FastTokenizer:
    try:
        tokenizer = read()
    except Exception as error:  # the library raises bare Exception for any bad file
        raise CheckpointError(
            path, f"is not a valid tokenizer: {error}", "copy it again, or install newer tokenizers"
        ) from error
    # Settings of a training run; a prompt is taken whole and as it is.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def clean_up(text: str) -> str:
    """Return a text without the spaces before punctuation and English suffixes."""
    for mark in ".?!,":
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for suffix in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {suffix}", suffix)
    return text


class Detokenizer:
    """Turns a growing list of tokens into a growing text, holding back unfinished characters."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0
        self._context = 0

    def push(self, token_id: int, last: bool = False) -> str:
        """Return the text that ``token_id`` completes; after the last, all of the rest.

        Tokens are decoded together with the few before them, because a tokenizer may join
        neighbours in ways that depend on both.
        """
        self._tokens.append(token_id)
        return self._new_text(last)

    def rest(self) -> str:
        """Return the text that is held back, when no token follows."""
        return self._new_text(last=True)

    def _new_text(self, last: bool) -> str:
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        now = self._tokenizer.decode(self._tokens[self._context :])
        if len(now) <= len(before) or (now.endswith(_PARTIAL) and not last):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]
