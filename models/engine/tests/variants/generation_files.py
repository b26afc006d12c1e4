"""Compare the answers that varied generation_config.json files ask for with those of transformers.

    python generation_files.py FIRST END [--keep FOLDER] [--refusals]

As ``compare.py``. A case takes one value of some fields in the tables below; the numbers FIRST to
END - 1 name cases, each of which is the same in every run. To extend the tester with a new report,
add a value to a table. Tokens, texts and suggested settings must be those of transformers. A
setting that is not applied must be named in the model's notes, and is left out of the comparison;
a refusal must name the file.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[4]))

from models.engine.tests.variants.compare import Comparison, Outcome, draw_weights, run

from interposer import explain
from interposer.errors import InterposerError
from interposer_engine import LanguageModel, load

ABSENT = object()
Fields = dict[str, Any]

VOCABULARY = 64
NUM_NEW = 12
PROMPT = [3, 14, 15, 9, 2, 6]
SUGGESTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# The sentence by which a note names the settings that are not applied.
_NAMED = re.compile(r"that are not applied.*: (.*)")


@functools.cache
def base() -> tuple[Path, list[int]]:
    """Return the folder of the model, and its greedy answer without an end token."""
    folder = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
    }
    ids = {"bos_token_id": 1, "eos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **ids)).eval()  # type: ignore[arg-type]
    draw_weights(model, 7)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    answer: Any = model.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_NEW, do_sample=False)
    return folder, answer[0, len(PROMPT) :].tolist()


def tables() -> tuple[dict[str, tuple[Any, ...]], dict[str, tuple[Any, ...]], tuple[Any, ...]]:
    """Return the values of generation_config.json, of config.json, and of the tokenizer's file."""
    answer = base()[1]
    early, late = answer[2], answer[7]
    never = next(token for token in range(10, VOCABULARY) if token not in answer)
    tokens: tuple[Any, ...] = (
        ABSENT,
        None,
        early,
        late,
        never,
        [late],
        [late, early],
        [never, late],
        [],
        10**6,
    )
    no_tokens = (True, -1, 10**9, str(early), [early, None], 3.0, {"id": early})
    ends: tuple[Any, ...] = (*tokens * 4, *no_tokens)
    generation: dict[str, tuple[Any, ...]] = {
        "eos_token_id": ends,
        "bos_token_id": (ABSENT, 1, None, early, "1"),
        "pad_token_id": (ABSENT, 0, None, early, late, -1, [0]),
        "decoder_start_token_id": (ABSENT, 1, None),
        "do_sample": (ABSENT, True, True, True, False, None, 1, 0, "true"),
        "temperature": (ABSENT, 0.7, 1, 1.0, 0, None, "0.7", True, -1.0),
        "top_k": (ABSENT, 20, 1, 0, 50, None, "20", 20.0, -1),
        "top_p": (ABSENT, 0.8, 1.0, 1, None, 0.0, 1.5, "0.8"),
        "min_p": (ABSENT, 0.05, 0, None, 2.0, [0.1]),
        "typical_p": (ABSENT, 0.9, 1.0, None),
        "epsilon_cutoff": (ABSENT, 0.01, 0.0),
        "eta_cutoff": (ABSENT, 0.01, 0.0),
        "top_h": (ABSENT, 0.4, None),
        "repetition_penalty": (ABSENT, 1.3, 1.05, 5, 1.0, 1, None, 0.5, "1.1", -1.0, 0),
        "encoder_repetition_penalty": (ABSENT, 1.0, 1.5),
        "no_repeat_ngram_size": (ABSENT, 2, 1, 0, None),
        "bad_words_ids": (ABSENT, None, [[early]], [[answer[0], answer[1]]]),
        "sequence_bias": (ABSENT, None, [[[early], -20.0]]),
        "suppress_tokens": (ABSENT, None, [], [early], [answer[0]]),
        "begin_suppress_tokens": (ABSENT, None, [], [answer[0]]),
        "forced_bos_token_id": (ABSENT, None, 5),
        "forced_eos_token_id": (ABSENT, None, late),
        "min_new_tokens": (ABSENT, None, 0, 10),
        "min_length": (ABSENT, None, 0, 16),
        "max_length": (ABSENT, None, 20, 8, 4096),
        "max_new_tokens": (ABSENT, None, 3, 512),
        "num_beams": (ABSENT, 1, 3, None),
        "num_return_sequences": (ABSENT, 1),
        "length_penalty": (ABSENT, 1.0, 2.0),
        "early_stopping": (ABSENT, True, False),
        "renormalize_logits": (ABSENT, True, False),
        "remove_invalid_values": (ABSENT, True, False),
        "exponential_decay_length_penalty": (ABSENT, None, [2, 4.0]),
        "stop_strings": (ABSENT, None, [], f"w{early}", [f"w{late}"]),
        "guidance_scale": (ABSENT, None, 1.0, 1.5),
        "use_cache": (ABSENT, True, False, None),
        "cache_implementation": (ABSENT, None, "hybrid", "static"),
        "output_scores": (ABSENT, True),
        "return_dict_in_generate": (ABSENT, False),
        "transformers_version": (ABSENT, "4.38.0"),
        "_from_model_config": (ABSENT, True, False),
        "chat_format": (ABSENT, "chatml"),
        "trust_remote_code": (ABSENT, True),
    }
    names = (
        *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "num_beams"),
        *("no_repeat_ngram_size", "suppress_tokens", "min_length", "bos_token_id"),
    )
    config = {"eos_token_id": ends, **{name: generation[name] for name in names}}
    return generation, config, (ABSENT, ABSENT, f"w{early}", f"w{late}", "unheard-of", None)


def _drawn(table: dict[str, tuple[Any, ...]], share: float, choose: random.Random) -> Fields:
    values = {name: choose.choice(spellings) for name, spellings in table.items()}
    kept = [name for name in table if choose.random() < share]
    return {name: values[name] for name in kept if values[name] is not ABSENT}


def files_of(number: int) -> dict[str, Any]:
    """Return the contents of the files of a case by name, of config.json only the changes."""
    choose = random.Random(number)
    generation, config, end_texts = tables()
    common = {name: generation[name] for name in ("eos_token_id", "do_sample", *SUGGESTED)}
    files: dict[str, Any] = {"config": _drawn(config, choose.choice((0, 0.15)), choose)}
    if choose.random() < 0.5:
        files["config"] |= {"eos_token_id": choose.choice(config["eos_token_id"][:8])}
    if choose.random() < 0.85:
        files["generation_config"] = _drawn(generation, 0.05, choose) | _drawn(common, 0.4, choose)
    if (text := choose.choice(end_texts)) is not ABSENT:
        files["tokenizer_config"] = {"eos_token": text}
    for fields in files.values():
        for name, value in [*fields.items()]:
            if value is ABSENT:
                del fields[name]
    return files


def write(folder: Path, files: dict[str, Any]) -> None:
    """Write the checkpoint of a case."""
    shutil.copytree(base()[0], folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name, fields in files.items():
        whole = config | fields if name == "config" else fields
        (folder / f"{name}.json").write_text(json.dumps(whole), encoding="utf-8")


def end_tokens(files: dict[str, Any]) -> list[int] | None:
    """Return the end tokens by the rule of docs/models.md, None without any.

    transformers does not look beyond the first file there is.
    """
    for name in ("generation_config", "config"):
        value = files.get(name, {}).get("eos_token_id")
        if value is not None:
            return list(value) if isinstance(value, list | tuple) else [value]
    text = files.get("tokenizer_config", {}).get("eos_token")
    known = {f"w{i}": i for i in range(VOCABULARY)}
    return [known[text]] if text in known else None


def judge(folder: Path, files: dict[str, Any]) -> Outcome:
    """Return the outcome of a checkpoint: equal, refused, or a fault in capital letters."""
    reason = None
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises
        reason = f"{type(error).__name__}: {error}"
    try:
        lm = load(folder, "float32", platform="cpu", cache_tokens=64, max_sequences=1)
        suggested = lm.suggested
        greedy = {**suggested, "temperature": 0.0, "max_new_tokens": NUM_NEW}
        (completion,) = lm.generate([PROMPT], **greedy)
    except InterposerError as error:
        return Outcome("refused" if str(folder) in str(error) else "NAMELESS", str(error))
    except Exception as error:  # noqa: BLE001 - what is to be found
        return Outcome("CRASH", f"{type(error).__name__}: {error}")
    if reason is not None:
        return Outcome("not taken by transformers", reason)
    settings = copy.deepcopy(model.generation_config)
    ends = end_tokens(files)
    try:
        new = reference(model, ends, unapplied(lm), tokenizer)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises
        return Outcome("not taken by transformers", f"{type(error).__name__}: {error}")
    stated = {name: getattr(settings, name) for name in SUGGESTED}
    if settings.do_sample is not True:
        stated = {"repetition_penalty": stated["repetition_penalty"]}
    elif stated["temperature"] is None:
        stated["temperature"] = 1.0
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    if settings.do_sample is not True:
        neutral["temperature"] = 0.0
    expected = {n: v for n, v in stated.items() if v is not None and v != neutral.get(n)}
    actual = {n: v for n, v in suggested.items() if v != neutral.get(n)}
    if actual != expected:
        return Outcome("DIFFERENT", f"suggested is {actual}, must be {expected}")
    if list(completion.token_ids) != new:
        return Outcome("DIFFERENT", f"tokens are {completion.token_ids}, must be {new}")
    ended = bool(ends) and new[-1] in (ends or ())
    if completion.finish_reason != ("stop" if ended else "length"):
        return Outcome("DIFFERENT", f"the answer {new} ended with {completion.finish_reason!r}")
    text = tokenizer.decode(new[:-1] if ended else new, skip_special_tokens=True)
    if completion.text != text:
        return Outcome("DIFFERENT", f"the text is {completion.text!r}, must be {text!r}")
    return Outcome("equal", "")


def unapplied(lm: LanguageModel) -> set[str]:
    """Return the settings that the model's notes name as not applied."""
    named = [found[1] for note in explain(lm).notes if (found := _NAMED.search(note))]
    return set(re.findall(r"(?:^|, )([a-z_]+) ", ", ".join(named)))


def reference(model: Any, ends: list[int] | None, left_out: set[str], tokenizer: Any) -> list[int]:
    """Return the greedy answer of transformers without the settings that are left out."""
    settings = model.generation_config
    for name in left_out:
        setattr(settings, name, None)
    settings.do_sample = False  # what is drawn is compared by the settings alone
    settings.max_length = settings.max_new_tokens = None  # the caller states lengths
    settings.eos_token_id = ends
    answer = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        max_new_tokens=NUM_NEW,
        pad_token_id=0,
        tokenizer=tokenizer,
    )
    answer = getattr(answer, "sequences", answer)
    new: list[int] = answer[0, len(PROMPT) :].tolist()
    return new


def compare(first: int, end: int) -> Iterator[Comparison]:
    """Compare cases by their numbers, each in a folder that its reader may copy."""
    for number in range(first, end):
        files = files_of(number)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "checkpoint"
            write(folder, files)
            changes = [f"{name}.json: {fields}" for name, fields in files.items()]
            yield Comparison(number, "llama", changes, judge(folder, files), folder)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run(compare, str(__doc__))
