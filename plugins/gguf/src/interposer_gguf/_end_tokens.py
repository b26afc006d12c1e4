"""The tokens of a GGUF file that end a generation: those of its metadata, and those known by text.

Converters write one end token in most files, such as that of a text, while a chat model ends its
answers by another, such as that of a turn. llama.cpp therefore knows end tokens by their texts too.

Source: llama.cpp, src/llama-vocab.cpp (``special_eog_ids``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from interposer.errors import CheckpointError
from interposer_gguf._settings import Settings

_KEY = "tokenizer.ggml."
_NAMED = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

_TEXTS = frozenset(
    [
        *("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>"),  # of a text
        *("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>"),  # of a turn
        *("<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>"),
        *("<|eom_id|>", "<|return|>", "<|flush|>"),  # of a message
        *("<|call|>", "<|calls|>", "<|tool_response>"),  # the model waits for a tool
    ]
)
# Ends of a file that is filled in. A text counts where no key names the token.
_FILL_IN = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# In these vocabularies a token of one text is no end: "<|end|>" closes a channel, not an answer.
_NO_ENDS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)


def ends_by_text(ids: Mapping[str, int], named: Sequence[str] = ()) -> dict[str, int]:
    """Return the end tokens that are known by their texts.

    Args:
        ids: of all tokens, by their texts.
        named: tokens that keys of the metadata name, such as ``"fim_pad"``.
    """
    texts = {*_TEXTS, *(t for name, of in _FILL_IN.items() if name not in named for t in of)}
    return {text: ids[text] for text in texts - _no_ends(ids) if text in ids}


def end_tokens(settings: Settings) -> list[int] | None:
    """Return the ids of the tokens that end a generation, or None if there is none.

    Raises: CheckpointError: the metadata name a token that the file does not have.
    """
    tokens = settings.several(_KEY + "tokens", str, [])
    ids = {text: index for index, text in enumerate(tokens)}
    named = [name for name in _NAMED if f"{_KEY}{name}_token_id" in settings]
    found = {*ends_by_text(ids, named).values()}
    for name in named:
        key = f"{_KEY}{name}_token_id"
        index = settings.integer(key)
        if index < 0 or (tokens and index >= len(tokens)):
            raise CheckpointError(
                settings.path,
                f"has the metadata {key!r} = {index}, but {len(tokens):,} tokens",
                f"convert the model again, or remove {key!r}",
            )
        found.add(index)
    return sorted(found - {ids.get(text) for text in _no_ends(ids)}) or None


def _no_ends(ids: Mapping[str, int]) -> set[str]:
    """Return the texts of tokens that end nothing, even where the metadata name them."""
    return {text for text, others in _NO_ENDS if others <= ids.keys()}
