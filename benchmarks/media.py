"""Images and speech beside transformers, on the same random weights.

    python benchmarks/media.py DIR [--rounds 5] [--threads 2] [--only images speech]

Images: a Llava with CLIP-L/14 at 336 pixels and the text model of Qwen2-0.5B, in bfloat16. Rows are
the vectors of an image, the first token behind an image and a text of 20 tokens, the tokens after
it, and eight such requests at once. Speech: Whisper base in float32, 28 seconds of noise, greedy; a
random model writes as many tokens as a window can hold.

Both libraries compute in this process, in an order that alternates; figures are medians over the
rounds, with the lowest and the highest, and ratios medians of those within a round. Greedy tokens
are compared first. DIR keeps the checkpoints.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from interposer_engine import LanguageModel, Media, load

IMAGE, PATCHES = "<image>", 576
NEW_TOKENS, BATCH = 32, 8
SECONDS, RATE = 28, 16000
TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<image>{% endif %}{% endfor %}{% endfor %}"
)
WHISPER_TOKENS = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>")
Call = Callable[[], object]


def write_tokenizer(folder: Path, size: int, specials: dict[str, int]) -> None:
    """Write a tokenizer in which every token has a text."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = {number: text for text, number in specials.items()}
    names = [*symbols, *(texts.get(n, f"<{n}>") for n in range(len(symbols), size))]
    tokenizer = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_llava(folder: Path) -> None:
    """Write the vision-language checkpoint with its processor and a chat template."""
    text = transformers.Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
        projection_dim=768,
    )
    make: Any = transformers.LlavaConfig
    config = make(
        text_config=text,
        vision_config=vision,
        image_token_id=151935,
        image_seq_length=PATCHES,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlavaForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder, text.vocab_size, {IMAGE: 151935})
    pictures = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 336},
        "crop_size": {"height": 336, "width": 336},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures), encoding="utf-8")
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    (folder / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def write_whisper(folder: Path) -> None:
    """Write Whisper base with its feature extractor and the tokens that decoding needs."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        vocab_size=51865,
        init_std=0.05,
    )
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    numbers = [50257, 50258, 50259, 50359]
    tokens = {**dict(zip(WHISPER_TOKENS, numbers, strict=True)), "<|notimestamps|>": 50363}
    write_tokenizer(folder, config.vocab_size, tokens)
    generation = {
        "decoder_start_token_id": 50258,
        "eos_token_id": 50257,
        "pad_token_id": 50257,
        "bos_token_id": 50257,
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": 50259},
        "task_to_id": {"transcribe": 50359},
        "no_timestamps_token_id": 50363,
        "begin_suppress_tokens": [220, 50257],
        "suppress_tokens": [50257, 50258],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")


def picture(seed: int) -> bytes:
    """Return a PNG file of random colours that vary smoothly."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((640, 480), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def seconds(call: Call) -> float:
    """Return the duration of a call in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(name: str, ours: Callable[[int], Call], theirs: Callable[[int], Call], n: int) -> None:
    """Print medians of both libraries; each round has an input of its own."""
    rows: list[tuple[float, float]] = []
    for number in range(n + 1):  # the first round warms up
        calls = [(0, ours(number)), (1, theirs(number))]
        times = {who: seconds(call) for who, call in (calls if number % 2 else calls[::-1])}
        rows.append((times[0], times[1]))
    rows = rows[1:]
    parts = []
    for label, column in zip(("interposer", "transformers"), zip(*rows, strict=True), strict=True):
        low, middle, high = (1e3 * f(column) for f in (min, statistics.median, max))
        parts.append(f"{label} {middle:.0f} ({low:.0f}-{high:.0f})")
    ratio = statistics.median(b / a for a, b in rows)
    print(f"{name}, ms: {', '.join(parts)}, x{ratio:.2f}", flush=True)


class Images:
    """Requests with an image each, for both libraries."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").exists():
            write_llava(folder)
        self.lm: LanguageModel = load(folder, "bfloat16", max_sequences=BATCH, cache_tokens=8192)
        self.model: Any = transformers.LlavaForConditionalGeneration.from_pretrained(
            folder, dtype=torch.bfloat16
        ).eval()
        self.processor: Any = transformers.AutoProcessor.from_pretrained(folder)

    def text(self, seed: int) -> str:
        """Return a text of 20 tokens."""
        return "".join(f"<{number}>" for number in range(1000 + seed, 1020 + seed))

    def ours(self, seeds: range, new_tokens: int) -> list[list[int]]:
        """Return the new tokens of one request for each picture."""
        prompts = [
            self.lm.media_prompt(IMAGE + self.text(seed), [Media("image", picture(seed))])
            for seed in seeds
        ]
        settings: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": new_tokens}
        return [list(c.token_ids) for c in self.lm.generate(prompts, **settings)]

    def theirs(self, seeds: range, new_tokens: int) -> list[list[int]]:
        """Return the same by transformers."""
        pictures = [[Image.open(io.BytesIO(picture(seed)))] for seed in seeds]
        texts = [IMAGE + self.text(seed) for seed in seeds]
        inputs = self.processor(images=pictures, text=texts, return_tensors="pt")
        inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
        length = inputs["input_ids"].shape[1]
        out = self.model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        tokens: list[list[int]] = out[:, length:].tolist()
        return tokens

    def encode_theirs(self, seed: int) -> None:
        """Compute the vectors of a picture by transformers."""
        image = Image.open(io.BytesIO(picture(seed)))
        inputs = self.processor.image_processor(image, return_tensors="pt")
        self.model.get_image_features(inputs["pixel_values"].to(torch.bfloat16))

    def run(self, rounds: int) -> None:
        """Print all rows."""
        one = range(1)
        same = [a == b for a, b in zip(self.ours(one, 8)[0], self.theirs(one, 8)[0], strict=True)]
        print(f"first tokens that are equal in bfloat16: {sum(same)} of {len(same)}")
        length = len(self.lm.tokenizer.encode(IMAGE + self.text(0)))
        print(f"prompt: {length} tokens, one of which is an image of {PATCHES} tokens")

        def row(name: str, count: int, new_tokens: int, first: int) -> None:
            """Print a row of whole requests; each round has new pictures."""

            def seeds(number: int) -> range:
                return range(first + count * number, first + count * (number + 1))

            compare(
                name,
                lambda n: lambda: self.ours(seeds(n), new_tokens),
                lambda n: lambda: self.theirs(seeds(n), new_tokens),
                rounds,
            )

        compare(
            "vectors of an image",
            lambda n: lambda: self.lm.media_prompt(IMAGE, [Media("image", picture(10_000 + n))]),
            lambda n: lambda: self.encode_theirs(10_000 + n),
            rounds,
        )
        row("first token behind an image", 1, 1, 20_000)
        row(f"an image, then {NEW_TOKENS} tokens", 1, NEW_TOKENS, 30_000)
        row(f"{BATCH} requests with an image, {NEW_TOKENS} tokens each", BATCH, NEW_TOKENS, 40_000)


def speech(folder: Path, rounds: int) -> None:
    """Print the row of Whisper."""
    if not (folder / "config.json").exists():
        write_whisper(folder)
    lm = load(folder, "float32", cache_tokens=4096, max_sequences=2)
    model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    extract: Any = transformers.WhisperFeatureExtractor.from_pretrained(folder)

    def sound(seed: int) -> Any:
        noise = np.random.default_rng(seed).standard_normal(SECONDS * RATE)
        return (0.1 * noise).astype(np.float32)

    settings: dict[str, Any] = {
        "language": "en",
        "timestamps": False,
        "temperature": 0.0,
        "compression_ratio_threshold": None,
        "logprob_threshold": None,
        "no_speech_threshold": None,
        "condition_on_previous": False,
    }

    def ours(seed: int) -> tuple[int, ...]:
        segments = lm.transcribe(sound(seed), sampling_rate=RATE, **settings).segments
        return tuple(token for segment in segments for token in segment.token_ids)

    def theirs(seed: int) -> list[int]:
        features = extract(sound(seed), sampling_rate=RATE, return_tensors="pt").input_features
        tokens: list[int] = model.generate(
            features, language="en", task="transcribe", do_sample=False, max_new_tokens=224
        )[0].tolist()
        return tokens

    mine, other = ours(0), theirs(0)
    other = [token for token in other if token not in (50257, 50258, 50259, 50359, 50363)]
    same = sum(a == b for a, b in zip(mine, other, strict=False))
    print(f"equal tokens: {same} of {len(mine)} and {len(other)}")
    compare(f"{SECONDS} s of sound", lambda n: lambda: ours(n), lambda n: lambda: theirs(n), rounds)


def main() -> None:
    """Run the rows that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=["images", "speech"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    chosen = options.only or ["images", "speech"]
    with torch.inference_mode():
        if "images" in chosen:
            (options.directory / "llava").mkdir(parents=True, exist_ok=True)
            Images(options.directory / "llava").run(options.rounds)
        if "speech" in chosen:
            (options.directory / "whisper").mkdir(parents=True, exist_ok=True)
            speech(options.directory / "whisper", options.rounds)


if __name__ == "__main__":
    main()
