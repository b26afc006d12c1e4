"""Compare tokenizers of varied files with AutoTokenizer of transformers.

    python tokenizer_files.py FIRST END [--refusals]

A case takes one value of each field in the tables below; the numbers FIRST to END - 1 name cases,
each of which is the same in every run. To extend the tester with a new report, add a spelling to a
table, or a pipeline to ``PIPELINES``. Prints each tokenizer that has other tokens or texts, or
raises an undocumented error, and the counts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from interposer.errors import InterposerError
from interposer_engine import TextTokenizer

ABSENT = object()
Fields = dict[str, Any]

_LETTERS = "abcdehlorswx .,'!?\n"
_FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
TEXTS = ("hello world .", "<s>a</s> b<tool>c</tool> <x>d<pad>", " 's\n<mask>!", "a<tool> </s>")
MESSAGES = [{"role": "user", "content": "hello </s>"}]
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}<tool>{{ m.content }}</s>{% endfor %}"


def _byte_level(*, adds_space: bool) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _qwen() -> Tokenizer:
    tokenizer = _byte_level(adds_space=False)
    tokenizer.normalizer = normalizers.NFC()
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, own])
    return tokenizer


def _metaspace(*, prepends: bool) -> Tokenizer:
    letters = ["<unk>", "<s>", "</s>", "▁", *_LETTERS.replace(" ", "")]
    letters += [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(
        models.BPE(
            {text: i for i, text in enumerate(letters)},
            merges=[],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if prepends:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


def _unigram() -> Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -1.0), ("▁", -2.0)]
    pieces += [(letter, -3.0) for letter in _LETTERS.replace(" ", "")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


# Pipelines of tokenizer.json, with the classes and model types that they are published with.
PIPELINES: dict[str, tuple[Callable[[], Tokenizer], tuple[str, ...], tuple[str, ...]]] = {
    "byte level": (
        lambda: _byte_level(adds_space=False),
        ("PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizerFast", "TokenizersBackend"),
        ("llama", "gpt2", "qwen3_moe"),
    ),
    "byte level with a space": (
        lambda: _byte_level(adds_space=True),
        ("PreTrainedTokenizerFast", "GPT2TokenizerFast"),
        ("llama", "gpt2"),
    ),
    "metaspace": (
        lambda: _metaspace(prepends=False),
        ("PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast"),
        ("llama", "mistral"),
    ),
    "prepend": (
        lambda: _metaspace(prepends=True),
        ("PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast"),
        ("llama", "mistral"),
    ),
    "qwen": (_qwen, ("Qwen2Tokenizer", "Qwen2TokenizerFast"), ("qwen2", "qwen3", "qwen3_moe")),
    "unigram": (_unigram, ("PreTrainedTokenizerFast", "T5Tokenizer"), ("t5",)),
}


def _spellings(text: str) -> tuple[Any, ...]:
    """Return the ways in which files write a token."""
    whole = {"content": text, **_FLAGS}
    return (
        ABSENT,
        text,
        {"__type": "AddedToken", **whole},
        {"__type": "AddedToken", **whole, "lstrip": True, "normalized": True, "special": True},
        None,
    )


_CONFIG: dict[str, tuple[Any, ...]] = {
    "bos_token": _spellings("<s>"),
    "eos_token": _spellings("</s>"),
    "pad_token": (*_spellings("<pad>"), "</s>"),
    "mask_token": _spellings("<mask>"),
    "image_token": (ABSENT, ABSENT, "<x>"),
    "additional_special_tokens": (ABSENT, ABSENT, None, [], ["<x>"], ["<tool>", "</tool>"]),
    "extra_special_tokens": (ABSENT, ABSENT, None, {}, [], ["<x>", "<tool>"], {"a_token": "<x>"}),
    "split_special_tokens": (ABSENT, ABSENT, False, True),
    "clean_up_tokenization_spaces": (ABSENT, False, True),
    "add_prefix_space": (ABSENT, ABSENT, False, True, None),
    "add_bos_token": (ABSENT, False, True, None),
    "add_eos_token": (ABSENT, False, True),
    "legacy": (ABSENT, False, True),
    "model_max_length": (ABSENT, 16, 10**30),
    "padding_side": (ABSENT, "left"),
    "max_length": (ABSENT, ABSENT, 4),
}
_SPECIAL_MAP: dict[str, tuple[Any, ...]] = {
    "bos_token": (ABSENT, "<s>", {"content": "<s>", **_FLAGS}),
    "eos_token": (ABSENT, "</s>", "<x>", {"content": "</s>", **_FLAGS, "rstrip": True}),
    "pad_token": (ABSENT, "<pad>", None),
    "additional_special_tokens": (ABSENT, ["<x>"], []),
    "extra_special_tokens": (ABSENT, ABSENT, ABSENT, ["<mask>"]),
}
_OWN_TOKENS = (
    AddedToken("<s>", special=True),
    AddedToken("</s>", special=True),
    AddedToken("</s>", special=False, normalized=False),
    AddedToken("<tool>", special=False),
    AddedToken("<x>", special=True),
)
_FURTHER_TOKENS = ("<tool>", "</tool>", "<x>")


@dataclass(frozen=True)
class Case:
    """The files of a tokenizer by name, and what became of it."""

    number: int
    pipeline: str
    files: dict[str, Any]
    kind: str
    details: str

    @property
    def is_fault(self) -> bool:
        """Whether the tokenizer had other tokens or texts, or raised an undocumented error."""
        return self.kind in ("DIFFERENT", "CRASH")

    def __str__(self) -> str:
        files = {name: content for name, content in self.files.items() if name != "tokenizer"}
        return f"{self.number} {self.pipeline}: {files}: {self.kind}: {self.details:.600}"


def _drawn(table: dict[str, tuple[Any, ...]], choose: random.Random) -> Fields:
    values = {name: choose.choice(spellings) for name, spellings in table.items()}
    # Few fields of a published file have an unusual value.
    kept = [name for name in table if choose.random() < 0.4]
    return {name: values[name] for name in kept if values[name] is not ABSENT}


def files_of(number: int) -> tuple[str, dict[str, Any]]:
    """Return a pipeline's name, and the contents of the files of a case."""
    choose = random.Random(number)
    name = choose.choice(sorted(PIPELINES))
    make, classes, model_types = PIPELINES[name]
    tokenizer = make()
    tokenizer.add_tokens(choose.sample(_OWN_TOKENS, choose.randint(0, 3)))
    config = _drawn(_CONFIG, choose) | {"chat_template": TEMPLATE}
    config["tokenizer_class"] = choose.choice(classes)
    files: dict[str, Any] = {
        "tokenizer": json.loads(tokenizer.to_str()),
        "config": {"model_type": choose.choice(model_types)},
        "tokenizer_config": config,
    }
    new_tokens = [text for text in _FURTHER_TOKENS if tokenizer.token_to_id(text) is None]
    first = tokenizer.get_vocab_size()
    where = choose.choice(("nowhere", "decoder", "added tokens"))
    if where == "decoder":
        own = {
            str(index): {"content": token.content, **_FLAGS, "special": token.special}
            for index, token in tokenizer.get_added_tokens_decoder().items()
        }
        further = {
            str(first + i): {"content": text, **_FLAGS, "special": choose.random() < 0.5}
            for i, text in enumerate(new_tokens)
        }
        config["added_tokens_decoder"] = own | further
    elif where == "added tokens":
        files["added_tokens"] = {text: first + i for i, text in enumerate(new_tokens)}
    if choose.random() < 0.5:
        files["special_tokens_map"] = _drawn(_SPECIAL_MAP, choose)
    return name, files


def judge(folder: Path) -> tuple[str, str]:
    """Return the outcome of a folder's tokenizer: equal, refused, or a fault in capitals."""
    try:
        expected = AutoTokenizer.from_pretrained(folder)
        texts = [(text, expected(text)["input_ids"]) for text in TEXTS]
    except Exception as error:  # noqa: BLE001 - whatever transformers raises
        return "not taken by transformers", f"{type(error).__name__}: {error}"
    try:
        prompt = expected.apply_chat_template(
            MESSAGES, return_dict=False, sanitize_control_tokens=True
        )
    except Exception:  # noqa: BLE001 - a message may hold a text that cannot be sanitized
        prompt = None
    try:
        tokenizer = TextTokenizer(folder)
        for text, ids in texts:
            if (actual := tokenizer.encode(text)) != ids:
                return "DIFFERENT", f"{text!r} is {actual}, must be {ids}"
            decoded = expected.decode(ids, skip_special_tokens=True)
            if (spelled := tokenizer.decode(ids)) != decoded:
                return "DIFFERENT", f"{ids} reads {spelled!r}, must read {decoded!r}"
        if tokenizer.vocabulary != expected.get_vocab():
            return "DIFFERENT", "the vocabularies differ"
        if prompt is not None:
            actual = tokenizer.chat.token_ids(MESSAGES, None, None, {})
            if actual != prompt:
                return "DIFFERENT", f"the chat is {actual}, must be {prompt}"
    except InterposerError as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001 - what is to be found
        return "CRASH", f"{type(error).__name__}: {error}"
    return "equal", ""


def compare(first: int, end: int) -> Iterator[Case]:
    """Compare cases by their numbers."""
    for number in range(first, end):
        pipeline, files = files_of(number)
        with tempfile.TemporaryDirectory() as temporary:
            for name, content in files.items():
                (Path(temporary) / f"{name}.json").write_text(json.dumps(content))
            yield Case(number, pipeline, files, *judge(Path(temporary)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("--refusals", action="store_true", help="print what is refused, too")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    counts = Counter[str]()
    for case in compare(arguments.first, arguments.end):
        counts[case.kind] += 1
        if case.is_fault or (arguments.refusals and case.kind != "equal"):
            print(case, flush=True)
    print(dict(counts))
    sys.exit(bool(counts["DIFFERENT"] + counts["CRASH"]))


if __name__ == "__main__":
    main()
