"""Train the small speech model in examples/models/digits-whisper to recognise spoken digits.

The model is a Whisper of about 200,000 parameters and the result is an ordinary Hugging Face
directory. The program espeak-ng speaks the digits; see `spoken_digits.py`. The number of steps is
fixed, not the time, so that a seed means something; an interrupted run goes on from `--checkpoint`.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import spoken_digits as spoken

OUTPUT = Path(__file__).parent / "models" / "digits-whisper"
POSITIONS = 50 * spoken.WINDOW_SECONDS
"""Encoder positions of a window, each of 20 ms; timestamps count them too."""
WINDOW_SAMPLES = spoken.RATE * spoken.WINDOW_SECONDS
END, START, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
SPECIALS = (END, START, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS)
MEL_BINS, CONTEXT = 40, 64
WINDOWS_PER_STEP = 16
STEPS_PER_CHECKPOINT = 100
# Shares of windows that hold noise only, one utterance only, no timestamps, or a text before.
NOISE_ONLY, ONE_ONLY, PLAIN, WITH_CONTEXT = 0.06, 0.4, 0.3, 0.3
MUON_RATE, ADAMW_RATE, WEIGHT_DECAY = 3e-3, 3e-3, 0.01
WARMUP_STEPS, DECAY_SHARE = 50, 0.6
IGNORED = -100
"""Label of tokens that the model is not trained to write."""


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with Whisper's special tokens and timestamps."""
    vocabulary = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    timestamps = [f"<|{0.02 * step:.2f}|>" for step in range(POSITIONS + 1)]
    tokenizer.add_tokens([AddedToken(text, special=False) for text in timestamps])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> WhisperForConditionalGeneration:
    """Return the untrained model in float32, drawn from torch's current seed."""
    ids: Any = tokenizer.convert_tokens_to_ids
    tokens = {
        "decoder_start_token_id": ids(START),
        "bos_token_id": ids(END),
        "eos_token_id": ids(END),
        "pad_token_id": ids(END),
    }
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=MEL_BINS,
        d_model=64,
        encoder_layers=3,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=128,
        max_source_positions=POSITIONS,
        max_target_positions=CONTEXT,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **tokens,
    )
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        is_multilingual=False,
        no_timestamps_token_id=ids(NO_TIMESTAMPS),
        prev_sot_token_id=ids(PREVIOUS),
        max_initial_timestamp_index=POSITIONS // 2,
        suppress_tokens=[ids(text) for text in (START, PREVIOUS, NO_SPEECH)],
        begin_suppress_tokens=[],
        max_length=CONTEXT,
        **tokens,
    )
    return model


class Windows:
    """Draws windows of sound with their tokens.

    Args:
        utterances: Are placed in the windows.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, utterances: list[spoken.Utterance]
    ) -> None:
        self.tokenizer, self.utterances = tokenizer, utterances
        self.extractor = WhisperFeatureExtractor(
            feature_size=MEL_BINS, chunk_length=spoken.WINDOW_SECONDS
        )
        ids: Any = tokenizer.convert_tokens_to_ids
        self.end, self.start, self.previous, self.no_speech, self.no_timestamps = map(ids, SPECIALS)
        self.timestamp: int = ids("<|0.00|>")

    def batch(self, chance: random.Random) -> dict[str, Tensor]:
        """Return the inputs of the model, and labels, for a training step."""
        drawn = [self.window(chance) for _ in range(WINDOWS_PER_STEP)]
        longest = max(len(ids) for _, ids, _ in drawn)
        token_ids = torch.full((len(drawn), longest), self.end)
        labels = torch.full((len(drawn), longest), IGNORED)
        for row, (_, ids, targets) in enumerate(drawn):
            token_ids[row, : len(ids)] = torch.tensor(ids)
            labels[row, : len(ids)] = torch.tensor(targets)
        features = self.features(impaired([samples for samples, _, _ in drawn], chance))
        return {"input_features": features, "decoder_input_ids": token_ids, "labels": labels}

    def features(self, sounds: list[Tensor]) -> Tensor:
        """Return the features ``[B, M, F]`` of sounds ``[S]``."""
        arrays = [samples.numpy() for samples in sounds]
        extracted = self.extractor(arrays, sampling_rate=spoken.RATE, return_tensors="pt")
        features: Tensor = extracted.input_features
        return features

    def window(self, chance: random.Random) -> tuple[Tensor, list[int], list[int]]:
        """Return samples ``[S]``, the decoder's input and its labels of a random window."""
        if chance.random() < NOISE_ONLY:
            # If a timestamp is written all the same, the text ends.
            return (
                torch.zeros(WINDOW_SAMPLES),
                [self.start, self.timestamp],
                [self.no_speech, self.end],
            )
        samples, spans = self._place(chance)
        prompt = [*self._context(chance), self.start]
        if chance.random() < PLAIN:
            prompt.append(self.no_timestamps)
            text = self._text(digits for digits, _, _ in spans)
        else:
            text = []
            for digits, first, last in spans:
                text.append(self.timestamp + first)
                if last <= POSITIONS:
                    text += [*self._text([digits]), self.timestamp + last]
        targets = [*text, self.end]
        token_ids = [*prompt, *text]
        labels = [IGNORED] * (len(prompt) - 1) + targets
        return samples, token_ids, labels

    def _text(self, parts: Any) -> list[int]:
        ids: list[int] = self.tokenizer.encode("".join(f" {digits}" for digits in parts))
        return ids

    def _context(self, chance: random.Random) -> list[int]:
        """Return the tokens of a text before the window, often none."""
        if chance.random() >= WITH_CONTEXT:
            return []
        ids = [self.previous]
        for _ in range(chance.randint(1, 5)):
            first, last = sorted(chance.sample(range(POSITIONS + 1), 2))
            digits = chance.choice(self.utterances).digits
            ids += [self.timestamp + first, *self._text([digits]), self.timestamp + last]
        # The longest context of a transcriber is half of the decoder's.
        return ids[:1] + ids[1:][-chance.randint(1, CONTEXT // 2 - 1) :]

    def _place(self, chance: random.Random) -> tuple[Tensor, list[tuple[str, int, int]]]:
        """Return a sound and its utterances: digits, first and last position.

        The window may cut off the last utterance, which then ends after the last position.
        """
        samples = torch.zeros(WINDOW_SAMPLES)
        spans: list[tuple[str, int, int]] = []
        only_one = chance.random() < ONE_ONLY
        at = 0
        while True:
            utterance = chance.choice(self.utterances)
            spoken_samples = faster(utterance.samples, chance.uniform(0.92, 1.08))
            at += round(chance.uniform(0.15 if spans else 0.0, 0.8) * spoken.RATE)
            if not spans:
                at = max(0, min(at, WINDOW_SAMPLES - len(spoken_samples)))
            if at >= WINDOW_SAMPLES:
                break
            part = spoken_samples[: WINDOW_SAMPLES - at] * chance.uniform(0.5, 1)
            samples[at : at + len(part)] = part
            first, last = at, at + len(spoken_samples)
            if not spans:
                last = min(last, WINDOW_SAMPLES)
            steps = [round(sample * POSITIONS / WINDOW_SAMPLES) for sample in (first, last)]
            spans.append((utterance.digits, steps[0], steps[1]))
            at = last
            if only_one or last > WINDOW_SAMPLES:
                break
        if not only_one or chance.random() < 0.5:
            return samples, spans
        # The sound ends soon, and the extractor fills the window with zeros.
        return samples[: min(at + chance.randint(0, spoken.RATE // 2), WINDOW_SAMPLES)], spans


def faster(samples: Tensor, factor: float) -> Tensor:
    """Return a sound ``[S]`` that is ``factor`` times as fast and as high."""
    size = round(len(samples) / factor)
    return functional.interpolate(samples[None, None], size, mode="linear")[0, 0]


def impaired(sounds: list[Tensor], chance: random.Random) -> list[Tensor]:
    """Return sounds ``[S]`` as poor recordings have them: quiet, noisy, narrow or coarse."""
    batch = torch.stack([functional.pad(x, (0, WINDOW_SAMPLES - len(x))) for x in sounds])
    # Telephones and many files have no frequencies above 4,000 Hz.
    spectrum = torch.fft.rfft(batch)
    narrow = torch.tensor([chance.random() < 0.4 for _ in sounds])
    spectrum[narrow, WINDOW_SAMPLES * 4000 // spoken.RATE :] = 0
    batch = torch.fft.irfft(spectrum, WINDOW_SAMPLES)
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    noise = torch.randn(batch.shape, generator=generator)
    levels = [10 ** chance.uniform(-4.5, -1.7) if chance.random() < 0.7 else 0.0 for _ in sounds]
    batch += noise * torch.tensor(levels)[:, None]
    batch *= torch.tensor([10 ** chance.uniform(-1, 0.3) for _ in sounds])[:, None]
    largest = torch.tensor([chance.choice((2**7, 2**15, 2**15)) for _ in sounds])[:, None]
    batch = (batch * largest).round().maximum(-largest).minimum(largest) / largest
    return [row[: len(samples)] for row, samples in zip(batch, sounds, strict=True)]


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the labelled tokens."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def rate(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: warm-up, plateau, linear to zero."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (DECAY_SHARE * steps))


def new_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for all other parameters."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hidden = parameter.ndim == 2 and "embed" not in name
            (matrices if hidden else others).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=MUON_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def export(model: Any, windows: Windows, output: Path) -> None:
    """Write the model in bfloat16; a reader sees every file either as it was or complete."""
    output.mkdir(parents=True, exist_ok=True)
    copy = WhisperForConditionalGeneration(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    with tempfile.TemporaryDirectory(dir=output.parent) as temporary:
        copy.bfloat16().save_pretrained(temporary)
        windows.tokenizer.save_pretrained(temporary)
        windows.extractor.save_pretrained(temporary)
        # The class by the name that older releases of transformers know too.
        named = Path(temporary, "tokenizer_config.json")
        named.write_text(named.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
        for file in Path(temporary).iterdir():
            file.chmod(0o644)  # temporary files are private to their owner
            file.replace(output / file.name)


def training_utterances(count: int, file: Path | None) -> list[spoken.Utterance]:
    """Return the utterances of the training, from ``file`` if it exists; else write it."""
    if file and file.exists():
        stored = torch.load(file)
        return [spoken.Utterance(digits, samples.float() / 2**15) for digits, samples in stored]
    utterances = spoken.speak_all(spoken.TRAINING, (f"training {i}" for i in range(count)))
    if file:
        pairs = [(each.digits, (each.samples * (2**15 - 1)).short()) for each in utterances]
        torch.save(pairs, file)
        # Return the rounded samples of the file, so that a repeated training has equal sounds.
        return training_utterances(count, file)
    return utterances


def train(args: argparse.Namespace) -> None:
    """Train, and leave the model in `args.output`."""
    torch.manual_seed(args.seed)
    begun = time.monotonic()
    utterances = training_utterances(args.utterances, args.sounds)
    print(f"{len(utterances)} utterances, {time.monotonic() - begun:.0f} s", flush=True)
    tokenizer = new_tokenizer()
    windows = Windows(tokenizer, utterances)
    model = new_model(tokenizer)
    optimizers = new_optimizers(model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    size = sum(p.numel() for p in model.parameters())
    print(f"{size} parameters, {len(tokenizer)} tokens, seed {args.seed}", flush=True)
    done, spent = 0, 0.0
    if args.checkpoint and args.checkpoint.exists():
        state: dict[str, Any] = torch.load(args.checkpoint)
        done, spent = state["done"], state["spent"]
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    begun = time.monotonic() - spent
    while done < args.steps:
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(done, args.steps)
        loss = loss_of(model, windows.batch(random.Random(f"{args.seed} {done}")))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if done % 20 == 0:
            print(
                f"step {done} loss {loss.item():.4f} {time.monotonic() - begun:.0f} s", flush=True
            )
        done += 1
        if args.checkpoint and done % STEPS_PER_CHECKPOINT == 0:
            state = {
                "done": done,
                "spent": time.monotonic() - begun,
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            }
            torch.save(state, args.checkpoint.with_suffix(".part"))
            args.checkpoint.with_suffix(".part").replace(args.checkpoint)
            export(model, windows, args.output)
    export(model, windows, args.output)
    print(f"{done} steps of {WINDOWS_PER_STEP} windows, {time.monotonic() - begun:.0f} s")


def evaluate(directory: Path, count: int) -> None:
    """Print the share of exact texts for held-out voices, one utterance in a window."""
    model: Any = WhisperForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    for group, voices in spoken.HELD_OUT.items():
        utterances = spoken.speak_all(voices, (f"{group} {i}" for i in range(count)))
        features = Windows(tokenizer, utterances).features([each.samples for each in utterances])
        with torch.inference_mode():
            written = model.generate(features, return_timestamps=False, max_new_tokens=8)
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        exact = sum(text.strip() == u.digits for text, u in zip(texts, utterances, strict=True))
        print(f"{group}: {exact} of {count} texts exact, {exact / count:.1%}", flush=True)


def main() -> None:
    """Train and measure, or only measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="model directory")
    parser.add_argument("--steps", type=int, default=2400, help="of 16 windows each")
    parser.add_argument("--utterances", type=int, default=4000, help="number of training sounds")
    parser.add_argument("--sounds", type=Path, help="file that keeps the training sounds")
    parser.add_argument("--checkpoint", type=Path, help="file to save to and to go on from")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eval-only", action="store_true", help="measure the model in --output")
    parser.add_argument("--held-out", type=int, default=300, help="sounds of each held-out group")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.eval_only:
        train(args)
    evaluate(args.output, args.held_out)


if __name__ == "__main__":
    main()
