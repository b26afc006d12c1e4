"""Train the small vision-language model in examples/models/digits-vl to read digits.

The model is a Qwen2-VL of about 300,000 parameters and the result is an ordinary Hugging Face
directory. Pictures are drawn while it trains, and never repeat. The number of steps is fixed, not
the time, so that a seed means something; an interrupted run goes on from `--checkpoint`.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

import digit_pictures as pictures

OUTPUT = Path(__file__).parent / "models" / "digits-vl"
END, START, IMAGE, VISION_START, VISION_END = (
    "<|im_end|>",
    "<|im_start|>",
    "<|image_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
)
SPECIALS = (END, START, IMAGE, VISION_START, VISION_END)
# Frequent texts of the conversation, so that a prompt has few tokens.
WORDS = ("user", "assistant", "Which", "Ġdigits", ",Ġ")
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == "text" %}{{ part.text }}
{%- else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CONTEXT = 512
PATCH_SIZE, MERGE_SIZE = 8, 2
# Pictures are scaled to between 4 and 18 tokens of 16 x 16 pixels.
PICTURE_SIZE = {"shortest_edge": 1024, "longest_edge": 4608}
PICTURES_PER_STEP = 32
SHARE_OF_PAIRS = 0.2
MUON_RATE, ADAMW_RATE, WEIGHT_DECAY = 3e-3, 3e-3, 0.01
WARMUP_STEPS, DECAY_SHARE = 50, 0.5


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer: each digit is a token."""
    vocabulary = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def new_image_processor() -> Qwen2VLImageProcessorPil:
    """Return the processor of pictures."""
    return Qwen2VLImageProcessorPil(
        size=PICTURE_SIZE,
        patch_size=PATCH_SIZE,
        merge_size=MERGE_SIZE,
        temporal_patch_size=1,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.25, 0.25, 0.25],
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLForConditionalGeneration:
    """Return the untrained model in float32, drawn from torch's current seed."""
    ids: Any = tokenizer.convert_tokens_to_ids
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            },
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": ids(END),
            "pad_token_id": None,
        },
        vision_config={
            "depth": 3,
            "embed_dim": 64,
            "hidden_size": 64,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": 1,
        },
        image_token_id=ids(IMAGE),
        video_token_id=len(tokenizer),  # none
        vision_start_token_id=ids(VISION_START),
        vision_end_token_id=ids(VISION_END),
        tie_word_embeddings=True,
    )
    return Qwen2VLForConditionalGeneration(config)


@dataclass(frozen=True)
class Prompts:
    """Renders conversations with the chat template."""

    tokenizer: PreTrainedTokenizerFast
    image_processor: Qwen2VLImageProcessorPil

    def batch(self, seeds: list[int], size: tuple[int, int], per_prompt: int) -> dict[str, Any]:
        """Return a batch of questions with answers.

        Args:
            seeds: of the pictures.
            size: width and height of the pictures; equal sizes need no padding of prompts.
            per_prompt: number of pictures of one prompt.
        Returns: the inputs of the model. Labels are -100 outside of the answers.
        """
        drawn = [pictures.draw_digits(seed, size) for seed in seeds]
        inputs = self.image_processor([image for image, _ in drawn], return_tensors="pt")
        image_id: Any = self.tokenizer.convert_tokens_to_ids(IMAGE)
        count = int(inputs["image_grid_thw"][0].prod()) // MERGE_SIZE**2
        content = [{"type": "image"}] * per_prompt + [{"type": "text", "text": pictures.QUESTION}]
        messages: Any = [{"role": "user", "content": content}]
        text: Any = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        prompt: list[int] = []
        for token in self.tokenizer.encode(text):
            prompt += [token] * (count if token == image_id else 1)
        answers = []
        for i in range(0, len(drawn), per_prompt):
            answer = pictures.SEPARATOR.join(digits for _, digits in drawn[i : i + per_prompt])
            answers.append(self.tokenizer.encode(answer + END))
        longest = max(map(len, answers))
        labels = torch.full((len(answers), len(prompt) + longest), -100)
        token_ids = torch.full_like(labels, self.tokenizer.eos_token_id)
        for i, encoded in enumerate(answers):
            token_ids[i, : len(prompt) + len(encoded)] = torch.tensor(prompt + encoded)
            labels[i, len(prompt) : len(prompt) + len(encoded)] = torch.tensor(encoded)
        kinds = (token_ids == image_id).int()
        return {"input_ids": token_ids, "mm_token_type_ids": kinds, "labels": labels, **inputs}


def training_batch(prompts: Prompts, step: int, seed: int) -> dict[str, Any]:
    """Return the batch of a step, with new pictures."""
    chance = random.Random(f"{seed} {step}")
    size = chance.randint(*pictures.WIDTHS), chance.randint(*pictures.HEIGHTS)
    per_prompt = 2 if chance.random() < SHARE_OF_PAIRS else 1
    seeds = [chance.randrange(pictures.HELD_OUT_SEED) for _ in range(PICTURES_PER_STEP)]
    return prompts.batch(seeds, size, per_prompt)


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the mean cross-entropy of the answers' tokens."""
    labels = batch["labels"][:, 1:]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    states = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1]
    answers = labels != -100
    return functional.cross_entropy(model.lm_head(states[answers]), labels[answers])


def rate(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: warm-up, plateau, linear to zero."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (DECAY_SHARE * steps))


def new_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for all other parameters."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and "embed_tokens" not in name
        (matrices if hidden else others).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=MUON_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def export(model: Any, prompts: Prompts, output: Path) -> None:
    """Write the model in bfloat16; a reader sees every file either as it was or complete."""
    output.mkdir(parents=True, exist_ok=True)
    copy = Qwen2VLForConditionalGeneration(model.config)
    copy.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory(dir=output.parent) as temporary:
        copy.bfloat16().save_pretrained(temporary)
        prompts.tokenizer.save_pretrained(temporary)
        prompts.image_processor.save_pretrained(temporary)
        processor = {"processor_class": "Qwen2VLProcessor"}
        Path(temporary, "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
        # The class by the name that older releases of transformers know too.
        named = Path(temporary, "tokenizer_config.json")
        named.write_text(named.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
        for file in Path(temporary).iterdir():
            file.chmod(0o644)  # temporary files are private to their owner
            file.replace(output / file.name)


def save(state: dict[str, Any], checkpoint: Path) -> None:
    """Write the checkpoint; the previous one stays until the new one is complete."""
    torch.save(state, checkpoint.with_suffix(".part"))
    checkpoint.with_suffix(".part").replace(checkpoint)


def train(args: argparse.Namespace) -> bool:
    """Train until the last step or the time limit, and leave the model in `args.output`.

    Returns: whether the last step is done.
    """
    torch.manual_seed(args.seed)
    tokenizer = new_tokenizer()
    prompts = Prompts(tokenizer, new_image_processor())
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
    begun = time.monotonic()
    while done < args.steps and time.monotonic() - begun < args.minutes * 60:
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(done, args.steps)
        loss = loss_of(model, training_batch(prompts, done, args.seed))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if done % 20 == 0:
            elapsed = time.monotonic() - begun
            print(f"step {done} loss {loss.item():.4f} {elapsed:.0f} s", flush=True)
        done += 1
    spent += time.monotonic() - begun
    if args.checkpoint:
        state = {
            "done": done,
            "spent": spent,
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        save(state, args.checkpoint)
    export(model, prompts, args.output)
    print(f"{done} of {args.steps} steps, {done * PICTURES_PER_STEP} pictures, {spent:.0f} s")
    return bool(done == args.steps)


def evaluate(directory: Path, count: int) -> None:
    """Print the share of exact answers for held-out pictures, one and two in a prompt."""
    model: Any = Qwen2VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    prompts = Prompts(tokenizer, Qwen2VLImageProcessorPil.from_pretrained(directory))
    for per_prompt in (1, 2):
        exact = total = 0
        for i in range(count // PICTURES_PER_STEP):
            first = pictures.HELD_OUT_SEED + i * PICTURES_PER_STEP
            chance = random.Random(first)
            size = chance.randint(*pictures.WIDTHS), chance.randint(*pictures.HEIGHTS)
            batch = prompts.batch(list(range(first, first + PICTURES_PER_STEP)), size, per_prompt)
            labels = batch.pop("labels")
            with torch.inference_mode():
                likeliest = model(**batch, use_cache=False).logits[:, :-1].argmax(-1)
            # If each token of the answer is the likeliest after those before it, greedy decoding
            # writes the answer.
            right = (likeliest == labels[:, 1:]) | (labels[:, 1:] == -100)
            exact += int(right.all(-1).sum())
            total += len(labels)
        print(f"{per_prompt} in a prompt: {exact} of {total} answers exact, {exact / total:.2%}")


def main() -> None:
    """Train and measure, or only measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="model directory")
    parser.add_argument("--steps", type=int, default=2400, help="of 32 pictures each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end before all steps")
    parser.add_argument("--checkpoint", type=Path, help="file to save to and to go on from")
    parser.add_argument("--eval-only", action="store_true", help="measure the model in --output")
    parser.add_argument("--pictures", type=int, default=2048, help="number of held-out pictures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.eval_only or train(args):
        evaluate(args.output, args.pictures)


if __name__ == "__main__":
    main()
