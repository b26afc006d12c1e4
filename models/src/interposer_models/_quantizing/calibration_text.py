"""Token ids of the text that a model is calibrated on."""

from __future__ import annotations

from pathlib import Path

from interposer.errors import ConfigError
from interposer_models._tokenizer import TextTokenizer

_MAX_SEQUENCES = 128
_MAX_TOKENS = 2048


def calibration_sequences(
    file: Path, tokenizer: TextTokenizer, context: int, least_tokens: int
) -> list[list[int]]:
    """Cut a text into at most 128 sequences of equal length, spread evenly over the text.

    A sequence is as long as the model's context, at most 2048 tokens. An incomplete last sequence
    is dropped.

    Args:
        least_tokens: the smallest allowed total.
    Raises: ConfigError: the file cannot be read, or the text is too short.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--calibrate {file}: cannot be read as text in UTF-8: {error}. "
            "Try: a text file with typical inputs of the model"
        ) from error
    tokens = tokenizer.encode(text) if text else []
    length = min(context, _MAX_TOKENS)
    num_available = len(tokens) // length
    # With fewer tokens than inputs, a layer's second moments have no full rank.
    if num_available * length < least_tokens:
        needed = -(-least_tokens // length) * length
        raise ConfigError(
            f"--calibrate {file}: its text has {len(tokens)} tokens, {needed} are needed: as many "
            f"as a layer has inputs, in sequences of {length}. Try: a longer text"
        )
    num_sequences = min(num_available, _MAX_SEQUENCES)
    starts = [index * num_available // num_sequences * length for index in range(num_sequences)]
    return [tokens[start : start + length] for start in starts]
