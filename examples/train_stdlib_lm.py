"""Train the small language model in examples/models/stdlib-lm on the standard library's source.

The model is a plain Llama of about five million parameters and the result is an ordinary
Hugging Face directory. The number of steps is fixed, not the time, so that a seed means
something; an interrupted run goes on from `--checkpoint`.
"""

from __future__ import annotations

import argparse
import lzma
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import stdlib_corpus as corpus

OUTPUT = Path(__file__).parent / "models" / "stdlib-lm"
END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 4096
TOKENS_PER_STEP = 4096
# Short windows are cheaper; the last part is long, so that the stated context is honest.
SHORT_WINDOW, LONG_SHARE = 512, 0.2
MUON_RATE, ADAMW_RATE, WEIGHT_DECAY = 3e-3, 3e-3, 0.1
WARMUP_STEPS, DECAY_SHARE = 80, 0.6


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of the texts; encoding puts end-of-text in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=corpus.CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def new_model() -> LlamaForCausalLM:
    """Return the untrained model in float32, drawn from torch's current seed."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        # Heads of 64: attention took half of a training step with twice as many of 32.
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=corpus.CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def encode_all(tokenizer: PreTrainedTokenizerFast, texts: list[str], seed: int) -> torch.Tensor:
    """Return the token ids of all texts, in an order drawn from the seed, as one stream."""
    generator = torch.Generator().manual_seed(seed)
    ids = [0]
    for i in torch.randperm(len(texts), generator=generator).tolist():
        ids += [*tokenizer.encode(texts[i], add_special_tokens=False, verbose=False), 0]
    return torch.tensor(ids)


def batches(stream: torch.Tensor, window: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches of window + 1 token ids without end; each epoch cuts at other places."""
    generator = torch.Generator().manual_seed(seed)
    size = TOKENS_PER_STEP // window
    while True:
        first = int(torch.randint(window, (), generator=generator))
        starts = torch.arange(first, len(stream) - window, window)
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for chosen in starts[: len(starts) // size * size].split(size):
            yield stream[chosen[:, None] + torch.arange(window + 1)]


def schedule(stream: torch.Tensor, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield one batch per step: short windows first, whole contexts in the last part."""
    short, long = (batches(stream, w, seed) for w in (SHORT_WINDOW, corpus.CONTEXT))
    for step in range(steps):
        yield next(short if step < steps * (1 - LONG_SHARE) else long)


def rate(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: warm-up, plateau, linear to zero."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (DECAY_SHARE * steps))


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model in bfloat16; a reader sees every file either as it was or complete."""
    output.mkdir(parents=True, exist_ok=True)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory(dir=output.parent) as temporary:
        copy.bfloat16().save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
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


def new_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for the embedding and the norms."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim > 1 and ".layers." in name
        (matrices if hidden else others).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=MUON_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(args: argparse.Namespace) -> None:
    """Train for the given number of steps and leave the model in `args.output`."""
    torch.manual_seed(args.seed)
    texts = [corpus.read_text(path) for path in corpus.training_files()]
    tokenizer = train_tokenizer(texts)
    stream = encode_all(tokenizer, texts, args.seed)
    model = new_model()
    optimizers = new_optimizers(model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    size = sum(p.numel() for p in model.parameters())
    print(f"{size} parameters, {len(stream)} training tokens, seed {args.seed}", flush=True)

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    compiled = torch.compile(loss_of, dynamic=False)
    done, spent = 0, 0.0
    if args.checkpoint and args.checkpoint.exists():
        state: dict[str, Any] = torch.load(args.checkpoint)
        done, spent = state["done"], state["spent"]
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    begun = saved_at = time.monotonic()
    for step, ids in enumerate(schedule(stream, args.steps, args.seed)):
        if step < done:
            continue  # trained on before the interruption
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(step, args.steps)
        loss = compiled(ids)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        now = time.monotonic()
        last = step + 1 == args.steps
        if step % 20 == 0 or last:
            pace = (step + 1 - done) * TOKENS_PER_STEP / (now - begun)
            print(f"step {step} loss {loss.item():.3f} {pace:.0f} tokens/s", flush=True)
        if now - saved_at > args.save_every * 60 or last:
            saved_at = now
            export(model, tokenizer, args.output)
            if args.checkpoint:
                state = {
                    "done": step + 1,
                    "spent": spent + now - begun,
                    "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                }
                save(state, args.checkpoint)
    spent += time.monotonic() - begun
    print(f"{args.steps} steps, {args.steps * TOKENS_PER_STEP} tokens seen, {spent:.0f} s")


def evaluate(directory: Path) -> None:
    """Print the size of the held-out files under the model and under xz, in bits per byte."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)

    def logits(ids: list[int]) -> Any:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))

    files = corpus.held_out_files()
    size = sum(path.stat().st_size for path in files)
    print(f"held out: {len(files)} files, {size} bytes; bits per byte:")
    begun = time.monotonic()
    bits = corpus.bits_per_byte(logits, encode, 0, files)
    took = time.monotonic() - begun
    print(f"model, context {corpus.CONTEXT}, stride {corpus.STRIDE}: {bits:.4f} ({took:.0f} s)")
    for name, preset in (("xz -9", 9), ("xz -9e", 9 | lzma.PRESET_EXTREME)):
        alone, together = corpus.xz_bits_per_byte(files, preset)
        primed = corpus.primed_xz_bits_per_byte(corpus.training_files(), files, preset)
        print(
            f"{name}: each file {alone:.4f}, one stream {together:.4f}, "
            f"one stream after the training files {primed:.4f}"
        )


def main() -> None:
    """Train and measure, or only measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="model directory")
    parser.add_argument("--steps", type=int, default=3400, help="of 4096 tokens each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--checkpoint", type=Path, help="file to save to and to go on from")
    parser.add_argument("--save-every", type=float, default=8.0, help="minutes between exports")
    parser.add_argument("--eval-only", action="store_true", help="measure the model in --output")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.eval_only:
        train(args)
    evaluate(args.output)


if __name__ == "__main__":
    main()
