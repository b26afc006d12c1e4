"""Models by name: what a hub of models has of one, in the cache of the hub's own library.

Endpoint, token, cache folder and whether the network may be used are that library's settings, such
as ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME`` and ``HF_HUB_OFFLINE``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from interposer.errors import CheckpointError, foreign_errors

# What else is there is for other programs, or the same in other forms.
DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "model.safetensors.index.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab*",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "tekken.json",
    # Of sentence-transformers.
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
)
"""Patterns of the files of a model that are no weights."""

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?")


class HubModel(NamedTuple):
    """A model on a hub.

    Attributes:
        repository: ``namespace/name``.
        revision: a branch, a tag or a commit; None is the main branch.
    """

    repository: str
    revision: str | None = None

    @classmethod
    def named(cls, text: str | Path) -> HubModel | None:
        """Return the model that a text names, ``namespace/name`` or ``namespace/name@revision``.

        What lies on the disk is no name, whatever it is called, nor is ``"./namespace/name"``.
        """
        found = _NAME.fullmatch(text.as_posix() if isinstance(text, Path) else text)
        if found is None or Path(text).exists():
            return None
        return cls(found["repository"], found["revision"])

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository

    def description(self) -> Path:
        """Return the folder with its configuration and tokenizer; no weight is fetched.

        Raises: CheckpointError: it is not there, may not be read, or cannot be fetched.
        """
        return self._fetched(DESCRIPTION, self.revision)

    def weights(self, folder: Path, files: Collection[str]) -> None:
        """Add ``files`` to ``folder``, which ``description`` returned.

        Raises: CheckpointError: they are not there or cannot be fetched.
        """
        # The folder is called like the commit: a branch may have moved on since.
        self._fetched(files, folder.name)
        if missing := sorted(name for name in files if not (folder / name).is_file()):
            mend = "choose a repository that stores them as safetensors; pickled ones run code"
            raise self._error(f"has no {', '.join(missing)}", mend)

    def adapter(self) -> Path:
        """Return the folder with the adapter of low rank that is stored under this name.

        Raises: CheckpointError: as ``description``.
        """
        return self._fetched(_ADAPTER, self.revision)

    def _fetched(self, names: Collection[str], revision: str | None) -> Path:
        """Return the folder in the library's cache, once it holds all of ``names`` that exist."""
        from huggingface_hub import constants, errors, snapshot_download

        try:
            folder = snapshot_download(
                self.repository,
                revision=revision,
                allow_patterns=list(names),
            )
        except errors.GatedRepoError as error:
            where = f"{constants.ENDPOINT}/{self.repository}"
            raise self._error("is gated", f"ask for access at {where}, `hf auth login`") from error
        except errors.RevisionNotFoundError as error:
            raise self._error("has no such revision", "leave it out, or look it up") from error
        except errors.RepositoryNotFoundError as error:
            reason = f"is neither a folder here nor a model at {constants.ENDPOINT}"
            mend = "check the spelling; if it is private, `hf auth login`"
            raise self._error(reason, mend) from error
        except foreign_errors() as error:  # of whatever transport the library has
            if constants.is_offline_mode():
                mend = "unset HF_HUB_OFFLINE to download it, or give a folder"
                raise self._error("is not in the cache", mend) from error
            said = str(error.__cause__ or error).strip() or type(error).__name__
            reason = f"cannot be fetched: {said.splitlines()[0]}"
            mend = "the same again: what has arrived is kept"
            raise self._error(reason, mend) from error
        return Path(folder)

    def _error(self, reason: str, mend: str) -> CheckpointError:
        return CheckpointError(str(self), reason, mend)
