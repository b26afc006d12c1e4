"""The token ids that a model is calibrated on."""

from __future__ import annotations

from pathlib import Path

from interposer.errors import ConfigError
from interposer_models._tokenizer import TextTokenizer

_MOST_SEQUENCES = 128
_MOST_TOKENS = 2048


def calibration_sequences(
    file: Path, tokenizer: TextTokenizer, context: int, least_tokens: int
) -> list[list[int]]:
    """Return sequences of equal length from a text, spread evenly over it.

    They are as long as the model's context, at most 2048 tokens, and at most 128. What does not
    fill the last one is left out.

    Args:
        least_tokens: that are needed in all.
    Raises: ConfigError: the file cannot be read, or its text is too short.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--calibrate {file}: cannot be read as text in UTF-8: {error}. "
            "Try: a file of text such as the model is used for"
        ) from error
    tokens = tokenizer.encode(text) if text else []
    length = min(context, _MOST_TOKENS)
    count = len(tokens) // length
    if count * length < least_tokens:
        needed = -(-least_tokens // length) * length
        raise ConfigError(
            f"--calibrate {file}: its text has {len(tokens)} tokens, {needed} are needed: as many "
            f"as a layer has inputs, in sequences of {length}. Try: a longer text"
        )
    chosen = min(count, _MOST_SEQUENCES)
    starts = [index * count // chosen * length for index in range(chosen)]
    return [tokens[start : start + length] for start in starts]
