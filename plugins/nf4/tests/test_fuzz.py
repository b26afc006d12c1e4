"""A checkpoint with something wrong in it is refused, or loads as what it then says.

What it says is read here a second time, from the description of the format.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from interposer import Config
from interposer.errors import InterposerError
from interposer_engine import load
from interposer_ops.layers.linear import Linear, PlainLinear

NAMES = ("nf4-double", "fp4", "nf4-straddling", "int8")
BLOCK = "model.layers.0"
NUMBERS = (True, 0, -1, 3, 64.0, 1e300, 2**40, 2**70)
ODD: tuple[Any, ...] = (None, *NUMBERS, "", "nf4", "fp4", [], [64, 64], {})
DTYPES = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64)
Tensors = dict[str, torch.Tensor]


def weight_of(tensors: Tensors, layer: str) -> torch.Tensor:
    """Return the float32 weight that is stored for a layer, by the words of the format."""
    stored = tensors[f"{layer}.weight"]
    if f"{layer}.SCB" in tensors:
        # Ones behind the shape of a scale per row mean nothing.
        return stored.double() * tensors[f"{layer}.SCB"].double().reshape(-1, 1) / 127
    below = {
        name.removeprefix(f"{layer}.weight."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{layer}.weight.")
    }
    if not below:
        return stored
    (state,) = (json.loads(bytes(t.tolist())) for n, t in below.items() if n[:11] == "quant_state")
    absmax = below["absmax"].flatten()
    if "nested_absmax" in below:
        codes = absmax.long()
        outer = below["nested_absmax"].flatten().float()
        outer = outer[torch.arange(len(codes)) // state["nested_blocksize"]]
        absmax = below["nested_quant_map"].flatten().float()[codes] * outer
        absmax = absmax + torch.tensor(float(state["nested_offset"]))
    packed = stored.flatten().view(torch.uint8)
    codes = torch.stack((packed // 16, packed % 16), 1).flatten().long()
    scales = absmax.float()[torch.arange(len(codes)) // state["blocksize"]]
    shape: list[int] = state["shape"]
    return (below["quant_map"].flatten().float()[codes] * scales).view(shape)


def held_weight(layer: Linear) -> torch.Tensor:
    """Return the float64 weight that the reference computes with."""
    weight: torch.Tensor = layer.operands[0]
    scales: torch.Tensor = layer.operands[1]
    if weight.dtype == torch.int8:
        return weight.double() * scales.double()
    codebook: torch.Tensor = layer.operands[2]
    values = codebook[torch.stack((weight // 16, weight % 16), -1).flatten(1).long()]
    inputs_per_scale = values.shape[1] // scales.shape[1]
    return values.double() * scales.double().repeat_interleave(inputs_per_scale, 1)


def mutate(rng: random.Random, path: Path) -> str:
    """Change one thing in a checkpoint and return what."""
    file = path / "model.safetensors"
    change = rng.choice(CHANGES)
    if change is raw:
        return raw(rng, file)
    if change is setting:
        return setting(rng, path / "config.json")
    tensors = load_file(file)
    of_layers = [name for name in sorted(tensors) if BLOCK in name and "norm" not in name]
    name = rng.choice(of_layers)
    told = f"{change.__name__} {name}: {change(rng, tensors, name)}"
    save_file(tensors, file)
    return told


def raw(rng: random.Random, file: Path) -> str:
    content = bytearray(file.read_bytes())
    place = rng.randrange(len(content)) if rng.random() < 0.5 else rng.randrange(4000)
    if rng.random() < 0.2:
        del content[place:]
    else:
        content[place] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return f"raw {place} of {len(content)}"


def setting(rng: random.Random, file: Path) -> str:
    config = json.loads(file.read_text(encoding="utf-8"))
    settings = config["quantization_config"]
    name = rng.choice([*settings, "load_in_2bit"])
    settings[name] = rng.choice(ODD)
    file.write_text(json.dumps(config), encoding="utf-8")
    return f"{name} = {settings[name]!r}"


def bits(rng: random.Random, tensors: Tensors, name: str) -> object:
    content = tensors[name].clone().flatten().view(torch.uint8)
    place = rng.randrange(len(content))
    content[place] ^= 1 << rng.randrange(8)
    tensors[name] = content.view(tensors[name].dtype).view(tensors[name].shape)
    return place


def length(rng: random.Random, tensors: Tensors, name: str) -> object:
    flat = tensors[name].flatten()
    count = rng.choice((0, 1, len(flat) // 2, len(flat) - 1, len(flat) + 1, 2 * len(flat)))
    tensors[name] = torch.cat((flat, flat))[:count].clone()
    return count


def form(rng: random.Random, tensors: Tensors, name: str) -> object:
    tensor = tensors[name]
    shapes = ((-1,), (1, -1), (-1, 1), tuple(reversed(tensor.shape)))
    tensors[name] = tensor.reshape(rng.choice(shapes)).clone()
    return list(tensors[name].shape)


def dtype(rng: random.Random, tensors: Tensors, name: str) -> object:
    chosen = rng.choice(DTYPES)
    tensors[name] = tensors[name].to(chosen)
    return chosen


def number(rng: random.Random, tensors: Tensors, name: str) -> object:
    tensor = tensors[name].clone()
    chosen = rng.choice((0, 1, 127) if not tensor.is_floating_point() else (0.0, -1.0, 3e38, 1e-42))
    if tensor.is_floating_point() and rng.random() < 0.5:
        chosen = rng.choice((torch.nan, torch.inf, -torch.inf))
    tensor.view(-1)[rng.randrange(tensor.numel())] = chosen
    tensors[name] = tensor
    return chosen


def removed(rng: random.Random, tensors: Tensors, name: str) -> object:
    tensor = tensors.pop(name)
    if rng.random() < 0.5:
        other = rng.choice(sorted(tensors))
        tensors[rng.choice((name.upper(), f"{name}.x", other))] = tensor
    return "or renamed"


def fact(rng: random.Random, tensors: Tensors, name: str) -> object:
    """Change the state of a layer; where there is none, a bit."""
    states = [name for name in sorted(tensors) if "quant_state" in name]
    if not states:
        return bits(rng, tensors, name)
    name = rng.choice(states)
    facts = json.loads(bytes(tensors[name].tolist()))
    key = rng.choice([*facts, "zero_point"])
    if rng.random() < 0.2:
        facts.pop(key, None)
    else:
        facts[key] = rng.choice(ODD)
    content = json.dumps(facts)
    if rng.random() < 0.2:
        content = content[: rng.randrange(len(content))]
    tensors[name] = torch.tensor(list(content.encode()), dtype=torch.uint8)
    return content


CHANGES: tuple[Callable[..., object], ...] = (
    raw,
    setting,
    bits,
    length,
    form,
    dtype,
    number,
    removed,
    fact,
    fact,
)


def judge(path: Path) -> bool:
    """Return whether the checkpoint loads; then it must compute with what is stored."""
    config = Config(kernels={"nf4_linear": "reference", "w8a16_linear": "reference"})
    try:
        lm = load(path, dtype="float32", config=config)
    except InterposerError:
        return False
    tensors = load_file(path / "model.safetensors")
    for layer in lm.engine.model.modules():
        if isinstance(layer, Linear) and not isinstance(layer.method, PlainLinear):
            parent = layer.prefix.rpartition(".")[0]
            stored = torch.cat([weight_of(tensors, f"{parent}.{part}") for part in layer.parts])
            actual = held_weight(layer)
            # float32 rounds a product, and the quotient of a scale and 127, by which integers up
            # to 128 are multiplied: to half of 2^-149 where it is subnormal.
            smallest = 64 * 2.0**-149
            torch.testing.assert_close(actual, stored.double(), rtol=2**-22, atol=smallest)
    return True


def fuzz(seeds: range, copied: Callable[[str], Path]) -> list[bool]:
    originals = [copied(name) for name in NAMES]
    loaded = []
    for seed in seeds:
        rng = random.Random(seed)
        path = rng.choice(originals)
        kept = {file: file.read_bytes() for file in path.iterdir()}
        told = ""
        try:
            told = mutate(rng, path)
            loaded.append(judge(path))
        except BaseException as error:
            error.add_note(f"seed {seed}, {path.name}: {told}")
            raise
        finally:
            for file, content in kept.items():
                file.write_bytes(content)
    return loaded


@pytest.mark.slow
def test_some_changes(copied: Callable[[str], Path]) -> None:
    loaded = fuzz(range(80), copied)
    assert True in loaded
    assert False in loaded


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 500))
def test_many_changes(first: int, copied: Callable[[str], Path]) -> None:
    loaded = fuzz(range(first, first + 500), copied)
    assert 50 < sum(loaded) < 450
