"""Models by name, downloaded from a model hub into the cache of the hub's own library.

Endpoint, token, cache folder and offline mode are settings of that library, such as
``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME`` and ``HF_HUB_OFFLINE``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from interposer.errors import CheckpointError, foreign_errors

# Other files of a repository are for other programs, or hold the same content in other formats.
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
    # Written by sentence-transformers.
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
)
"""Patterns of the files of a model that describe it, without weights."""

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
        """Parse ``namespace/name`` or ``namespace/name@revision``; return None for any other text.

        A path that exists on the disk is never a name, nor is ``"./namespace/name"``.
        """
        match = _NAME.fullmatch(text.as_posix() if isinstance(text, Path) else text)
        if match is None or Path(text).exists():
            return None
        return cls(match["repository"], match["revision"])

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository

    def description(self) -> Path:
        """Download configuration and tokenizer, no weights; return the folder.

        Raises: CheckpointError: the model does not exist, needs permission, or cannot be
            downloaded.
        """
        return self._fetched(DESCRIPTION, self.revision)

    def weights(self, folder: Path, files: Collection[str]) -> None:
        """Download weight ``files`` into ``folder``, which ``description`` returned.

        Raises: CheckpointError: a file is missing or cannot be downloaded.
        """
        # The folder is named after the commit: the branch may have moved since.
        self._fetched(files, folder.name)
        if missing := sorted(name for name in files if not (folder / name).is_file()):
            mend = "choose a repository that stores them as safetensors; pickled ones run code"
            raise self._error(f"has no {', '.join(missing)}", mend)

    def adapter(self) -> Path:
        """Download the LoRA adapter that has this name, and return the folder.

        Raises: CheckpointError: as ``description``.
        """
        return self._fetched(_ADAPTER, self.revision)

    def _fetched(self, patterns: Collection[str], revision: str | None) -> Path:
        """Download the files that match ``patterns``; return the folder in the cache."""
        # Imported here: most models are folders, and the import takes long.
        from huggingface_hub import constants, errors, snapshot_download

        try:
            folder = snapshot_download(
                self.repository,
                revision=revision,
                allow_patterns=list(patterns),
            )
        except errors.GatedRepoError as error:
            url = f"{constants.ENDPOINT}/{self.repository}"
            raise self._error("is gated", f"ask for access at {url}, `hf auth login`") from error
        except errors.RevisionNotFoundError as error:
            raise self._error("has no such revision", "leave it out, or look it up") from error
        except errors.RepositoryNotFoundError as error:
            reason = f"is neither a folder here nor a model at {constants.ENDPOINT}"
            mend = "check the spelling; if it is private, `hf auth login`"
            raise self._error(reason, mend) from error
        except foreign_errors() as error:  # the type depends on the library's transport
            if constants.is_offline_mode():
                mend = "unset HF_HUB_OFFLINE to download it, or give a folder"
                raise self._error("is not in the cache", mend) from error
            message = str(error.__cause__ or error).strip() or type(error).__name__
            reason = f"cannot be fetched: {message.splitlines()[0]}"
            mend = "the same again: what has arrived is kept"
            raise self._error(reason, mend) from error
        return Path(folder)

    def _error(self, reason: str, mend: str) -> CheckpointError:
        return CheckpointError(str(self), reason, mend)
