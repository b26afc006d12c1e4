"""Speed of a model on a platform without kernels, with and without those of the CPU platform.

    python benchmarks/bare_platform.py MODEL_DIR [--dtype float32] [--threads 2] [--rounds 7]

Four configurations take turns on the same processor: the CPU platform, a platform of a third party
that runs its kernels, one that does not and has those of torch's own functions, and the references
alone. Ratios are to the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from decode import Row, interposer_run, measure
from interposer import (
    Capability,
    Config,
    Device,
    Memory,
    Platform,
    PlatformEntry,
    Verdict,
    hookimpl,
    register,
)
from interposer_cpu import CPUPlatform
from interposer_engine import LanguageModel, load


class Bare(Platform):
    """The processor as a device that nobody has written a kernel for."""

    name = "bare"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Verdict:
        return Verdict.accept()

    def devices(self) -> Sequence[Device]:
        return [Device(self.name, "cpu", self.name, self.capability("cpu"))]

    def capability(self, device: str) -> Capability:
        return Capability("bare")

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    def memory(self, device: str) -> Memory:
        return CPUPlatform().memory(device)

    def synchronize(self, device: str) -> None:
        pass


class Lent(Bare):
    """The same with the processor's features, which its kernels ask for."""

    name = "lent"

    def capability(self, device: str) -> Capability:
        return CPUPlatform().capability(device)


ENTRIES = [
    PlatformEntry("bare", f"{__name__}:Bare", score=-5.0),
    PlatformEntry("lent", f"{__name__}:Lent", score=-5.0, runs=("cpu",)),
]


def main() -> None:
    """Parse the arguments and print a line per kind of work, tokens per second with spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    def loaded(platform: str, kernels: Mapping[str, str] | None = None) -> LanguageModel:
        # Without what is installed besides.
        config = Config(platform=platform, plugins={"interposer-cpu"}, kernels=kernels or {})
        return load(arguments.model_dir, arguments.dtype, config=config)

    register(SimpleNamespace(interposer_records=hookimpl(lambda: ENTRIES)), name="bare")
    models = {
        "interposer": loaded("cpu"),
        "runs=cpu": loaded("lent"),
        "torch": loaded("bare"),
        "references": loaded("bare", {"*": "reference"}),
    }
    runs = {name: interposer_run(lm) for name, lm in models.items()}
    print(
        f"{arguments.model_dir} {arguments.dtype}, {arguments.threads} threads, tokens per second"
    )
    vocab_size = models["interposer"].engine.model.config.vocab_size
    for batch, prompt in ((1, 32), (1, 512), (4, 128), (8, 128)):
        measure(runs, Row(batch, prompt, arguments.new_tokens), vocab_size, arguments.rounds)


if __name__ == "__main__":
    main()
