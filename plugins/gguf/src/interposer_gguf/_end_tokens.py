"""The tokens that end a generation, from the metadata of a GGUF file and from token texts.

Most converters write one end token, such as end-of-text, while a chat model ends answers by
another, such as end-of-turn. Therefore llama.cpp also recognizes the texts of end tokens.

Source: llama.cpp, src/llama-vocab.cpp (``special_eog_ids``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from interposer.errors import CheckpointError
from interposer_gguf._metadata import MetadataReader

_KEY = "tokenizer.ggml."
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

_TEXTS = frozenset(
    [
        *("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>"),  # of a text
        *("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>"),  # of a turn
        *("<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>"),
        *("<|eom_id|>", "<|return|>", "<|flush|>"),  # of a message
        *("<|call|>", "<|calls|>", "<|tool_response>"),  # the model waits for a tool
    ]
)
# End tokens of fill-in-the-middle. A text is used only if no metadata key names the token.
_FILL_IN = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# (token, other tokens): in a vocabulary with all other tokens, this token ends no answer. There,
# "<|end|>" closes a channel.
_NO_ENDS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)


def ends_by_text(ids: Mapping[str, int], named_keys: Sequence[str] = ()) -> dict[str, int]:
    """Return the ids of known end-of-generation tokens, found by token text.

    Args:
        ids: token ids by text.
        named_keys: tokens that metadata keys name, such as ``"fim_pad"``.
    """
    fill_in = (t for name, texts in _FILL_IN.items() if name not in named_keys for t in texts)
    texts = {*_TEXTS, *fill_in}
    return {text: ids[text] for text in texts - _no_ends(ids) if text in ids}


def end_tokens(metadata: MetadataReader) -> list[int] | None:
    """Return the ids of the tokens that end a generation, or None if there are none.

    Raises: CheckpointError: the metadata names a token id that the vocabulary lacks.
    """
    tokens = metadata.list_of(_KEY + "tokens", str, [])
    ids = {text: index for index, text in enumerate(tokens)}
    named_keys = [name for name in _END_KEYS if f"{_KEY}{name}_token_id" in metadata]
    end_ids = {*ends_by_text(ids, named_keys).values()}
    for name in named_keys:
        key = f"{_KEY}{name}_token_id"
        index = metadata.integer(key)
        if index < 0 or (tokens and index >= len(tokens)):
            raise CheckpointError(
                metadata.path,
                f"has the metadata {key!r} = {index}, but {len(tokens):,} tokens",
                f"convert the model again, or remove {key!r}",
            )
        end_ids.add(index)
    return sorted(end_ids - {ids.get(text) for text in _no_ends(ids)}) or None


def _no_ends(ids: Mapping[str, int]) -> set[str]:
    """Return token texts that must not end generation, even if the metadata names them as ends."""
    return {text for text, other_tokens in _NO_ENDS if other_tokens <= ids.keys()}
