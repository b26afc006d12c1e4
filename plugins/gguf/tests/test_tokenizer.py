"""The tokenizer of a file is that of the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_engine import TextTokenizer
from interposer_gguf._checkpoint import GGUFCheckpoint
from interposer_gguf._pre_tokenizers import PRE_TOKENIZERS

SHIPPED = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
KEY = "tokenizer.ggml."
SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# Pieces of a language of four letters, whose scores are all different.
PIECES = [SPACE, "a", "b", "c", "d", "ab", "bc", "cd", "abc", "bcd", "dd", SPACE + "a",
          SPACE + "ab", "aa", "aaaa", "ca", "c" + SPACE, SPACE + SPACE]  # fmt: skip
TOKENS = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    *((piece, -float(index % 7) - index / 50, NORMAL) for index, piece in enumerate(PIECES)),
    ("[x]", 0.0, USER_DEFINED),
]
SENTENCE_PIECE: dict[str, Any] = {
    KEY + "model": "llama",
    KEY + "pre": None,
    KEY + "merges": None,
    KEY + "tokens": [token for token, _, _ in TOKENS],
    KEY + "scores": [score for _, score, _ in TOKENS],
    KEY + "token_type": [kind for _, _, kind in TOKENS],
    KEY + "unknown_token_id": 0,
    KEY + "bos_token_id": 1,
    KEY + "eos_token_id": 2,
    KEY + "add_bos_token": None,
    "tensors": {"token_embd.weight": (len(TOKENS), 32)},
}


def tokenizer_of(path: Path) -> TextTokenizer:
    return TextTokenizer.of_json(GGUFCheckpoint.open(path).tokenizer(), path)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory, converter: Any) -> TextTokenizer:
    path = tmp_path_factory.mktemp("shipped") / "model.gguf"
    converter.write_gguf(SHIPPED, path, "f16")
    return tokenizer_of(path)


@given(text=st.text() | st.text("ab \n\t(_):=0129'st", max_size=40))
def test_byte_level_tokens_agree_with_the_model_directory(
    shipped: TextTokenizer, text: str
) -> None:
    expected = TextTokenizer(SHIPPED)
    ids = shipped.encode(text)
    assert ids == expected.encode(text)
    assert shipped.decode(ids) == expected.decode(ids) == text


def test_special_tokens_are_split_off(shipped: TextTokenizer) -> None:
    assert shipped.encode("a<|endoftext|>a").count(0) == 2
    assert shipped.decode(shipped.encode("a<|endoftext|>a")) == "aa"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'll  go12345 x\n\ny", ["I", "'ll", " ", " go", "12345", " x", "\n", "\n", "y"]),
        ("llama-bpe", "I'LL  go12 x\n\ny", ["I", "'LL", " ", " go", "12", " x", "\n\n", "y"]),
        ("llama-bpe", "12345", ["123", "45"]),
        ("qwen2", "I'LL go123 x\n\ny", ["I", "'LL", " go", "1", "2", "3", " x", "\n\n", "y"]),
        ("smollm", "go 123 x", ["go", " ", "1", "2", "3", " x"]),
        ("gpt-4o", "I'LL goHome123 A//\nx", ["I'LL", " go", "Home", "123", " A", "//\n", "x"]),
        ("gpt-4o", "12345", ["123", "45"]),
        ("tekken", "I'll goHome12 a//\n", ["I", "'ll", " go", "Home", "1", "2", " a", "//\n"]),
        ("qwen35", "I'LL go12 x\n\ny", ["I", "'LL", " go", "1", "2", " x", "\n\n", "y"]),
        ("deepseek-v3", "I'll x1234=#if\n", ["I", "'ll", " x", "123", "4", "=#", "if", "\n"]),
    ],
)  # fmt: skip
def test_pre_tokenizers_split_texts_as_the_models_do(
    pre: str, text: str, pieces: list[str]
) -> None:
    from tokenizers import pre_tokenizers

    steps = PRE_TOKENIZERS[pre].steps
    sequence = pre_tokenizers.Sequence([made_step(step, pre_tokenizers) for step in steps])
    actual = [piece for piece, _ in sequence.pre_tokenize_str(text)]
    assert [p.replace("Ġ", " ").replace("Ċ", "\n") for p in actual] == pieces


def test_marks_belong_to_letters_in_qwen35() -> None:
    from tokenizers import pre_tokenizers

    for pre, count in (("qwen2", 2), ("qwen35", 1)):
        steps = [made_step(step, pre_tokenizers) for step in PRE_TOKENIZERS[pre].steps]
        # Devanagari has vowels that are marks.
        pieces = pre_tokenizers.Sequence(steps).pre_tokenize_str("\u0915\u093f")
        assert len(pieces) == count


def made_step(step: Any, library: Any) -> Any:
    from tokenizers import Regex

    match step["type"]:
        case "Split":
            return library.Split(Regex(step["pattern"]["Regex"]), "isolated")
        case "Digits":
            return library.Digits(individual_digits=step["individual_digits"])
        case _:
            return library.ByteLevel(add_prefix_space=False, use_regex=step["use_regex"])


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_name_gives_a_tokenizer(small: Callable[..., Path], pre: str) -> None:
    tokenizer = tokenizer_of(small(**{KEY + "pre": pre}))
    assert tokenizer.encode("abc ab") == [0, 5, 4]  # no token is a space
    assert tokenizer.decode([0, 5, 4, 6]) == "abcab"


@pytest.mark.parametrize(
    ("pre", "changes", "expected"),
    [
        ("gpt-2", {"add_bos_token": None}, [4]),
        ("llama-bpe", {"add_bos_token": None}, [0, 4]),
        ("llama-bpe", {"add_bos_token": False}, [4]),
        ("gpt-2", {"add_eos_token": True}, [0, 4, 6]),
        ("gpt-2", {"bos_token_id": None}, [4]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_states(
    small: Callable[..., Path], pre: str, changes: dict[str, Any], expected: list[int]
) -> None:
    changed = {KEY + name: value for name, value in changes.items()}
    assert tokenizer_of(small(**{KEY + "pre": pre, **changed})).encode("ab") == expected


def best_merges(text: str, prefixed: bool) -> list[int]:
    """Return tokens by the rule of SentencePiece: the pair of the best piece first, then left."""
    ids = {token: index for index, (token, _, _) in enumerate(TOKENS)}
    scores = {token: score for token, score, kind in TOKENS if kind in (NORMAL, USER_DEFINED)}
    found = [1]
    for part in re.split(r"(\[x\])", text):
        if part == "[x]":
            found.append(ids[part])
            continue
        symbols = list((SPACE if prefixed and part else "") + part.replace(" ", SPACE))
        while True:
            pairs = [
                (-scores[one + other], place)
                for place, (one, other) in enumerate(pairwise(symbols))
                if one + other in scores
            ]
            if not pairs:
                break
            place = min(pairs)[1]
            symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
        for symbol in symbols:
            octets = [f"<0x{byte:02X}>" for byte in symbol.encode()]
            found += [ids[symbol]] if symbol in scores else [ids[octet] for octet in octets]
    return found


@pytest.mark.parametrize("prefixed", [True, False])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("abcd é", max_size=20) | st.lists(st.sampled_from(["[x]", "ab", " "])))
def test_pieces_of_high_scores_are_merged_first(
    prefixed: bool, text: str | list[str], sentence_piece: dict[bool, TextTokenizer]
) -> None:
    joined = "".join(text)
    tokenizer = sentence_piece[prefixed]
    ids = tokenizer.encode(joined)
    assert ids == best_merges(joined, prefixed)
    if "[x]" not in joined:
        assert tokenizer.decode(ids) == joined


@pytest.fixture
def sentence_piece(small: Callable[..., Path]) -> dict[bool, TextTokenizer]:
    return {
        prefixed: tokenizer_of(
            small(**SENTENCE_PIECE, **{KEY + "add_space_prefix": prefixed}),
        )
        for prefixed in (True, False)
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": None}, "holds no tokenizer"),
        ({"tokens": ["a"] * 7}, "has the token 'a' twice"),
        ({"tokens": [str(i) for i in range(8)]}, "has 8 tokens, but embeds 7"),
        ({"tokens": [1, 2]}, "= 2 values, must be a list of values of the type str"),
        ({"token_type": [1]}, "has 7 tokens, but 1 values of 'tokenizer.ggml.token_type'"),
        ({"merges": ["a"]}, "has the merge 'a', which does not"),
        ({"merges": ["a c"]}, "has the merge 'a c', which does not"),
        ({"bos_token_id": 7}, "names token 7 as bos, but has 7 tokens"),
        ({"add_bos_token": 3}, "= 3, must be true or false"),
        ({"model": "llama"}, "lacks the metadata 'tokenizer.ggml.scores'"),
    ],
)
def test_contradicting_metadata_is_refused(
    small: Callable[..., Path], changes: dict[str, Any], reason: str
) -> None:
    path = small(**{KEY + name: value for name, value in changes.items()})
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        tokenizer_of(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "bert"}, "has the tokenizer 'bert'; supported are"),
        ({"pre": "kimi-k2"}, "unknown pre-tokenizer 'kimi-k2'"),
        ({"pre": None}, "unknown pre-tokenizer 'default'"),
    ],
)
def test_an_unknown_kind_is_unsupported(
    small: Callable[..., Path], changes: dict[str, Any], reason: str
) -> None:
    path = small(**{KEY + name: value for name, value in changes.items()})
    with pytest.raises(UnsupportedModelError, match=re.escape(reason)):
        tokenizer_of(path)


def test_a_long_piece_is_refused(small: Callable[..., Path]) -> None:
    tokens = [*SENTENCE_PIECE[KEY + "tokens"][:-1], "a" * 600]
    with pytest.raises(CheckpointError, match="a token of 600 characters"):
        tokenizer_of(small(**{**SENTENCE_PIECE, KEY + "tokens": tokens}))


def test_every_end_of_a_turn_ends_a_generation(small: Callable[..., Path]) -> None:
    path = small(**{KEY + "eot_token_id": 0})
    assert GGUFCheckpoint.open(path).config["eos_token_id"] == [0, 6]


@pytest.mark.parametrize(
    ("texts", "changes", "ends"),
    [
        (["<|im_end|>"], {}, ["</s>", "<|im_end|>"]),
        (["<end_of_turn>"], {"eos_token_id": None}, ["</s>", "<end_of_turn>"]),
        (["<|file_sep|>", "a b"], {"fim_sep_token_id": len(TOKENS) + 1}, ["</s>", "a b"]),
        (["<|end|>", "<|return|>", "<|call|>"], {}, ["</s>", "<|return|>", "<|call|>"]),
        (["<|end|>", "<|return|>"], {}, ["</s>", "<|end|>", "<|return|>"]),
        (["<|tool_response>"], {}, ["<|tool_response>"]),
        (["<|imend|>"], {}, ["</s>"]),
    ],
)
def test_end_tokens_without_a_key_are_recognized_by_their_texts(
    small: Callable[..., Path], texts: list[str], changes: dict[str, Any], ends: list[str]
) -> None:
    tokens = [*SENTENCE_PIECE[KEY + "tokens"], *texts]
    added: dict[str, Any] = {
        KEY + "tokens": tokens,
        KEY + "scores": [*SENTENCE_PIECE[KEY + "scores"], *[0.0 for _ in texts]],
        KEY + "token_type": [*SENTENCE_PIECE[KEY + "token_type"], *[NORMAL for _ in texts]],
        "tensors": {"token_embd.weight": (len(tokens), 32)},
        **{KEY + name: value for name, value in changes.items()},
    }
    path = small(**{**SENTENCE_PIECE, **added})
    assert GGUFCheckpoint.open(path).config["eos_token_id"] == sorted(map(tokens.index, ends))
    # A chat writes it as one token, though the file calls it a normal one.
    if texts == ["<|im_end|>"]:
        assert tokenizer_of(path).encode("a<|im_end|>")[-1] == len(TOKENS)


def test_an_unknown_end_token_is_refused(small: Callable[..., Path]) -> None:
    path = small(**{**SENTENCE_PIECE, KEY + "eot_token_id": 7000})
    with pytest.raises(CheckpointError, match=r"'tokenizer.ggml.eot_token_id' = 7000, but \d+ tok"):
        GGUFCheckpoint.open(path)


def test_the_chat_template_of_the_file_writes_its_special_tokens(
    small: Callable[..., Path],
) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    path = small(**SENTENCE_PIECE, **{"tokenizer.chat_template": template})
    checkpoint = GGUFCheckpoint.open(path)
    settings = checkpoint.tokenizer_settings()
    tokenizer = TextTokenizer.of_json(checkpoint.tokenizer(), path, settings)
    prompt = tokenizer.chat.token_ids([{"role": "user", "content": "[x]"}], None, None, {})
    assert (prompt[0], prompt[-1]) == (1, 2)
    assert len(TOKENS) - 1 in prompt
    with pytest.raises(CheckpointError, match="names token 7000 as bos"):
        GGUFCheckpoint.open(
            small(**{**SENTENCE_PIECE, KEY + "bos_token_id": 7000})
        ).tokenizer_settings()
