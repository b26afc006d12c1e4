"""Compare the models of varied checkpoints with those of transformers.

    python compare.py FIRST END [--adapt] [--keep FOLDER]

Prints each checkpoint that is loaded with other results or raises an undocumented error, and the
counts. The numbers FIRST to END - 1 name configurations: each is the same in every run.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[4]))

from models.engine.tests.variants.variations import numbered
from models.tests.family_checkpoints import family_configs

from interposer.errors import InterposerError
from interposer_adapt import adapt
from interposer_engine import LanguageModel, SamplingParams, load

# Longer than every window, chunk and number of selected tokens of the examples.
PROMPT = [(7 * i * i + 3 * i + 1) % 60 for i in range(48)]
# Logits of both in float32 differ by some 1e-6 of the largest; another rule changes them by 1e-2.
BOUND = 2e-4
NUM_NEW = 6
_START = torch.tensor([[3, 9, 4]])  # of a decoder behind an encoder

Difference = tuple[str, float]
"""What is compared, and the largest difference over the largest logit."""
Differences = Callable[[Path, PreTrainedModel], Iterator[Difference]]


@dataclass(frozen=True)
class Outcome:
    """What became of a configuration, and the details of a fault or refusal."""

    kind: str
    details: str

    @property
    def is_fault(self) -> bool:
        """Whether a checkpoint was computed otherwise, or refused without a documented reason."""
        return self.kind.isupper()


@dataclass(frozen=True)
class Comparison:
    """One configuration: its number, the example it varies, how, and what became of it."""

    number: int
    example: str
    changes: list[str]
    outcome: Outcome
    folder: Path

    def __str__(self) -> str:
        details = self.outcome.details.replace(str(self.folder), "")[:600]
        changes = "; ".join(self.changes)
        return f"{self.number} {self.example}: {changes}: {self.outcome.kind}: {details}"


@functools.cache
def base_configs() -> dict[str, dict[str, Any]]:
    """Return config.json of each family as transformers writes it, by the example's name."""
    configs = dict[str, dict[str, Any]]()
    for name, config in family_configs():
        model = getattr(transformers, config["architectures"][0], None)
        # Configurations are compared by the logits of a text, not of a sound.
        if model is not None and model.main_input_name == "input_ids":
            written = model.config_class(**config).to_diff_dict()
            written["architectures"] = config["architectures"]
            configs[name] = {k: v for k, v in written.items() if k != "transformers_version"}
    return configs


def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Give a model weights that let every part of it matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            drawn *= 1.0 / parameter.shape[-1] ** 0.5
        elif "norm" in name and name.endswith("weight"):
            drawn = 1 + 0.1 * drawn
        else:
            drawn *= 0.1
        parameter.data.copy_(drawn)


def write(folder: Path, config: dict[str, Any], seed: int) -> PreTrainedModel:
    """Write a checkpoint with exactly this config.json; return the model that transformers loads.

    Raises: Exception: of any type, where transformers takes the configuration not.
    """
    model_class = getattr(transformers, config["architectures"][0])
    text = json.dumps(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text, encoding="utf-8")
    model = model_class(model_class.config_class.from_pretrained(folder)).float()
    draw_weights(model, seed)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text, encoding="utf-8")
    loaded: PreTrainedModel = model_class.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for (name, saved), read in zip(model.named_parameters(), loaded.parameters(), strict=True):
        if not torch.equal(saved, read):
            # As with rescale_prenorm_residual of Mamba 2, which is meant for new weights.
            raise ValueError(f"transformers changes {name} of a checkpoint while it loads")
    return loaded


def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Return the logits after each token, ``[T, V]``."""
    inputs = {"decoder_input_ids": _START} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        out = model(torch.tensor([token_ids]), use_cache=False, **inputs)
    logits: torch.Tensor = out.logits[0]
    return logits


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return ((logits - expected).abs().max() / expected.abs().max()).item()


def differences_of_load(folder: Path, model: PreTrainedModel) -> Iterator[Difference]:
    """Compare the loaded model, in one step and as its engine decodes."""
    lm = load(folder, "float32", platform="cpu", cache_tokens=128, max_sequences=1)
    if model.config.is_encoder_decoder:
        yield from _differences_of_decoding(lm, model)
        return
    yield "logits", relative_difference(lm.logits(PROMPT), reference_logits(model, PROMPT))
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    (completion,) = lm.generate([PROMPT], params)
    new = list(completion.token_ids)
    expected = reference_logits(model, PROMPT + new)[-NUM_NEW - 1 : -1]
    # A tie may be broken either way: the token must be one of the best.
    behind = expected.max(-1).values - expected[range(NUM_NEW), new]
    yield "decoded tokens", (behind.max() / expected.abs().max()).item()


def _differences_of_decoding(lm: LanguageModel, model: PreTrainedModel) -> Iterator[Difference]:
    """Compare the tokens that a decoder behind an encoder starts with, and adds."""
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    (completion,) = lm.generate([PROMPT], params)
    new = list(completion.token_ids)
    source: Any = torch.tensor([PROMPT])
    generated: Any = model.generate(source, max_new_tokens=1, do_sample=False)  # type: ignore[operator]
    start = generated[0].tolist()[:-1]
    yield "start tokens", float(list(lm.engine.start_token_ids) != start)
    with torch.no_grad():
        out = model(source, decoder_input_ids=torch.tensor([start + new]), use_cache=False)
    expected = out.logits[0][-NUM_NEW - 1 : -1]
    behind = expected.max(-1).values - expected[range(NUM_NEW), new]
    yield "decoded tokens", (behind.max() / expected.abs().max()).item()


def differences_of_adapt(folder: Path, model: PreTrainedModel) -> Iterator[Difference]:
    """Compare a model of transformers before and after ``adapt``."""
    expected = reference_logits(model, PROMPT)
    adapted = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    adapt(adapted)
    yield "logits of adapt", relative_difference(reference_logits(adapted, PROMPT), expected)


def judge(folder: Path, config: dict[str, Any], seed: int, differences: Differences) -> Outcome:
    """Return the outcome of a configuration: equal, refused, or a fault in capital letters."""
    try:
        model = write(folder, config, seed)
        reference_logits(model, PROMPT)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises
        return Outcome("not taken by transformers", f"{type(error).__name__}: {error}")
    try:
        for subject, difference in differences(folder, model):
            if not difference < BOUND:
                return Outcome("DIFFERENT", f"{subject} differ by {difference:.2g} of the largest")
    except InterposerError as error:
        return Outcome("refused", str(error))
    except Exception as error:  # noqa: BLE001 - what is to be found
        return Outcome("CRASH", f"{type(error).__name__}: {error}")
    return Outcome("equal", "")


def compare(first: int, end: int, differences: Differences) -> Iterator[Comparison]:
    """Compare configurations by their numbers, each in a folder that its reader may copy."""
    for number, (name, config, changes) in enumerate(numbered(base_configs(), end)):
        if number >= first:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary) / "checkpoint"
                outcome = judge(folder, config, number, differences)
                if outcome.kind == "DIFFERENT":
                    # Rounding may choose between two experts of nearly the same score. Other
                    # weights have no such tie, and another rule differs with them as well.
                    outcome = judge(folder, config, number + 2**16, differences)
                yield Comparison(number, name, changes, outcome, folder)


def run(compare_numbers: Callable[[int, int], Iterator[Comparison]], description: str) -> None:
    """Compare the numbers of the command line, and end with 1 if one of them is at fault."""
    parser = argument_parser(description)
    arguments = parser.parse_args()
    _report(compare_numbers(arguments.first, arguments.end), arguments)


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of the options that all comparisons have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("--keep", type=Path, help="where to leave checkpoints that are at fault")
    parser.add_argument("--refusals", action="store_true", help="print what is refused, too")
    return parser


def _report(comparisons: Iterator[Comparison], arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("interposer").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    counts = Counter[str]()
    for comparison in comparisons:
        kind = comparison.outcome.kind
        counts[kind] += 1
        if comparison.outcome.is_fault or (arguments.refusals and kind == "refused"):
            print(comparison, flush=True)
        if comparison.outcome.is_fault and arguments.keep:
            kept = arguments.keep / str(comparison.number)
            shutil.copytree(comparison.folder, kept, dirs_exist_ok=True)
    print(dict(counts))
    sys.exit(any(kind.isupper() for kind in counts))


def main() -> None:
    parser = argument_parser(str(__doc__))
    parser.add_argument("--adapt", action="store_true", help="compare adapted models")
    arguments = parser.parse_args()
    differences = differences_of_adapt if arguments.adapt else differences_of_load
    _report(compare(arguments.first, arguments.end, differences), arguments)


if __name__ == "__main__":
    main()
