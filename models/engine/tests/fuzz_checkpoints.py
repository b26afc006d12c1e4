"""Load mutations of small valid checkpoints of one method or family; print what came of them.

In a process of its own, whose memory is bounded: what a file claims must not be believed before it
is checked. Each mutation has to load and generate, or to raise one of the documented errors.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer, models

from interposer import Config, PluggableLayer, current_registry
from interposer.errors import CheckpointError, InterposerError
from interposer.records import ModelEntry, SchemeEntry, load_target
from interposer_engine import load
from interposer_engine._checkpoint.tensors import places_of
from interposer_engine._planning import plan

SECONDS = 30
BYTES = 2**30
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
# Of the methods that quantize something else than linear layers.
MIXTURE = {
    **MODEL,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention"],
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
}
MODELS = {"mxfp4": MIXTURE}
JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    3,
    7,
    10**9,
    10**30,
    0.5,
    float("nan"),
    "",
    "x",
    "re:[",
    "int",
    "float",
    "../../etc/passwd",
    [],
    [0, 0],
    [None],
    {},
    {"a": {"b": []}},
)
# Of fields of families.
VALUES: tuple[Any, ...] = (
    2,
    16,
    2**24,
    2**31 - 1,
    2**63,
    1e-30,
    1e30,
    False,
    [0, 1, 1],
    ["full_attention"] * 3,
    ["sliding_attention", "full_attention", "chunked_attention"],
    {"rope_type": "yarn", "factor": 0},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": []},
    {"full_attention": {"rope_type": "linear"}},
)
POLICY = Config(canary="off", tables=False)


class Slow(BaseException):
    """A mutation took longer than it may; no handler of errors catches it."""


def family_of(name: str) -> ModelEntry | None:
    """Return the record of the model family of that name."""
    return next((r for _, r in current_registry().records(ModelEntry) if r.name == name), None)


def examples(method: str) -> list[dict[str, Any]]:
    """Return the configs of models that a family, or the scheme of a method, has as examples."""
    family = family_of(method)
    if family is not None:
        return [copy.deepcopy(dict(each)) for each in load_target(family.examples)().values()]
    entries = [r for _, r in current_registry().records(SchemeEntry) if r.method == method]
    (entry,) = [entry for entry in entries if entry.examples]
    every = [copy.deepcopy(dict(each)) for each in load_target(entry.examples)().values()]
    return [{**MODELS.get(method, MODEL), "quantization_config": each} for each in every]


def valid(folder: Path, config: dict[str, Any], seed: int) -> tuple[dict[str, Any], bytes]:
    """Return the config and the weights of a small checkpoint that it describes."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(save({}))
    model = plan(folder, "float32", config=POLICY).model
    layers = [module for module in model.modules() if isinstance(module, PluggableLayer)]
    generator = torch.Generator().manual_seed(seed)
    tensors, shares = dict[str, torch.Tensor](), dict[Any, torch.Tensor]()
    for name, where in places_of(layers)[0].items():
        parameter = where.parameter
        sample = getattr(parameter, "sample", None)
        whole = sample(generator) if sample else some(parameter, generator)
        part = where.of(whole).clone()
        part = (part.mT if where.is_transposed else part).contiguous()
        # What speaks of the input has to be the same for layers that run as one product.
        shared = shares.setdefault((name.rpartition(".")[2], part.shape), part)
        alike = part.ndim < 2 and not name.endswith("weight_shape")
        tensors[name] = shared.clone() if alike else part
    weights = save(tensors)
    (folder / "model.safetensors").write_bytes(weights)
    return config, weights


def some(parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers of the form of ``parameter``, which may be scales."""
    if parameter.is_floating_point():
        numbers = 0.5 + torch.rand(tuple(parameter.shape), generator=generator)
        return numbers.to(parameter.dtype)
    shape = (*parameter.shape, parameter.itemsize)
    bits = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return bits.view(parameter.dtype).reshape(tuple(parameter.shape))


def spoil(value: Any, rng: random.Random) -> Any:
    """Return JSON data of which one place is changed, dropped or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        match rng.randrange(6):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, rng.choice(("x", key.upper(), key + "s")): value[key]}
            case _:
                return {**value, key: spoil(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], spoil(value[place], rng), *value[place + 1 :]]
    return copy.deepcopy(rng.choice(JUNK))


def spoil_settings(config: dict[str, Any], weights: bytes, rng: random.Random) -> tuple[Any, bytes]:
    settings = config["quantization_config"]
    return {**config, "quantization_config": spoil(settings, rng)}, weights


def spoil_config(config: dict[str, Any], weights: bytes, rng: random.Random) -> tuple[Any, bytes]:
    return spoil(config, rng), weights


def spoil_header(config: dict[str, Any], weights: bytes, rng: random.Random) -> tuple[Any, bytes]:
    """Change what the file says of one tensor: its name, dtype, shape or place."""
    size = struct.unpack("<Q", weights[:8])[0]
    header = json.loads(weights[8 : 8 + size])
    name = rng.choice(sorted(header))
    match rng.randrange(5):
        case 0:
            header[name + "x"] = header.pop(name)
        case 1:
            del header[name]
        case 2:
            header[rng.choice(sorted(header))] = header[name]
        case 3:
            dtypes = ("F32", "F16", "BF16", "I32", "U8", "I8", "F8_E4M3", "BOOL", "I64", "F4")
            header[name]["dtype"] = rng.choice(dtypes)
        case _:
            header[name] = spoil(header[name], rng)
    text = json.dumps(header).encode()
    return config, struct.pack("<Q", len(text)) + text + weights[8 + size :]


def spoil_bytes(config: dict[str, Any], weights: bytes, rng: random.Random) -> tuple[Any, bytes]:
    """Overwrite some bytes anywhere, in the numbers mostly."""
    spoiled = bytearray(weights)
    for _ in range(rng.choice((1, 1, 4, 64))):
        start = rng.randrange(len(spoiled))
        run = bytes([rng.choice((0x00, 0xFF, 0x7F, rng.randrange(256)))]) * rng.choice((1, 4, 64))
        spoiled[start : start + len(run)] = run
    return config, bytes(spoiled)


def cut(config: dict[str, Any], weights: bytes, rng: random.Random) -> tuple[Any, bytes]:
    """End the file early, or late."""
    if rng.random() < 0.2:
        return config, weights + bytes(rng.randrange(1, 100))
    return config, weights[: rng.randrange(len(weights))]


def spoil_fields(config: dict[str, Any], weights: bytes, rng: random.Random) -> tuple[Any, bytes]:
    """Change one or two fields that the family reads, whether they are stated or not."""
    found = current_registry().records(ModelEntry)
    (reads,) = (r.reads for _, r in found if config["architectures"][0] in r.architectures)
    whole = spoiled = copy.deepcopy(config)
    # Of two sides, each has its fields in an object.
    if sides := [side for side in ("encoder", "decoder") if isinstance(whole.get(side), dict)]:
        spoiled = whole[rng.choice(sides)]
    for name in rng.sample(sorted(reads), rng.choice((1, 1, 2))):
        value = spoiled.get(name)
        if isinstance(value, dict | list) and rng.random() < 0.8:
            spoiled[name] = spoil(value, rng)
        elif type(value) is int and rng.random() < 0.5:
            spoiled[name] = rng.choice((value + 1, value - 1, 2 * value, value // 2, -value))
        else:
            spoiled[name] = copy.deepcopy(rng.choice((*JUNK, *VALUES)))
    return whole, weights


SPOILERS: tuple[Callable[..., tuple[Any, bytes]], ...] = (
    spoil_settings,
    spoil_settings,
    spoil_config,
    spoil_header,
    spoil_header,
    spoil_bytes,
    cut,
)
FAMILY_SPOILERS = (*[spoil_fields] * 4, spoil_config, spoil_header, spoil_header, cut)


def tried(folder: Path, config: Any, weights: bytes) -> str:
    """Return the name of the documented error of loading, or an empty text; else raise."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    try:
        lm = load(folder, "float32", config=POLICY, cache_tokens=64, max_sequences=1)
        lm.generate([[1, 2, 3]], max_new_tokens=1)
    except InterposerError as error:
        if len(str(error)) < 20:
            raise AssertionError(f"the error says too little: {error}") from error
        # Once a tensor is read, it is named by what it is called in the checkpoint.
        places = (folder.name, "model.", "lm_head", "transformer.", "backbone.", "gpt_neox.")
        if isinstance(error, CheckpointError) and not any(p in str(error) for p in places):
            raise AssertionError(f"the error names no file and no tensor: {error}") from error
        return type(error).__name__
    return ""


def main() -> None:
    """Print the numbers of mutations that loaded, or raised each error, and other failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    spoilers = SPOILERS if family_of(arguments.method) is None else FAMILY_SPOILERS
    rng, found, wrong = random.Random(arguments.seed), Counter[str](), []

    def interrupt(*_: object) -> None:
        raise Slow(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, interrupt)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = {f"w{number}": number for number in range(MODEL["vocab_size"])}
        Tokenizer(models.WordLevel(words, "w0")).save(str(folder / "tokenizer.json"))
        originals = []
        for described in examples(arguments.method):
            try:
                originals.append(valid(folder, described, 0))
            except InterposerError:
                continue  # it suits no model of this size, or no layers that are fused
            load(folder, "float32", config=POLICY, cache_tokens=64, max_sequences=1)
        assert originals, "no example suits the model"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for number in range(arguments.count):
            spoiler = rng.choice(spoilers)
            config, weights = spoiler(*rng.choice(originals), rng)
            begun = time.perf_counter()
            signal.alarm(SECONDS)
            try:
                found[tried(folder, config, weights)] += 1
            except (Exception, Slow) as error:  # noqa: BLE001 - each is a fault to be told
                trace = "".join(traceback.format_exception(error)[-3:])
                facts = json.dumps(
                    config["quantization_config"]
                    if isinstance(config, dict) and "quantization_config" in config
                    else config
                )
                wrong.append(f"{number}, {spoiler.__name__}: {trace}\n{facts:.1500}")
            signal.alarm(0)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if peak - before > BYTES:
                seconds = time.perf_counter() - begun
                wrong.append(
                    f"{number}, {spoiler.__name__}: {peak - before} bytes, {seconds:.1f} s"
                )
                before = peak
    json.dump({"found": found, "wrong": wrong}, sys.stdout)


if __name__ == "__main__":
    main()
